"""What pages quote: a module for each page, with `values()` for its template and `figures()` beside it.

Prose belongs in the template; here are numbers, and rows of tables.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS, DOCS = ROOT / "results", ROOT / "docs"


@dataclass(frozen=True)
class Figure:
    draw: Callable[[Path], None]
    #: text in the file that names its records; without one, the figure is drawn again and compared
    stamp: str | None = None


def load(name: str) -> dict[str, Any]:
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(record, dict)
    return record


def markdown(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])
