"""What a million normal numbers cost: the keystream of `gredp.randomness` against torch's generator.

python benchmarks/noise.py --out results/noise.json
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gredp.gradient.noise import SecretSource
from gredp.randomness import Secret
from gredp.storage.record import header, save

COUNT, ROUNDS = 1_000_000, 31


def milliseconds(draw: Callable[[], object]) -> float:
    draw()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        draw()
        times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


def main() -> None:
    torch.set_num_threads(1)
    source, generator = SecretSource(Secret()), torch.Generator().manual_seed(0)
    rows = {}
    for dtype in (torch.float32, torch.float64):
        like = torch.zeros(1, dtype=dtype)
        ours = milliseconds(lambda like=like: source.normal((COUNT,), like))
        theirs = milliseconds(lambda dtype=dtype: torch.randn(COUNT, generator=generator, dtype=dtype))
        row = {"keystream_ms": ours, "torch_ms": theirs, "ratio": round(ours / theirs, 2)}
        rows[str(dtype).removeprefix("torch.")] = row
    print(json.dumps(rows, indent=2))
    if "--out" in sys.argv:
        facts = {"command": "python benchmarks/noise.py", "normals": COUNT, "rounds": ROUNDS, "threads": 1}
        record = {**header(), **facts, "cost": rows}
        save(Path(sys.argv[sys.argv.index("--out") + 1]), record)


if __name__ == "__main__":
    main()
