"""`gredp audit`: what it is told, what it plays, what it prints, and how it ends. No torch until it plays."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gredp.errors import GredpError
from gredp.mechanisms import Claim, MethodName, NoiseName, mechanism
from gredp.privacy.accountant import check_delta, round_up

REFUTED, UNEXPECTED = 3, 1
MEANING = """\
"refuted" is wrong with probability at most {alpha:g}; "not refuted" says that these
attacks with so many plays found no contradiction, and is no proof."""


@dataclass(frozen=True)
class AuditSettings:
    """Play the attacker against a method, a run or your own code; is the claimed ε refuted?"""

    method: MethodName = "gredp"
    noise: NoiseName = "white"
    claim: Claim = "proven"
    """whose ε is attacked: the proven one, or the paper's for the same noise"""
    clipping: str | None = None
    """flat, per_layer, automatic, or layer_wise (the paper's Algorithm 2, its default under --claim paper)"""
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """every method, and every claim of the paper: the proven must stand, the paper's must fall"""
    self_test: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """play steps with known bugs and show that each is caught"""
    one_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """one training of a real network with many canaries: an alarm for gross errors only"""
    run: str | None = None
    """folder of a run of `gredp train`: audits its method and adds the result to its record"""
    target: str | None = None
    """module:function of your own step: [n, d] gradients in, the d released numbers out (docs/audit.md)"""
    dimension: int = 16
    """d of --target"""
    clip_norm: float = 1.0
    """the norm that --target clips a record to"""
    sigma: float | None = None
    """noise multiplier of the game (under --claim paper the paper's σ); with --target the claimed one"""
    steps: int = 1
    """steps of a run; more than one, or a rate below 1, plays whole runs"""
    sample_rate: float = 1.0
    plays: int | None = None
    """plays that count, in each world and direction; a third as many come before to fix thresholds"""
    alpha: float = 0.01
    """chance of a false alarm of the whole command"""
    delta: float = 1e-5
    """δ at which ε is shown"""
    figure: str | None = None
    """write a figure here (.svg, .png or .pdf)"""
    out: str | None = None
    """write the record here"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of a table"""

    def check(self) -> None:
        """Refuse what can be refused without playing."""
        modes = [self.all, self.self_test, self.one_run, self.run is not None, self.target is not None]
        if sum(modes) > 1:
            raise GredpError("give one of --all, --self-test, --one-run, --run and --target")
        check_delta(self.delta)
        if not 0 < self.alpha < 1:
            raise GredpError(f"--alpha must lie strictly between 0 and 1, not {self.alpha}")
        if self.plays is not None and self.plays < 20:
            raise GredpError(f"--plays must be at least 20, not {self.plays}")
        if self.sigma is not None and not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise GredpError(f"--sigma must be a positive number, not {self.sigma}")
        if self.target is not None and self.sigma is None:
            raise GredpError("--target needs --sigma: the noise multiplier that it claims")
        if self.dimension < 3 or not self.clip_norm > 0:
            raise GredpError(
                "--dimension must be at least 3 and --clip-norm above 0, "
                f"not {self.dimension} and {self.clip_norm}"
            )
        if self.steps < 1 or not 0 < self.sample_rate <= 1:
            raise GredpError(
                "--steps must be at least 1 and --sample-rate above 0 and at most 1, "
                f"not {self.steps} and {self.sample_rate}"
            )
        if self.figure is not None and Path(self.figure).suffix not in (".svg", ".png", ".pdf"):
            raise GredpError(f"--figure must end in .svg, .png or .pdf, not {self.figure}")
        for path in (self.figure, self.out):
            if path is not None and not (
                Path(path).parent.is_dir() and os.access(Path(path).parent, os.W_OK)
            ):
                raise GredpError(f"{path} cannot be written: its folder is not there or is read-only")
        mechanism(self.method, self.noise, self.claim, self.clipping)


def run_audit(settings: AuditSettings) -> int:
    """Play, show, record; the exit status: 0 not refuted, 3 refuted."""
    settings.check()
    with _progress(settings.json) as progress:
        rows, status = _play(settings, progress)
    from gredp.storage.record import dumps, header, save

    key = "self_test" if settings.self_test else "rows"
    record = {**header(), "kind": "audit", "alpha": settings.alpha, "delta": settings.delta, key: rows}
    if settings.out is not None:
        save(Path(settings.out), record)
    if settings.run is not None:
        _add_to_record(Path(settings.run), rows[0])
    if settings.figure is not None and not settings.self_test:
        from gredp.app.audit_figure import draw

        draw(record, Path(settings.figure))
    if settings.json:
        print(dumps(record))
    else:
        _show_self_test(rows) if settings.self_test else _show(rows, settings.alpha)
    return status


Progress = Callable[[str, int], None]


