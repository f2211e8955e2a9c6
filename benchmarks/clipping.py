"""Fixed and adaptive clipping norms on the bundled digits, see results/clipping.json.

python benchmarks/clipping.py

A small LeNet at ε = 2, lr 0.01, 20 epochs, three seeds for each first norm. Accuracies are of the test split;
nothing was chosen by them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gredp.storage.record import header, save

OUT = Path(__file__).parent.parent / "results" / "clipping.json"
SETTINGS = ["--model", "lenet-small", "--method", "dpsgd", "--epsilon", "2", "--lr", "0.01", "--epochs", "20"]
NORMS = (0.1, 1.0, 10.0, 100.0)
SEEDS = range(3)


def accuracy(clipping: str, norm: float, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        place = ["--out", f"{folder}/run", "--json"]
        chosen = ["--clipping", clipping, "--clip-norm", str(norm), "--seed", str(seed)]
        subprocess.run(
            [sys.executable, "-m", "gredp", "train", *SETTINGS, *chosen, *place],
            check=True,
            capture_output=True,
        )
        return float(json.loads(Path(folder, "run", "record.json").read_text())["test_accuracy"])


def main() -> None:
    rows = []
    for clipping in ("flat", "adaptive"):
        for norm in NORMS:
            found = [round(100 * accuracy(clipping, norm, seed), 2) for seed in SEEDS]
            rows.append({"clipping": clipping, "norm": norm, "accuracies": found})
            print(clipping, norm, found, statistics.mean(found), flush=True)
    save(OUT, {**header(), "command": "python benchmarks/clipping.py", "settings": SETTINGS, "rows": rows})


if __name__ == "__main__":
    main()
