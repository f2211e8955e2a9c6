"""The paper's accuracy figure, drawn from the records: accuracy against ε, spent ε and epochs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gredp.app.figure_file import figure_file
from gredp.paper.cells import color, title
from gredp.paper.tables import Line, paper_figure


def draw_epsilon(lines: Sequence[Line], path: Path) -> None:
    """For each network accuracy against the requested ε, and against the proven one."""
    with _panels(lines, path) as panels:
        for network, here, left, right in panels:
            for row in dict.fromkeys(line.cell.row for line in here):
                points = sorted((line for line in here if line.cell.row == row), key=lambda x: x.cell.epsilon)
                style: Any = {"color": color(row), "marker": "o", "label": title(row)}
                means = [line.mean for line in points]
                left.plot([line.cell.epsilon for line in points], means, **style)
                right.plot([line.proven for line in points], means, **style)
                printed = [(line.cell.epsilon, paper_figure(line.cell)) for line in points]
                known = [(x, y) for x, y in printed if y is not None]
                if known and row not in ("gredp", "shaped"):  # the paper has its own method once
                    left.plot(*zip(*known), "x:", color=color(row), alpha=0.5)
            left.set(
                title=network, xlabel="ε asked for (crosses: the paper's figures)", ylabel="test accuracy, %"
            )
            right.set(title=network, xlabel="proven ε")
            left.legend(fontsize=7)


def draw_dynamics(lines: Sequence[Line], path: Path) -> None:
    """For each network accuracy against the proven ε spent so far, and against epochs."""
    with _panels(lines, path) as panels:
        for network, here, left, right in panels:
            for line in here:
                metrics = line.records[0]["metrics"]
                accuracy = [100 * m["test_accuracy"] for m in metrics]
                style: Any = {"color": color(line.cell.row), "label": title(line.cell.row)}
                if line.cell.row != "plain":
                    left.plot([m["proven_epsilon"] for m in metrics], accuracy, **style)
                right.plot([m["epoch"] for m in metrics], accuracy, **style)
            left.set(title=network, xlabel="proven ε spent", ylabel="test accuracy, %")
            right.set(title=network, xlabel="epochs")
            right.legend(fontsize=7)


@contextmanager
def _panels(lines: Sequence[Line], path: Path) -> Iterator[list[tuple[str, list[Line], Any, Any]]]:
    """A figure with two axes for each network: (network, its lines, left, right)."""
    networks = list(dict.fromkeys(line.cell.model for line in lines))
    with figure_file(path, len(networks), 2, figsize=(9, 3.2 * len(networks)), squeeze=False) as grid:
        yield [
            (network, [line for line in lines if line.cell.model == network], left, right)
            for network, (left, right) in zip(networks, grid)
        ]