def _play(settings: AuditSettings, progress: Progress) -> tuple[list[dict[str, Any]], int]:
    from gredp.app.audit_cases import CASES, Case, method, run_all, run_case
    from gredp.audit.examples import BROKEN, SIGMA, self_test

    if settings.self_test:
        rows = []
        for row in self_test():
            rows.append(row)
            progress(row["bug"], len(BROKEN))
        return rows, 0 if all(row["caught"] for row in rows) else REFUTED
    if settings.all:
        rows = run_all(
            settings.alpha, settings.plays, settings.delta, lambda name: progress(name, len(CASES))
        )
        verdicts = {row["claim"]: [r["refuted"] for r in rows if r["claim"] == row["claim"]] for row in rows}
        if any(verdicts["proven"]):
            return rows, REFUTED
        return rows, 0 if all(verdicts["paper"]) else UNEXPECTED
    if settings.target is not None:
        row = _play_target(settings, progress)
        return [row], REFUTED if row["refuted"] else 0
    if settings.run is not None:
        case = _case_of_run(Path(settings.run))
    else:
        sigma = settings.sigma or (8.0 if settings.one_run else SIGMA)
        options = method(settings.method, settings.noise, settings.clipping, claim=settings.claim)
        steps = 4 if settings.one_run else settings.steps
        name = f"{settings.method}, {settings.noise} noise"
        case = Case(name, options, settings.claim, steps, settings.sample_rate, sigma, settings.one_run)
    row = run_case(case, settings.alpha, settings.plays, settings.delta, tick=progress)
    return [row], REFUTED if row["refuted"] else 0


def _play_target(settings: AuditSettings, progress: Progress) -> dict[str, Any]:
    from gredp.app.audit_cases import PLAYS
    from gredp.audit.bounds import Claim
    from gredp.audit.game import audit
    from gredp.audit.victims import load_target
    from gredp.privacy.ledger import Entry

    assert settings.target is not None
    assert settings.sigma is not None
    target = load_target(settings.target)
    claim = Claim((Entry(settings.sigma, 1.0, 1),))
    found = audit(
        target,
        ((settings.dimension,),),
        claim,
        clip_norm=settings.clip_norm,
        plays=settings.plays or PLAYS,
        alpha=settings.alpha,
        delta=settings.delta,
        tick=progress,
    )
    head = {"name": settings.target, "claim": "yours", "sigma": settings.sigma, "game": "one step"}
    return {**head, "proven_epsilon": None, **found.to_json()}


def _case_of_run(folder: Path) -> Any:
    """The method of a run, at the noise at which few plays tell most: z is linear in σ."""
    from gredp.app.audit_cases import Case, method
    from gredp.app.settings import TrainSettings, current_names

    record = _read_record(folder)
    try:
        settings = TrainSettings(**current_names(record["settings"]))
    except TypeError as error:
        raise GredpError(f"the record of {folder} is not of this version of gredp: {error}") from None
    options = method(
        settings.method,
        settings.noise,
        settings.clipping,
        claim=settings.claim,
        correlation_bands=record["guarantee"].get("correlation_bands", 1),
        **settings.options(),
    )
    return Case(f"the method of {folder.name}", options, "proven")


def _read_record(folder: Path) -> dict[str, Any]:
    from gredp.storage.record import load

    record = load(folder)
    if not isinstance(record.get("settings"), dict):
        raise GredpError(f"{folder} holds no record of a run")
    return record


def _add_to_record(folder: Path, row: dict[str, Any]) -> None:
    from gredp.storage.record import header, save

    record = _read_record(folder)
    record["audit"] = {key: header()[key] for key in ("created", "command", "versions")} | row
    save(folder / "record.json", record)


# ------------------------------------------------------------------ what a person sees


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("playing", total=None)

        def advance(name: str, total: int) -> None:
            bar.update(task, advance=1, total=total, description=name)

        yield advance


def _epsilon(value: float | None) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else f"{round_up(value, 2):.2f}"


def _show(rows: list[dict[str, Any]], alpha: float) -> None:
    """The claim, what the attack proves of it, and the proven value, side by side."""
    from gredp.app.console import table

    shown = [
        (
            row["name"] + (" (gross-error alarm)" if row["game"].startswith("one run") else ""),
            row["claim"],
            _epsilon(row["claimed_epsilon"]),
            f"{math.floor(100 * row['audited_epsilon_lower']) / 100:.2f}",  # a lower bound is rounded down
            _epsilon(row["proven_epsilon"]),
            "REFUTED" if row["refuted"] else "not refuted",
        )
        for row in rows
    ]
    header = ("mechanism", "claim", "claimed", "audited ≥", "proven", "verdict")
    table(f"ε at δ = {rows[0]['delta']:g}", shown, header)
    print(MEANING.format(alpha=alpha))


def _show_self_test(rows: list[dict[str, Any]]) -> None:
    from gredp.app.console import table

    shown = [
        (
            row["bug"],
            row["check"] if row["caught"] else "NOT CAUGHT",
            row["says"] or row["false_alarm"] or "–",
        )
        for row in rows
    ]
    table("planted bugs", shown, ("bug", "caught by", "which says"))
    print(f"{sum(row['caught'] for row in rows)} of {len(rows)} caught")
