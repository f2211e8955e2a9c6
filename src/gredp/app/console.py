"""What a person sees: a progress bar while it runs, a table at the end."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from gredp.app.evaluation_rows import evaluation_rows
from gredp.app.not_covered import about_figures, held_out
from gredp.guarantee import Guarantee
from gredp.privacy.accountant import delta_times, round_up
from gredp.storage.record import accuracy, dumps, shown_accuracy

if TYPE_CHECKING:
    from gredp.app.train import Run


def progress_bar(*columns: ProgressColumn, console: Console | None = None, **options: Any) -> Progress:
    """The usual columns, these, and the status of the task; on stderr."""
    shown = (*Progress.get_default_columns(), *columns, TextColumn("{task.fields[status]}"))
    return Progress(*shown, console=console or Console(stderr=True), **options)


#: columns of a terminal that all beside the bar itself may take, and the least that is left for it
BESIDE_BAR, NARROWEST = 73, 4


class Throughput(ProgressColumn):
    """Records, or persons, per second, from the expected batch size: the one that was drawn is secret."""

    def render(self, task: Task) -> Text:
        speed, what = task.finished_speed or task.speed, task.fields.get("what", "records")
        return Text("" if speed is None else f"{speed * task.fields['batch']:,.0f} {what}/s")


#: a table of confusions is shown for so many classes
FEW_CLASSES = 6


class Bar:
    """A bar over steps: time left, records per second, and an ε that is never below what was spent.

    Within an epoch it shows the ε that the epoch's end will have cost. It appears when training begins.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(max(NARROWEST, min(40, console.width - BESIDE_BAR))),
            TimeRemainingColumn(),
            MofNCompleteColumn(),
            Throughput(),
            TextColumn("{task.fields[status]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._accuracy = ""

    def resumes(self, folder: Path, steps: int, done: int, epsilon: float, target: float) -> None:
        """What a resumed run continues with."""
        spent = f"ε {round_up(epsilon, 3)} of {target:g}" if target < math.inf else "no ε"
        line = f"resuming {folder}: {done} of {steps} steps are done, {spent} is spent"
        self._progress.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def begin(self, steps: int, done: int, batch: int, what: str = "records") -> None:
        """`done` of `steps` are charged already, each on `batch` records, or persons, on average."""
        shown: dict[str, Any] = {"batch": batch, "what": what, "status": ""}
        self._task = self._progress.add_task("training", total=steps, completed=done, **shown)
        self._progress.start()

    def step(self, done: int, epsilon: float) -> None:
        """`epsilon` is at least what was spent: that of the end of the epoch."""
        self._show(f"ε ≤ {round_up(epsilon, 3)}", completed=done)

    def update(self, epsilon: float, accuracy: float, name: str = "accuracy") -> None:
        """The end of an epoch."""
        self._accuracy = f"{shown_accuracy(name, accuracy)[0]} {accuracy:.3f}"
        self._show(f"ε {round_up(epsilon, 3)}")

    def _show(self, spent: str, **changes: Any) -> None:
        self._progress.update(self._task, status=f"{spent}  {self._accuracy}", **changes)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:  # stopping one that never began would print an empty line
            self._progress.stop()


def table(title: str, rows: Sequence[tuple[str, ...]], header: Sequence[str] = ()) -> None:
    """Literal text: a folder called [b] or :tada: is neither markup nor a picture."""
    grid = Table(*header, title=title, show_header=bool(header), title_justify="left")
    for row in rows:
        grid.add_row(*row)
    Console(markup=False, emoji=False).print(grid)


def show(
    as_json: bool,
    result: Mapping[str, Any],
    title: str,
    rows: Sequence[tuple[str, ...]],
    header: Sequence[str] = (),
) -> None:
    """One JSON object, or a table."""
    if as_json:
        print(dumps(dict(result)))
    else:
        table(title, rows, header)


def show_run(run: "Run", as_json: bool, report: Path | None = None) -> None:
    """Accuracy and what it cost; the proven ε before the claimed one."""
    record, settings = run.record, run.record["settings"]
    guarantee = Guarantee.from_json(record["guarantee"])
    name, share = accuracy(record)
    unit = "record" if record["data"].get("persons") is None else "person"
    found = record.get("evaluation", {})
    result = {**record["guarantee"], name: share, "evaluation": found, "run": str(run.folder)}
    rows = [
        shown_accuracy(name, share),
        *evaluation_rows(found),
        *guarantee.rows(),
        (f"δ × {unit}s", delta_times(guarantee.delta, record["data"][f"{unit}s"])),
        ("run", str(run.folder)),
    ]
    if report is not None:
        rows.append(("report", str(report)))
    if held_out(settings):
        place = 1 + len(evaluation_rows(found))
        rows.insert(place, ("not covered by ε", about_figures(settings, record["data"])))
    if found.get("warning"):
        rows.insert(0, ("WARNING", f"the model {found['warning']}"))
    if record["insecure"]:
        rows.insert(0, ("INSECURE", "ε gives no protection against anyone who knows --insecure-seed"))
    if "tuning" in record:
        result["chosen"] = record["tuning"]["chosen"]
        chosen = ", ".join(f"{name} {value:g}" for name, value in result["chosen"].items())
        rows.insert(2, ("chosen privately", f"{chosen}; the proven ε covers the choice"))
    if record.get("steps_lost"):
        rows.insert(-2, ("lost in crashes", f"{record['steps_lost']} steps, which stay charged"))
    show(
        as_json, result, f"{settings['model']} on {record['data']['name']}, method {settings['method']}", rows
    )
    if not as_json and 0 < len(found.get("classes", ())) <= FEW_CLASSES:
        names = [row["class"] for row in found["classes"]]
        counts = [(name, *map(str, row)) for name, row in zip(names, found["confusion"])]
        table("records by class (down) and prediction (across)", counts, ("", *names))
