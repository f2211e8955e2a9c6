"""The auditor's part of a table: a lower bound of each cell's ε, and the verdicts on the theorems."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gredp.app.jobs import read_record, record_file
from gredp.audit.lower_bound import audited_lower_bound
from gredp.paper.cells import ROWS, Cell
from gredp.paper.tables import clipped_layers
from gredp.paper.theorems import check_theorems
from gredp.storage.record import header, save


def audit_cells(cells: Iterable[Cell], out: Path, plays: int) -> None:
    """Give each record its audited ε; one game serves all cells that differ in σ, rate and steps only."""
    for cell in cells:
        record = read_record(out, cell)
        if record is None or cell.row == "plain" or "audit" in record:
            continue
        guarantee = record["guarantee"]
        bound = audited_lower_bound(
            str(ROWS[cell.row]["method"]),
            str(ROWS[cell.row].get("noise", "white")),
            str(ROWS[cell.row].get("claim", "proven")),
            record["settings"]["clipping"],
            sigma=guarantee["sigma"],
            sample_rate=guarantee["sample_rate"],
            steps=guarantee["steps"],
            layers=_layers(cell, guarantee),
            delta=guarantee["delta"],
            plays=plays,
        )
        save(record_file(out, cell), record | {"audit": bound.to_json()})


def _layers(cell: Cell, guarantee: dict[str, Any]) -> int:
    """How many blocks to play: as many as are each clipped to the norm, otherwise two stand for all."""
    return max(2, clipped_layers(guarantee)) if ROWS[cell.row].get("claim") == "paper" else 2


def audit_theorems(out: Path, trials: int, plays: int) -> list[dict[str, Any]]:
    """The verdicts, recorded in `theorems.json`."""
    verdicts = [verdict.to_json() for verdict in check_theorems(trials, plays=plays)]
    save(out / "theorems.json", header() | {"trials": trials, "plays": plays, "verdicts": verdicts})
    return verdicts
