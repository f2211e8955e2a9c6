"""The full self-test: plants every bug, shows which check catches it, and writes the record.

python tests/planted/record.py --out results/audit_self_test.json
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from gredp.storage.record import header, save
from planted.selftest import self_test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    rows = []
    for row in self_test():
        rows.append(row)
        print(f"{'caught' if row['caught'] else 'MISSED'}  {row['bug']}  ({row['check']})", flush=True)
    command = f"python tests/planted/record.py --out {told.out}"
    save(told.out, {**header(), "command": command, "kind": "self-test", "self_test": rows})
    sys.exit(0 if all(row["caught"] for row in rows) else 3)


if __name__ == "__main__":
    main()
