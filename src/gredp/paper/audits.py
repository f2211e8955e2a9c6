"""The auditor's part of a table: a lower bound of each cell's ε, and the verdicts on the theorems."""

from collections.abc import Iterable
from dataclasses import asdict
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
        guarantee, settings = record["guarantee"], record["settings"]
        # As many blocks as are each clipped to the norm; otherwise two stand for all.
        paper = ROWS[cell.row].get("claim") == "paper"
        layers = max(2, clipped_layers(guarantee)) if paper else 2
        run: dict[str, Any] = {key: guarantee[key] for key in ("sigma", "sample_rate", "steps", "delta")}
        run |= {**ROWS[cell.row], "clipping": settings["clipping"]}
        bound = audited_lower_bound(**run, layers=layers, plays=plays)
        save(record_file(out, cell), record | {"audit": bound.to_json()})


def audit_theorems(out: Path, trials: int, plays: int) -> list[dict[str, Any]]:
    """The verdicts, recorded in `theorems.json`."""
    verdicts = [asdict(verdict) for verdict in check_theorems(trials, plays=plays)]
    save(out / "theorems.json", header() | {"trials": trials, "plays": plays, "verdicts": verdicts})
    return verdicts
