"""Writes the table of docs/own_data.md from results/tables.json; `--check` says whether it is current."""

import json
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "results" / "tables.json", ROOT / "docs" / "own_data.md"
BEGIN, END = "<!-- from results/tables.json -->\n", "<!-- end -->\n"


def page(record: dict) -> str:
    """docs/own_data.md with the table of this record."""
    epsilons = record["rows"][0]["accuracy"]
    lines = [
        "| table | records | columns | " + " | ".join(f"ε = {e}" for e in epsilons)
        + " | logistic regression, not private |",
        "|---|---|---|" + "---|" * (len(epsilons) + 1),
    ]  # fmt: skip
    for row in record["rows"]:
        cells = [*row["accuracy"].values(), row["logistic_regression"]]
        shown = " | ".join(f"{100 * mean(c):.1f} ({100 * min(c):.1f}–{100 * max(c):.1f})" for c in cells)
        lines.append(f"| {row['data']} | {row['records']} | {row['features']} | {shown} |")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    text = page(json.loads(RECORD.read_text()))
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else f"{PAGE} is not current")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
