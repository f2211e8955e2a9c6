"""`gredp audit`: its settings, what it plays and prints, and its exit status. No torch until it plays."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gredp.app.ranges import check_ranges
from gredp.app.settings import Flag
from gredp.errors import GredpError
from gredp.mechanisms import ClaimName, MethodName, NoiseName, mechanism
from gredp.privacy.accountant import check_delta, round_up

if TYPE_CHECKING:
    from gredp.app.audit_cases import Case
    from gredp.audit.game import Tick

REFUTED, UNEXPECTED = 3, 1
MEANING = """\
"refuted" is wrong with probability at most {alpha:g}; "not refuted" means that these
attacks, with this many plays, found no contradiction. It is no proof."""


@dataclass(frozen=True)
class AuditSettings:
    """Play the attacker against a method, a run or your own code; is the claimed ε refuted?"""

    method: MethodName = "gredp"
    noise: NoiseName = "white"
    claim: ClaimName = "proven"
    """whose ε is attacked: the proven one, or the paper's for the same noise"""
    clipping: str | None = None
    """flat, per_layer, automatic, or layer_wise (the paper's Algorithm 2, its default under --claim paper)"""
    all: Flag = False
    """every method, and every claim of the paper: proven claims must stand, the paper's must fall"""
    self_test: Flag = False
    """play steps with known bugs; each must be caught"""
    one_run: Flag = False
    """one training of a real network with many canaries: an alarm for gross errors only"""
    run: str | None = None
    """run folder of `gredp train`: audit its method and add the result to its record"""
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
    """plays that count, in each world and direction; a third as many, played first, fix the thresholds"""
    alpha: float = 0.01
    """chance of a false alarm of the whole command"""
    delta: float = 1e-5
    """δ at which ε is shown"""
    figure: str | None = None
    """write a figure here (.svg, .png or .pdf)"""
    out: str | None = None
    """write the record here"""
    json: Flag = False
    """print one JSON object instead of a table"""

    def check(self) -> None:
        """Reject what can be rejected without playing."""
        modes = [self.all, self.self_test, self.one_run, self.run is not None, self.target is not None]
        if sum(modes) > 1:
            raise GredpError("give one of --all, --self-test, --one-run, --run and --target")
        check_ranges(self)
        if self.target is not None and self.sigma is None:
            raise GredpError("--target needs --sigma: the noise multiplier that it claims")
        if self.figure is not None and Path(self.figure).suffix not in (".svg", ".png", ".pdf"):
            raise GredpError(f"--figure must end in .svg, .png or .pdf, not {self.figure}")
        check_delta(self.delta)
        for folder in (Path(path).parent for path in (self.figure, self.out) if path is not None):
            if not (folder.is_dir() and os.access(folder, os.W_OK)):
                raise GredpError(f"{folder} cannot be written to: name a folder that exists and is writable")
        mechanism(self.method, self.noise, self.claim, self.clipping)


def run_audit(settings: AuditSettings) -> int:
    """Play, show, record; the exit status: 0 not refuted, 3 refuted."""
    from gredp.storage.record import dumps, header, save

    settings.check()
    with _progress(settings.json) as progress:
        rows, status = _play(settings, progress)
    head = header()
    key = "self_test" if settings.self_test else "rows"
    record = {**head, "kind": "audit", "alpha": settings.alpha, "delta": settings.delta, key: rows}
    if settings.out is not None:
        save(Path(settings.out), record)
    if settings.run is not None:
        origin = {key: head[key] for key in ("created", "command", "versions")}
        save(Path(settings.run) / "record.json", _read_record(settings.run) | {"audit": origin | rows[0]})
    if settings.figure is not None and not settings.self_test:
        from gredp.app.audit_figure import draw

        draw(record, Path(settings.figure))
    if settings.json:
        print(dumps(record))
    else:
        _show_self_test(rows) if settings.self_test else _show(rows, settings.alpha)
    return status


Row = dict[str, Any]


