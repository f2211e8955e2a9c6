"""The command line. Imports stay inside the commands, so that `gredp --help` does not wait for torch."""

import os
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

from gredp.app.account import AccountSettings, run_account
from gredp.app.audit import AuditSettings, run_audit
from gredp.app.compare import CompareSettings, run_compare
from gredp.app.export import ExportSettings, run_export
from gredp.app.known_data import fetchable
from gredp.app.merge_settings import named, resolved, with_current_names
from gredp.app.plan import PlanSettings, run_plan
from gredp.app.predict import PredictSettings, run_predict
from gredp.app.report.command import ReportSettings, run_report
from gredp.app.settings import FILE, Flag, TrainSettings
from gredp.app.signals import Stopped, handled_by, stop_now
from gredp.app.tune import TuneSettings, tune
from gredp.errors import GredpError, PeerFailed
from gredp.paper.command import ReproduceSettings, run_reproduce
from gredp.privacy.accountant import AccountantName, in_trials, in_turns, round_up
from gredp.storage.files import one_line

if TYPE_CHECKING:
    from gredp.app.train import Run
    from gredp.privacy.ledger import Entry

DATA_NAMES = f"{', '.join(fetchable())}; for schema, the path of a .csv"


@dataclass(frozen=True)
class LedgerSettings:
    """Show what a run has spent, after verifying its ledger line by line."""

    run: Annotated[str, tyro.conf.Positional]
    """folder of the run"""
    delta: float | None = None
    """by default the one the run was started with, else 1e-5"""
    accountant: AccountantName | None = None
    """by default the run's, else pld"""
    json: Flag = False
    """print one JSON object instead of a table"""


@dataclass(frozen=True)
class DataSettings:
    """`gredp data get NAME` fetches a known dataset, `gredp data list` verifies those in the data folder,
    `gredp data schema MINE.csv --label COLUMN` prints a schema to fill in, from the header alone."""

    action: Annotated[Literal["get", "list", "schema"], tyro.conf.Positional]
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(help=DATA_NAMES)] = None
    label: str | None = None
    """for schema: the column to predict"""
    public: Flag = False
    """for schema: the table is public, so read its rows and propose ranges, categories and classes"""
    data_dir: str | None = None
    """where NAME.npz files are; default GREDP_DATA or ~/.cache/gredp/data"""
    json: Flag = False
    """print one JSON object instead of a table"""


def run_train(settings: TrainSettings) -> None:
    # After a crash `torchrun --max-restarts` repeats the command that began the run: resume it.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and settings.out is not None and (Path(settings.out) / FILE).exists():
        settings = replace(settings, resume=settings.out, out=None, fork=None)
    settings.check()
    from gredp.app.console import Bar, show_run
    from gredp.app.train import train

    with nullcontext() if settings.json else Bar() as progress:
        run = train(settings, progress)
    if run.record:  # only in the first of several processes
        show_run(run, settings.json, _try_report(run))


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
    from gredp.app.console import show_run

    run = tune(settings)
    show_run(run, settings.json, _try_report(run))


def run_ledger(settings: LedgerSettings) -> None:
    from gredp.app.console import show
    from gredp.storage.spent import spent

    found = spent(settings.run, settings.delta, settings.accountant)
    written = found.written
    rows = [
        ("proven ε", f"{round_up(found.proven_epsilon)} at δ = {found.delta}, {found.neighbors}"),
        ("steps", f"{written.steps}, {written.inherited} of them before training began"),
        *(
            ("", f"{e.steps} × z = {e.noise_multiplier:.6g} at rate {e.sample_rate:.6g}{_how(e)}")
            for e in written.entries
        ),
        ("starts", str(written.incarnations)),
        ("last line", "cut off by a crash; its step counts" if written.torn else "whole"),
        ("seal", f"{written.seals[-1][:16]}…, all {len(written.seals)} lines verified"),
    ]
    show(settings.json, found.to_json(), f"ledger of {settings.run}", rows)


def _how(entry: "Entry") -> str:
    return in_turns(entry.bands, entry.unit == "blanked record") + in_trials(entry.trials)


def run_data(settings: DataSettings) -> None:
    from gredp.app.console import show
    from gredp.storage.record import dumps

    schema = settings.action == "schema"
    if (settings.action == "list") == (settings.name is not None) or (schema and settings.label is None):
        raise GredpError("usage: gredp data get NAME | list | schema MINE.csv --label COLUMN [--public]")
    if schema:
        from gredp.app.data.schema_drafts import propose, template

        draft = propose if settings.public else template
        proposed = draft(Path(settings.name or ""), settings.label or "")
        print(dumps(tomllib.loads(proposed)) + "\n" if settings.json else proposed, end="")
        return
    from gredp.app.data.fetch import get, listing

    if settings.name is None:
        rows = listing(settings.data_dir)
    else:
        path, state = get(settings.name, settings.data_dir)
        rows = [{"name": settings.name, "whole": True, "state": state, "path": str(path)}]
    shown = [(row["name"], row["state"], row["path"] or "–") for row in rows]
    show(settings.json, {"data": rows}, "datasets", shown, ("name", "state", "file"))


#: command → its settings, and what it does with them; a number is its exit status
COMMANDS: dict[str, tuple[type, Callable[..., int | None]]] = {
    "train": (TrainSettings, run_train),
    "predict": (PredictSettings, run_predict),
    "export": (ExportSettings, run_export),
    "plan": (PlanSettings, run_plan),
    "account": (AccountSettings, run_account),
    "audit": (AuditSettings, run_audit),
    "reproduce": (ReproduceSettings, run_reproduce),
    "compare": (CompareSettings, run_compare),
    "tune": (TuneSettings, run_tune),
    "data": (DataSettings, run_data),
    "ledger": (LedgerSettings, run_ledger),
    "report": (ReportSettings, run_report),
}
Command: Any = Union[  # noqa: UP007
    tuple(
        Annotated[kind, tyro.conf.subcommand(name, description=kind.__doc__)]
        for name, (kind, _) in COMMANDS.items()
    )
]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `gredp` and `python -m gredp`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        from gredp import __version__

        print(f"gredp {__version__}")
        return
    with one_line_warnings():
        arguments = with_current_names(arguments)
    settings: Any = tyro.cli(
        Command,
        prog="gredp",
        description="Differentially private training in the frequency domain, with every ε proven.",
        args=arguments,
    )
    command, *options = arguments
    try:
        with handled_by(stop_now), one_line_warnings():
            if isinstance(settings, TrainSettings):
                settings = resolved(type(settings), command, options)
            more = [named(options)] if command == "compare" else []
            status = COMMANDS[command][1](settings, *more)
    except PeerFailed:
        status = 2
    except GredpError as error:
        print(f"gredp: {error}", file=sys.stderr)
        status = 2
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            print(f"gredp: {stop}", file=sys.stderr)
        status = stop.status
    if status is not None:
        sys.exit(status)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """A warning is one line as well."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: print(f"gredp: warning: {message}", file=sys.stderr)
        yield
