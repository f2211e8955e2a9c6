"""The command line. Imports stay inside the commands, so that `gredp --help` does not wait for torch."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gredp.audit.command import AuditSettings, run_audit
from gredp.errors import Elsewhere, GredpError
from gredp.mechanisms.select import Claim, Method, Noise
from gredp.privacy.accountant import AccountantName, epsilon, round_up
from gredp.training.settings import FILE, TrainSettings, saved_settings
from gredp.training.signals import Stopped, handled_by, stop_now


@dataclass(frozen=True)
class AccountSettings:
    """What a run would cost: from σ its proven and claimed ε, or from a target ε the σ that it needs."""

    method: Method = "gredp"
    noise: Noise = "white"
    claim: Claim = "proven"
    """proven: a target ε is a true one. paper: σ as the paper takes it for that ε, and its true cost"""
    sigma: float | None = None
    """the mechanism's noise scale"""
    epsilon: float | None = None
    """target; give this or --sigma"""
    delta: float = 1e-5
    batch_size: int = 500
    records: int = 60_000
    epochs: int = 30
    layers: int = 1
    """layers that are each clipped to the same norm, as in the paper's Algorithm 2; 1 is flat clipping"""
    bands: int | Literal["auto"] = 1
    """steps over which noise is correlated, as --correlation-bands of train; auto assumes momentum 0.9"""
    accountant: AccountantName = "pld"
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of a table"""


@dataclass(frozen=True)
class LedgerSettings:
    """What a run has spent: verifies its ledger line by line and prints it."""

    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    delta: float | None = None
    """by default the one the run was started with, else 1e-5"""
    accountant: AccountantName | None = None
    """by default the run's, else pld"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of a table"""


Command = (
    Annotated[TrainSettings, tyro.conf.subcommand("train", description=TrainSettings.__doc__)]
    | Annotated[AccountSettings, tyro.conf.subcommand("account", description=AccountSettings.__doc__)]
    | Annotated[AuditSettings, tyro.conf.subcommand("audit", description=AuditSettings.__doc__)]
    | Annotated[LedgerSettings, tyro.conf.subcommand("ledger", description=LedgerSettings.__doc__)]
)


def with_saved(settings: TrainSettings, arguments: list[str]) -> TrainSettings:
    """`--resume` and `--fork` take the run's settings where the command line says nothing else."""
    run = settings.resume or settings.fork
    if run is not None:
        given = replace(saved_settings(run), resume=settings.resume, fork=settings.fork)
        settings = tyro.cli(TrainSettings, prog="gredp train", args=arguments[1:], default=given)
    # After a crash `torchrun --max-restarts` repeats the command that began the run: it goes on.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and settings.out is not None and (Path(settings.out) / FILE).exists():
        settings = replace(settings, resume=settings.out, out=None, fork=None)
    return settings


def run_train(settings: TrainSettings) -> None:
    settings.check()
    from gredp.console import Bar, show_run
    from gredp.training.loop import train
    from gredp.training.record import dumps

    if settings.json:
        run = train(settings)
        if not run.record:  # one of several processes, not the first
            return
        result = {k: v for k, v in run.record["guarantee"].items() if k != "neighbours"}
        result |= {"test_accuracy": run.record["test_accuracy"], "run": str(run.folder)}
        print(dumps(result))
        return
    with Bar() as progress:
        run = train(settings, progress)
    if run.record:
        show_run(run)


def run_account(settings: AccountSettings) -> None:
    from gredp.privacy.quote import quote

    result = quote(
        method=settings.method,
        noise=settings.noise,
        claim=settings.claim,
        sigma=settings.sigma,
        target_epsilon=settings.epsilon,
        delta=settings.delta,
        batch_size=settings.batch_size,
        records=settings.records,
        epochs=settings.epochs,
        layers=settings.layers,
        accountant=settings.accountant,
        bands=settings.bands,
    )
    if settings.json:
        from gredp.training.record import dumps

        print(dumps(result))
        return
    from gredp.console import table

    table(f"{settings.method}, claim {settings.claim}", account_rows(result))


def run_ledger(settings: LedgerSettings) -> None:
    from gredp.privacy.ledger_file import read_ledger

    written = read_ledger(Path(settings.run) / "ledger")
    own = saved_settings(settings.run) if (Path(settings.run) / FILE).exists() else TrainSettings()
    delta = own.delta if settings.delta is None else settings.delta
    spent = epsilon(written.entries, delta, settings.accountant or own.accountant)
    if settings.json:
        from gredp.training.record import dumps

        result = {
            "proven_epsilon": spent,
            "delta": delta,
            "steps": written.steps,
            "inherited_steps": written.inherited,
            "starts": written.incarnations,
            "torn_last_line": written.torn,
            "entries": [asdict(entry) for entry in written.entries],
            "seal": written.seals[-1],
        }
        print(dumps(result))
        return
    from gredp.console import table

    rows = [
        ("proven ε", f"{round_up(spent)} at δ = {delta}"),
        ("steps", f"{written.steps}, {written.inherited} of them before this run"),
        *(
            ("", f"{e.steps} × z = {e.noise_multiplier:.6g} at rate {e.sample_rate:.6g}{_turns(e.bands)}")
            for e in written.entries
        ),
        ("starts", str(written.incarnations)),
        ("last line", "cut off by a crash; its step counts" if written.torn else "whole"),
        ("seal", f"{written.seals[-1][:16]}…, all {len(written.seals)} lines verified"),
    ]
    table(f"ledger of {settings.run}", rows)


def account_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The proven ε first; the claimed one never alone."""
    claimed = result["claimed_epsilon"]
    return [
        ("proven ε", f"{round_up(result['proven_epsilon'])} at δ = {result['delta']}"),
        ("claimed ε (paper)", "none" if claimed is None else f"{round_up(claimed)}"),
        ("accountant", result["accountant"]),
        ("noise multiplier z", f"{result['noise_multiplier']:.4f}"),
        ("noise scale σ", f"{result['sigma']:.4f}"),
        ("steps", str(result["steps"])),
        ("sampling rate", f"{result['sample_rate']:.6g}{_turns(result['correlation_bands'])}"),
    ]


def _turns(bands: int) -> str:
    return f" of {bands} parts in turn, noise correlated over as many steps" if bands > 1 else ""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `gredp` and `python -m gredp`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        from gredp import __version__

        print(f"gredp {__version__}")
        return
    settings: Any = tyro.cli(
        Command,
        prog="gredp",
        description="Differentially private training in the frequency domain, with every ε proven.",
        args=arguments,
    )
    try:
        with handled_by(stop_now), one_line_warnings():
            if isinstance(settings, TrainSettings):
                run_train(with_saved(settings, arguments))
            elif isinstance(settings, LedgerSettings):
                run_ledger(settings)
            elif isinstance(settings, AuditSettings):
                sys.exit(run_audit(settings))
            else:
                run_account(settings)
    except Elsewhere:
        sys.exit(2)
    except GredpError as error:
        print(f"gredp: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            print(f"gredp: {stop}", file=sys.stderr)
        sys.exit(stop.status)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """A warning is one line as well."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: print(f"gredp: warning: {message}", file=sys.stderr)
        yield
