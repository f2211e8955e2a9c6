"""From the records of cells to lines of a table: the paper's figure, ours, ε claimed, proven and audited."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gredp.app.jobs import read_record
from gredp.paper.cells import BASELINE, Cell, title
from gredp.paper.paper import ABLATIONS, CLIPPING, FROM_SCRATCH, TRANSFER
from gredp.privacy.accountant import round_up
from gredp.storage.record import accuracy

HEADER = ("row", "ε asked", "paper, %", "ours, %", "difference", "claimed ε", "proven ε", "audited ε")


@dataclass(frozen=True)
class Line:
    """What came out for one cell, over its seeds."""

    cell: Cell
    records: tuple[dict[str, Any], ...]

    @property
    def accuracies(self) -> list[float]:
        return [100 * accuracy(record)[1] for record in self.records]

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def proven(self) -> float:
        """The largest of the runs: what is promised for each."""
        return max(float(record["guarantee"]["proven_epsilon"]) for record in self.records)

    @property
    def claimed(self) -> float | None:
        claims = [record["guarantee"]["claimed_epsilon"] for record in self.records]
        return None if None in claims else max(map(float, claims))

    def shown(self) -> tuple[str, ...]:
        """As text, in the order of HEADER; the claimed ε only beside the proven one."""
        runs = len(self.records)
        spread = f" ± {statistics.stdev(self.accuracies):.2f} ({runs})" if runs > 1 else ""
        printed = paper_figure(self.cell)
        private = self.cell.row != "plain"
        half = self.cell != self.cell.in_single_precision
        single = half and any(record["settings"]["precision"] == "single" for record in self.records)
        audit = self.records[0].get("audit", {})  # the best of several games would be wrong more often
        bound = audit.get("audited_epsilon_lower", audit.get("epsilon"))  # its name in older records
        return (
            title(self.cell.row) + (" (single precision)" if single else ""),
            f"{self.cell.epsilon:g}" if private else "",
            "–" if printed is None else f"{printed:g}",
            f"{self.mean:.2f}{spread}",
            "–" if printed is None else f"{self.mean - printed:+.2f}",
            f"{round_up(self.claimed, 3)}" if private and self.claimed is not None else "–",
            f"{round_up(self.proven, 3)}" if private else "∞",
            "–" if bound is None else f"≥ {bound:.3f}",
        )


def clipped_layers(guarantee: dict[str, Any]) -> int:
    """L, that are each clipped to the norm: under the paper's calibration z = σ/√(2L)."""
    return round((float(guarantee["sigma"]) / float(guarantee["noise_multiplier"])) ** 2 / 2)


def record_of(out: Path, cell: Cell) -> dict[str, Any] | None:
    """Its record, or where there is none that of the same run in single precision."""
    return read_record(out, cell) or read_record(out, cell.in_single_precision)


def lines(cells: Iterable[Cell], out: Path) -> list[Line]:
    """Those that have a record, seeds together."""
    found: dict[str, tuple[Cell, list[dict[str, Any]]]] = {}
    for cell in cells:
        record = record_of(out, cell)
        if record is not None:
            found.setdefault(cell.group, (cell, []))[1].append(record)
    return [Line(cell, tuple(records)) for cell, records in found.values()]


def by_setting(found: Iterable[Line]) -> dict[str, list[Line]]:
    """Lines that differ in row and ε alone, under what they have in common."""
    tables: dict[str, list[Line]] = {}
    for line in found:
        cell = line.cell
        settings = [f"{key.replace('_', ' ')} {value}" for key, value in sorted(cell.settings.items())]
        title = ", ".join([f"{cell.model} on {cell.dataset}", f"{cell.epochs} epochs", *settings])
        tables.setdefault(title, []).append(line)
    return tables


def paper_figure(cell: Cell) -> float | None:
    """What the paper prints for the cell; for our own rows, the figure that its method claims."""
    epsilon = 0 if cell.row == "plain" else cell.epsilon
    changed = cell.changed
    row = "gredp-claimed" if cell.row in ("gredp", "shaped") else cell.row
    printed = TRANSFER[cell.dataset] if cell.transferred else FROM_SCRATCH
    if not changed or changed == BASELINE:
        return printed.get(cell.model, {}).get(row, {}).get(epsilon)
    if len(changed) > 1 or cell.transferred:
        return None
    setting, value = next(iter(changed.items()))
    if setting == "clip_norm":
        return CLIPPING.get(cell.model, {}).get(cast(float, value), {}).get(epsilon)
    return ABLATIONS.get(setting, {}).get(cast(float, value)) if cell.model == "lenet5" else None
