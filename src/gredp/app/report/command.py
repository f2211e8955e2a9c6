"""`gredp report`: its settings, and where it writes. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gredp.errors import GredpError
from gredp.storage.files import one_line, write


@dataclass(frozen=True)
class ReportSettings:
    """One HTML page to file: what was trained, what ε is proven and how; several runs side by side."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """folders of runs, finished or not"""
    out: str | None = None
    """the page; by default report.html in the run's folder, comparison.html in the first one's for several"""


def run_report(settings: ReportSettings) -> None:
    if not settings.runs:
        raise GredpError("name the folder of a run: gredp report runs/NAME")
    print(write_report(settings.runs, settings.out))


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page, whole or not at all, and return its path. A folder that is no run is rejected."""
    from jinja2 import TemplateError

    from gredp.app.report.facts import read_run, reject_different_data
    from gredp.app.report.page import page

    found = [read_run(run) for run in runs]
    reject_different_data(found)
    name = "report.html" if len(runs) == 1 else "comparison.html"
    path = Path(out) if out is not None else Path(runs[0]) / name
    try:
        content = page(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
        if isinstance(error, GredpError):
            raise
        folders = ", ".join(map(str, runs))
        what = f"{type(error).__name__}: {one_line(error)}"
        raise GredpError(f"a record in {folders} is not of this version of gredp ({what})") from None
    write(path, content.encode())
    return path
