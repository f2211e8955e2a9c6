"""`gredp reproduce`: runs the cells behind a table or figure of the paper and shows them. No torch."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import tyro

from gredp.app.jobs import read_record, run_jobs
from gredp.app.ranges import check_ranges
from gredp.errors import GredpError
from gredp.paper.cells import Cell, Scale, Target, cells


@dataclass(frozen=True)
class ReproduceSettings:
    """Run the paper's tables, figures and ablations again, its claimed ε beside the proven one."""

    target: Annotated[Target, tyro.conf.Positional]
    scale: Scale = "smoke"
    """smoke: the embedded digits, under two minutes. full: the paper's data, hours to days; --only narrows"""
    only: tuple[str, ...] = ()
    """networks and rows to run, such as: lenet5 dpsgd gredp"""
    seeds: int | None = None
    """initializations of each cell of table1; by default 3 of LeNet-5, 1 of others"""
    out: str = "reproduction"
    """folder of the records; a cell that has one is not run again"""
    runs: str = "runs/reproduce"
    """folder of the runs, from which interrupted cells are resumed"""
    workers: int | None = None
    """processes at once; by default one for each core"""
    data_dir: str | None = None
    """where NAME.npz files are; default GREDP_DATA or ~/.cache/gredp/data"""
    pretrained: str | None = None
    """for networks of table2: weights of a ResNet-18, from public data; safetensors, torchvision's names"""


def run_reproduce(settings: ReproduceSettings) -> None:
    check_ranges(settings)
    wanted = cells(settings.target, settings.scale, settings.seeds, settings.only)
    wanted = [cell if _quick(cell, Path(settings.out)) else cell.in_single_precision for cell in wanted]
    workers = settings.workers or len(os.sched_getaffinity(0))
    out, runs = Path(settings.out), Path(settings.runs)
    if settings.pretrained is None and any(cell.transferred for cell in wanted):
        if settings.target == "table2":
            raise GredpError("table2 needs --pretrained, the weights of a ResNet-18 trained on public data")
        print("skipping the transferred networks, which need --pretrained", file=sys.stderr)
        wanted = [cell for cell in wanted if not cell.transferred]
    given = {"data-dir": settings.data_dir, "pretrained": settings.pretrained}
    places = {option: path for option, path in given.items() if path is not None}
    if wanted:
        run_jobs(wanted, out, runs, workers, places, timed=True)
    elif settings.target == "table2":
        raise GredpError("table2 has no smoke scale: use --scale full")
    _audit(settings, wanted, out)
    _show(settings, out)


def _quick(cell: Cell, out: Path) -> bool:
    """Whether to run the cell in its own precision: where it was, or where the processor is quicker in it."""
    if cell == cell.in_single_precision or read_record(out, cell):
        return True
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def _audit(settings: ReproduceSettings, wanted: list[Cell], out: Path) -> None:
    from gredp.app.console import table
    from gredp.paper.audits import audit_cells, audit_theorems

    few = settings.scale == "smoke"
    audit_cells(wanted, out, plays=200 if few else 1500)
    if settings.target in ("theorems", "all"):
        verdicts = audit_theorems(out, trials=1000 if few else 10_000, plays=600 if few else 8000)
        rows = [(v["name"], v["says"], v["verdict"], v["holds"]) for v in verdicts]
        table("theorems", rows, ("statement", "what it says", "verdict", "what holds"))


def _show(settings: ReproduceSettings, out: Path) -> None:
    """One table for each target, and the figures as files beside the records."""
    from gredp.app.console import table
    from gredp.paper.figures import draw_dynamics, draw_epsilon
    from gredp.paper.tables import HEADER, by_setting, lines

    for target in get_args(Target) if settings.target == "all" else [settings.target]:
        found = lines(cells(target, settings.scale, settings.seeds, settings.only), out)
        for title, part in by_setting(found).items():
            table(f"{target}: {title}", [line.shown() for line in part], HEADER)
        for name, draw in (("figure-epsilon", draw_epsilon), ("figure-dynamics", draw_dynamics)):
            if target == name and found:
                draw(found, out / f"{name}.svg")
                print(f"figure: {out / name}.svg")