def _play(settings: AuditSettings, progress: "Tick") -> tuple[list[Row], int]:
    from gredp.app.audit_cases import CASES, run_all, run_case
    from gredp.audit.examples import BROKEN, self_test

    rows = []
    if settings.self_test:
        for row in self_test():
            rows.append(row)
            progress(row["bug"], len(BROKEN))
        return rows, 0 if all(row["caught"] for row in rows) else REFUTED
    effort = settings.alpha, settings.plays, settings.delta
    if settings.all:
        rows = run_all(*effort, lambda name: progress(name, len(CASES)))
        if any(row["refuted"] for row in rows if row["claim"] == "proven"):
            return rows, REFUTED
        return rows, 0 if all(row["refuted"] for row in rows if row["claim"] == "paper") else UNEXPECTED
    if settings.target is not None:
        row = _play_target(settings, progress)
    else:
        row = run_case(_case(settings), *effort, tick=progress)
    return [row], REFUTED if row["refuted"] else 0


def _play_target(settings: AuditSettings, progress: "Tick") -> Row:
    from gredp.app.audit_cases import PLAYS
    from gredp.audit.bounds import Claim
    from gredp.audit.game import audit
    from gredp.audit.victims import load_target
    from gredp.privacy.ledger import Entry

    assert settings.target is not None
    assert settings.sigma is not None
    found = audit(
        load_target(settings.target),
        ((settings.dimension,),),
        Claim((Entry(settings.sigma, 1.0, 1),)),
        clip_norm=settings.clip_norm,
        plays=settings.plays or PLAYS,
        alpha=settings.alpha,
        delta=settings.delta,
        tick=progress,
    )
    head = {"name": settings.target, "claim": "yours", "sigma": settings.sigma, "game": "one step"}
    return {**head, "proven_epsilon": None, **found.to_json()}


def _case(settings: AuditSettings) -> "Case":
    """The method on the command line, or that of a run."""
    from gredp.app.audit_cases import Case, method
    from gredp.audit.examples import SIGMA

    if settings.run is None:
        return Case(
            f"{settings.method}, {settings.noise} noise",
            method(settings.method, settings.noise, settings.clipping),
            settings.claim,
            4 if settings.one_run else settings.steps,
            settings.sample_rate,
            settings.sigma or (8.0 if settings.one_run else SIGMA),
            settings.one_run,
        )
    from gredp.app.settings import TrainSettings, current_names

    record = _read_record(settings.run)
    try:
        trained = TrainSettings(**current_names(record["settings"]))
    except TypeError as error:
        raise GredpError(f"the record of {settings.run} is not of this version of gredp: {error}") from None
    bands = record["guarantee"].get("correlation_bands", 1)
    options = method(
        trained.method, trained.noise, trained.clipping, claim=trained.claim, correlation_bands=bands
    )
    if trained.person is not None and bands == 1:  # the game of turns is played with one row for each
        options["records_per_person"] = trained.records_per_person
    # At the noise at which few plays prove most: z is linear in σ.
    return Case(f"the method of {Path(settings.run).name}", options | trained.options(), "proven")


def _read_record(run: str) -> dict[str, Any]:
    from gredp.storage.record import load

    record = load(Path(run))
    if not isinstance(record.get("settings"), dict):
        raise GredpError(f"{run} holds no record of a run")
    return record


# ------------------------------------------------------------------ what a person sees


@contextmanager
def _progress(quiet: bool) -> "Iterator[Tick]":
    from rich.progress import MofNCompleteColumn

    from gredp.app.console import progress_bar

    with progress_bar(MofNCompleteColumn(), transient=True, disable=quiet) as bar:
        task = bar.add_task("playing", total=None, status="")
        yield lambda name, total: bar.update(task, advance=1, total=total, description=name)


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

    shown = []
    for row in rows:
        by, says = row["check"] if row["caught"] else "NOT CAUGHT", row["says"] or row["false_alarm"] or "–"
        shown.append((row["bug"], by, says))
    table("planted bugs", shown, ("bug", "caught by", "which says"))
    print(f"{sum(row['caught'] for row in rows)} of {len(rows)} caught")
