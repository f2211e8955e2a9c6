"""Figures in files: one style, and the same bytes for the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "gredp", "font.size": 9}


@contextmanager
def figure_file(
    path: Path, rows: int = 1, columns: int = 1, *, title: str | None = None, **options: Any
) -> Iterator[Any]:
    """Draw on the axes of the figure, which `path` then holds; `options` are those of `plt.subplots`."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, layout="constrained", **options)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date of its own the file is the same every time.
        undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        figure.savefig(path, metadata=undated | ({} if title is None else {"Title": title}))
        plt.close(figure)
