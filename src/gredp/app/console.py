"""What a person sees: a progress bar while it runs, a table at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

from gredp.guarantee import Guarantee
from gredp.privacy.accountant import delta_times, round_up

if TYPE_CHECKING:
    from gredp.app.train import Run


class Throughput(ProgressColumn):
    """Records a second, from the batch size that is expected: the one that was drawn is secret."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed * task.fields['batch']:,.0f} records/s")


class Bar:
    """A bar over steps: time left, records a second, and an ε that is never below what was spent.

    Within an epoch it shows the ε that the epoch's end will have cost. It appears when training begins.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            Throughput(),
            TextColumn("{task.fields[spent]}  {task.fields[accuracy]}"),
        )
        self._progress = Progress(*columns, console=console or Console(stderr=True))

    def begin(self, steps: int, done: int, batch: int) -> None:
        self._task = self._progress.add_task(
            "training", total=steps, completed=done, batch=batch, spent="", accuracy=""
        )
        self._progress.start()

    def step(self, done: int, epsilon: float) -> None:
        self._progress.update(self._task, completed=done, spent=f"ε ≤ {round_up(epsilon, 3)}")

    def update(self, epsilon: float, accuracy: float) -> None:
        spent, share = f"ε {round_up(epsilon, 3)}", f"accuracy {accuracy:.3f}"
        self._progress.update(self._task, spent=spent, accuracy=share)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:  # stopping one that never began would print an empty line
            self._progress.stop()


def table(title: str, rows: Sequence[tuple[str, ...]], header: Sequence[str] = ()) -> None:
    """Text as it is: a folder called [b] or :tada: is neither markup nor a picture."""
    grid = Table(*header, title=title, show_header=bool(header), title_justify="left")
    for row in rows:
        grid.add_row(*row)
    Console(markup=False, emoji=False).print(grid)


def show_run(run: "Run", report: Path | None = None) -> None:
    """Accuracy and what it cost; the proven ε before the claimed one."""
    record, settings = run.record, run.record["settings"]
    guarantee = Guarantee.from_json(record["guarantee"])
    judged_by = "test_accuracy" if "test_accuracy" in record else "validation_accuracy"
    rows = [
        (judged_by.replace("_", " "), f"{100 * record[judged_by]:.2f} %"),
        *guarantee.rows(),
        ("δ × records", delta_times(guarantee.delta, record["data"]["records"])),
        ("run", str(run.folder)),
    ]
    if report is not None:
        rows.append(("report", str(report)))
    if record["insecure"]:
        rows.insert(0, ("INSECURE", "noise from --insecure-seed: the ε below holds for nobody who knows it"))
    if "tuning" in record:
        chosen = ", ".join(f"{name} {value:g}" for name, value in record["tuning"]["chosen"].items())
        rows.insert(2, ("chosen privately", f"{chosen}; the proven ε covers the choice"))
    if record.get("steps_lost"):
        rows.insert(-2, ("lost in crashes", f"{record['steps_lost']} steps, charged all the same"))
    table(f"{settings['model']} on {record['data']['name']}, method {settings['method']}", rows)
