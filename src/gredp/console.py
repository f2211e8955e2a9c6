"""What a person sees: a progress bar while it runs, a table at the end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gredp.privacy.accountant import round_up

if TYPE_CHECKING:
    from gredp.training.loop import Run


class Bar:
    """A bar over epochs with the ε spent so far and the time left; it appears when training begins."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))

    def begin(self, epochs: int, done: int) -> None:
        self._task = self._progress.add_task("training", total=epochs, completed=done, status="")
        self._progress.start()

    def update(self, epsilon: float, accuracy: float) -> None:
        status = f"ε {round_up(epsilon, 3)}  test accuracy {accuracy:.3f}"
        self._progress.update(self._task, advance=1, status=status)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress.live.is_started:  # stopping one that never began would print an empty line
            self._progress.stop()


def table(title: str, rows: Sequence[tuple[str, ...]], header: Sequence[str] = ()) -> None:
    grid = Table(*header, title=title, show_header=bool(header), title_justify="left")
    for row in rows:
        grid.add_row(*row)
    Console().print(grid)


def show_run(run: "Run") -> None:
    """Accuracy and what it cost; the proven ε before the claimed one."""
    record, guarantee = run.record, run.record["guarantee"]
    settings, claimed = record["settings"], guarantee["claimed_epsilon"]
    bands = guarantee.get("correlation_bands", 1)
    turns = f" of {bands} parts in turn, noise correlated over as many steps" if bands > 1 else ""
    rows = [
        ("test accuracy", f"{100 * record['test_accuracy']:.2f} %"),
        ("proven ε", f"{round_up(guarantee['proven_epsilon'])} at δ = {guarantee['delta']}"),
        ("claimed ε (paper)", "none" if claimed is None else f"{round_up(claimed)} for the same noise"),
        ("accountant", guarantee["accountant"]),
        ("noise multiplier z", f"{guarantee['noise_multiplier']:.4f}"),
        ("steps", f"{guarantee['steps']} at sampling rate {guarantee['sample_rate']:.4g}{turns}"),
        ("run", str(run.folder)),
    ]
    if record["insecure"]:
        rows.insert(0, ("INSECURE", "noise from --insecure-seed: the ε below holds for nobody who knows it"))
    if record["steps_lost"]:
        rows.insert(-1, ("lost in crashes", f"{record['steps_lost']} steps, charged all the same"))
    table(f"{settings['model']} on {record['data']['name']}, method {settings['method']}", rows)
