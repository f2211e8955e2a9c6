"""The command line. Imports stay inside the commands, so that `gredp --help` does not wait for torch."""

import os
import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gredp.app.account import AccountSettings, run_account
from gredp.app.audit import AuditSettings, run_audit
from gredp.app.compare import CompareSettings, run_compare
from gredp.app.known_data import fetchable
from gredp.app.merge_settings import named, resolved
from gredp.app.report.command import ReportSettings, run_report
from gredp.app.settings import FILE, TrainSettings, saved_settings
from gredp.app.signals import Stopped, handled_by, stop_now
from gredp.app.tune import TuneSettings
from gredp.errors import GredpError, PeerFailed
from gredp.paper.command import ReproduceSettings, run_reproduce
from gredp.privacy.accountant import AccountantName, in_turns, round_up
from gredp.storage.files import one_line

if TYPE_CHECKING:
    from gredp.app.train import Run

DATA_NAMES = f"{', '.join(fetchable())}; for schema, the path of a public .csv"


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


@dataclass(frozen=True)
class DataSettings:
    """`gredp data get NAME` fetches a known data set, `gredp data list` verifies all that are there, `gredp
    data schema PUBLIC.csv --label COLUMN` prints the schema of a public table."""

    action: Annotated[Literal["get", "list", "schema"], tyro.conf.Positional]
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(help=DATA_NAMES)] = None
    label: str | None = None
    """for schema: the column to predict"""
    data_dir: str | None = None
    """where NAME.npz files are; default GREDP_DATA or ~/.cache/gredp/data"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of a table"""


Command = (
    Annotated[TrainSettings, tyro.conf.subcommand("train", description=TrainSettings.__doc__)]
    | Annotated[AccountSettings, tyro.conf.subcommand("account", description=AccountSettings.__doc__)]
    | Annotated[AuditSettings, tyro.conf.subcommand("audit", description=AuditSettings.__doc__)]
    | Annotated[ReproduceSettings, tyro.conf.subcommand("reproduce", description=ReproduceSettings.__doc__)]
    | Annotated[CompareSettings, tyro.conf.subcommand("compare", description=CompareSettings.__doc__)]
    | Annotated[TuneSettings, tyro.conf.subcommand("tune", description=TuneSettings.__doc__)]
    | Annotated[DataSettings, tyro.conf.subcommand("data", description=DataSettings.__doc__)]
    | Annotated[LedgerSettings, tyro.conf.subcommand("ledger", description=LedgerSettings.__doc__)]
    | Annotated[ReportSettings, tyro.conf.subcommand("report", description=ReportSettings.__doc__)]
)


def with_saved(settings: TrainSettings, arguments: list[str]) -> TrainSettings:
    """`--resume` and `--fork` take the run's settings where nothing else is said."""
    run = settings.resume or settings.fork
    if settings.fork is not None and settings.recipe is not None:
        raise GredpError("--fork takes the settings of its run where nothing else is said: give no --recipe")
    if run is not None:
        given = replace(saved_settings(run), resume=settings.resume, fork=settings.fork)
        settings = tyro.cli(TrainSettings, prog="gredp train", args=arguments[1:], default=given)
    else:
        settings = resolved(TrainSettings, "train", arguments[1:])
    # After a crash `torchrun --max-restarts` repeats the command that began the run: it goes on.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and settings.out is not None and (Path(settings.out) / FILE).exists():
        settings = replace(settings, resume=settings.out, out=None, fork=None)
    return settings


def run_train(settings: TrainSettings) -> None:
    settings.check()
    from gredp.app.console import Bar, show_run
    from gredp.app.train import train
    from gredp.memory import keep_freed_memory
    from gredp.storage.record import dumps

    keep_freed_memory()
    if settings.json:
        run = train(settings)
        if not run.record:  # one of several processes, not the first
            return
        result = dict(run.record["guarantee"])
        result |= {settings.judged_by: run.record[settings.judged_by], "run": str(run.folder)}
        _try_report(run)
        print(dumps(result))
        return
    with Bar() as progress:
        run = train(settings, progress)
    if run.record:
        show_run(run, _try_report(run))


