"""The command line. Imports stay inside the commands, so that `gredp --help` does not wait for torch."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from gredp.audit.command import AuditSettings, run_audit
from gredp.errors import GredpError
from gredp.mechanisms.select import Claim, Method, Noise
from gredp.privacy.accountant import AccountantName, round_up
from gredp.training.settings import TrainSettings


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
    accountant: AccountantName = "pld"
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead of a table"""


Command = (
    Annotated[TrainSettings, tyro.conf.subcommand("train", description=TrainSettings.__doc__)]
    | Annotated[AccountSettings, tyro.conf.subcommand("account", description=AccountSettings.__doc__)]
    | Annotated[AuditSettings, tyro.conf.subcommand("audit", description=AuditSettings.__doc__)]
)


def run_train(settings: TrainSettings) -> None:
    settings.check()
    from gredp.console import Bar, show_run
    from gredp.training.loop import train
    from gredp.training.record import dumps

    if settings.json:
        run = train(settings)
        result = {k: v for k, v in run.record["guarantee"].items() if k != "neighbours"}
        result |= {"test_accuracy": run.record["test_accuracy"], "run": str(run.folder)}
        print(dumps(result))
        return
    with Bar() as progress:
        run = train(settings, progress)
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
    )
    if settings.json:
        from gredp.training.record import dumps

        print(dumps(result))
        return
    from gredp.console import table

    table(f"{settings.method}, claim {settings.claim}", account_rows(result))


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
        ("sampling rate", f"{result['sample_rate']:.6g}"),
    ]


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
        if isinstance(settings, AuditSettings):
            sys.exit(run_audit(settings))
        run_train(settings) if isinstance(settings, TrainSettings) else run_account(settings)
    except GredpError as error:
        print(f"gredp: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gredp: interrupted", file=sys.stderr)
        sys.exit(130)
