"""A user's own images without a setting: two sets built anew, see results/own_images.json.

python benchmarks/own_images.py

Digits are the 1,797 of scikit-learn, enlarged to 28×28, as PNG in train/CLASS and test/CLASS. Textures are
3,000 color images of 64×64, stripes, checks and clouds of random colors, in CLASS folders. Each runs
`gredp train --data FOLDER --epsilon 3` three times, and once with `--method plain`, as a process each. The
defaults were chosen on splits of these same two sets, so these figures are somewhat optimistic.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from gredp.storage.record import header, save

OUT = Path(__file__).parent.parent / "results" / "own_images.json"
EPSILON = 3


def digits(root: Path) -> None:
    images, labels = load_digits().images, load_digits().target
    for i, (image, label) in enumerate(zip(images, labels)):
        folder = root / ("test" if i % 5 == 4 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray((image * 255 / 16).astype(np.uint8))
        pixels.resize((28, 28), Image.Resampling.BILINEAR).save(folder / f"{i}.png")


def textures(root: Path, count: int = 3000, size: int = 64) -> None:
    draw = np.random.default_rng(0)
    across, down = np.meshgrid(np.arange(size), np.arange(size))
    for i in range(count):
        name = ("stripes", "checks", "clouds")[i % 3]
        if name == "stripes":
            angle, pitch = draw.uniform(0, np.pi), draw.uniform(0.3, 1.2)
            wave = pitch * (across * np.cos(angle) + down * np.sin(angle)) + draw.uniform(0, 7)
            mask = (1 + np.sin(wave)) / 2
        elif name == "checks":
            side, (x, y) = draw.integers(3, 10), draw.integers(9, size=2)
            mask = (((across + x) // side + (down + y) // side) % 2).astype(float)
        else:
            frequency = np.fft.fftfreq(size)
            radius = np.hypot(frequency[:, None], frequency[None]) + 0.02
            mask = np.fft.ifft2(np.fft.fft2(draw.normal(size=(size, size))) / radius).real
            mask = (mask - mask.min()) / np.ptp(mask)
        one, other = draw.random((2, 3))
        while np.linalg.norm(one - other) < 0.3:  # a texture can be seen
            one, other = draw.random((2, 3))
        image = mask[..., None] * one + (1 - mask[..., None]) * other + draw.normal(0, 0.05, (size, size, 3))
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image.clip(0, 1)).astype(np.uint8)).save(root / name / f"{i}.png")


def run(data: Path, method: list[str], folder: Path) -> dict[str, object]:
    command = ["train", "--data", str(data), "--epsilon", str(EPSILON), *method]
    place = ["--out", str(folder / "run"), "--data-dir", str(folder / "cache"), "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gredp", *command, *place], capture_output=True, text=True, check=True
    )
    found, record = json.loads(done.stdout), json.loads((folder / "run" / "record.json").read_text())
    return {
        "command": f"gredp train --data FOLDER --epsilon {EPSILON} {' '.join(method)}".strip(),
        "records": record["data"]["records"],
        "test_records": record["data"]["test_records"],
        "test_accuracy": found["test_accuracy"],
        "balanced_accuracy": found["evaluation"]["balanced_accuracy"],
        "proven_epsilon": found["proven_epsilon"],
        "seconds": round(time.monotonic() - began, 1),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
    }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for title, build in {"digits, 28×28 gray": digits, "textures, 64×64 color": textures}.items():
            data = Path(name) / build.__name__
            build(data)
            for number, method in enumerate(([], [], [], ["--method", "plain"])):
                rows.append({"data": title, **run(data, method, Path(name) / f"{build.__name__}{number}")})
                print(rows[-1], flush=True)
    save(OUT, {**header(), "command": "python benchmarks/own_images.py", "epsilon": EPSILON, "rows": rows})


if __name__ == "__main__":
    main()