def _try_report(run: "Run") -> Path | None:
    """The run is done and its ε spent: a page that cannot be written is no reason to fail."""
    from gredp.app.report.command import write_report
    from gredp.storage.record import undate

    try:
        return write_report([run.folder])
    except Exception as error:
        again = f"gredp report {shlex.quote(str(run.folder))}"
        warnings.warn(f"no report was written ({one_line(error)}): try {again}", stacklevel=2)
        return None
    finally:
        undate(run.folder, run.record["created"])


def run_tune(settings: TuneSettings) -> None:
    settings.check()
    from gredp.app.console import show_run
    from gredp.app.tune import tune
    from gredp.storage.record import dumps

    run = tune(settings)
    if not settings.json:
        show_run(run)
        return
    result = dict(run.record["guarantee"])
    result |= {"test_accuracy": run.record["test_accuracy"], "run": str(run.folder)}
    print(dumps(result | {"chosen": run.record["tuning"]["chosen"]}))


def run_ledger(settings: LedgerSettings) -> None:
    from gredp.storage.spent import spent

    found = spent(settings.run, settings.delta, settings.accountant)
    written = found.written
    if settings.json:
        from gredp.storage.record import dumps

        print(dumps(found.to_json()))
        return
    from gredp.app.console import table

    rows = [
        ("proven ε", f"{round_up(found.proven_epsilon)} at δ = {found.delta}"),
        ("steps", f"{written.steps}, {written.inherited} of them before training began"),
        *(
            ("", f"{e.steps} × z = {e.noise_multiplier:.6g} at rate {e.sample_rate:.6g}{in_turns(e.bands)}")
            for e in written.entries
        ),
        ("starts", str(written.incarnations)),
        ("last line", "cut off by a crash; its step counts" if written.torn else "whole"),
        ("seal", f"{written.seals[-1][:16]}…, all {len(written.seals)} lines verified"),
    ]
    table(f"ledger of {settings.run}", rows)


def run_data(settings: DataSettings) -> None:
    from gredp.storage.record import dumps

    if (settings.action == "list") == (settings.name is not None):
        raise GredpError("it is `gredp data get NAME`, `gredp data list` or `gredp data schema PUBLIC.csv`")
    if settings.action == "schema":
        if settings.label is None:
            raise GredpError("`gredp data schema` needs --label, the column to predict")
        from gredp.app.data.tables import propose

        proposed = propose(Path(settings.name or ""), settings.label)
        print(dumps(tomllib.loads(proposed)) + "\n" if settings.json else proposed, end="")
        return
    from gredp.app.console import table
    from gredp.app.data.fetch import get, listing

    if settings.name is not None:
        path, words = get(settings.name, settings.data_dir)
        rows: list[dict[str, Any]] = [
            {"name": settings.name, "whole": True, "state": words, "path": str(path)}
        ]
    else:
        rows = listing(settings.data_dir)
    if settings.json:
        print(dumps({"data": rows}))
        return
    shown = [(row["name"], row["state"], row["path"] or "–") for row in rows]
    table("data sets", shown, ("name", "state", "file"))


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
            if isinstance(settings, CompareSettings):
                told = named(arguments[1:])
                run_compare(resolved(CompareSettings, "compare", arguments[1:]), told)
            elif isinstance(settings, TuneSettings):
                run_tune(resolved(TuneSettings, "tune", arguments[1:]))
            elif isinstance(settings, TrainSettings):
                run_train(with_saved(settings, arguments))
            elif isinstance(settings, LedgerSettings):
                run_ledger(settings)
            elif isinstance(settings, ReproduceSettings):
                run_reproduce(settings)
            elif isinstance(settings, DataSettings):
                run_data(settings)
            elif isinstance(settings, ReportSettings):
                run_report(settings)
            elif isinstance(settings, AuditSettings):
                sys.exit(run_audit(settings))
            else:
                run_account(settings)
    except PeerFailed:
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
