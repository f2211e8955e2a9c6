"""Step time and peak memory of processes that keep what their steps free, and of those that do not.

python benchmarks/kept_memory.py --out results/kept_memory.json [--threads 1]
"""

import argparse
import os
from pathlib import Path

from step_time import measure

from gredp.storage.record import header, save

NETWORKS = ("lenet5", "model3", "resnet20", "alexnet")
VARIANTS = ("plain", "plain kept", "gredp", "gredp kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    os.environ["GREDP_KEEP_MEMORY"] = "0"  # of all but the kept variants
    command = f"python benchmarks/kept_memory.py --threads {told.threads} --rounds {told.rounds}"
    record = header() | {"command": command, "threads": told.threads, "rounds": told.rounds}
    record["networks"] = {n: measure(n, VARIANTS, told.rounds, told.threads) for n in NETWORKS}
    save(told.out, record)


if __name__ == "__main__":
    main()
