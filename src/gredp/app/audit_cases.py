"""What `gredp audit --all` plays: every proven claim, which must stand, and the paper's, which must fall."""

import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gredp.audit.examples import SIGMA
from gredp.errors import GredpError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gredp.audit.game import Tick

PLAYS = 500
#: by sampling rate; whole runs cost more than steps and are played along one direction only
RUN_PLAYS = {1.0: 1000, 0.5: 3000}


@dataclass(frozen=True)
class Case:
    """One claim: the engine's options, whose claim is attacked, and the run it is made about."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    claim: str = "proven"
    steps: int = 1
    rate: float = 1.0
    sigma: float = SIGMA
    alarm: bool = False
    forwards: int = 1


def method(name: str, noise: str = "white", clipping: str | None = "flat", **more: Any) -> dict[str, Any]:
    return {"method": name, "noise": noise, "clipping": clipping, **more}


ROOT_HALF = math.sqrt(0.5)
CASES = (
    Case("DP-SGD", method("dpsgd")),
    Case("DP-SGD, per layer", method("dpsgd", clipping="per_layer")),
    Case("DP-SGD, automatic clipping", method("dpsgd", clipping="automatic")),
    Case("DP-SGD, same norm for each layer", method("dpsgd", clipping="layer_wise")),
    Case("DP-SGD, adaptive clipping", method("dpsgd", clipping="adaptive")),
    Case("DP-SGD, adaptive clipping per layer", method("dpsgd", clipping="adaptive_per_layer")),
    Case("Spectral-DP", method("spectral_dp")),
    Case("GReDP, a = b = 1/√2", method("gredp")),
    Case("GReDP, a = 0.6, b = 0.8", method("gredp", noise_parts=(0.6, 0.8))),
    Case("GReDP, same norm for each layer", method("gredp", clipping="layer_wise")),
    Case("GReDP, shaped noise", method("gredp", "shaped")),
    Case("GReDP, a = b = 1/√2", method("gredp"), "paper"),
    Case("GReDP, real noise only", method("gredp", "real"), "paper"),
    Case("GReDP, a = b = 1, same norm for each layer",
         method("gredp", clipping="layer_wise", noise_parts=(1.0, 1.0)), "paper"),
    Case("GReDP, Algorithm 2", method("gredp", clipping="layer_wise"), "paper"),
    Case("Spectral-DP", method("spectral_dp"), "paper"),
    Case("DP-SGD, 4 steps", method("dpsgd"), steps=4, sigma=1.0),
    Case("GReDP shaped, 4 steps", method("gredp", "shaped"), steps=4, sigma=1.0),
    Case("DP-SGD, a person with 6 records", method("dpsgd", records_per_person=4)),
    Case("DP-SGD, two forwards in a step", method("dpsgd"), forwards=2),
    Case("DP-SGD, 4 steps at rate ½", method("dpsgd"), steps=4, rate=0.5, sigma=1.0),
    Case("DP-SGD, 2 epochs of fixed batches", method("dpsgd", poisson_sampling=False), steps=6, sigma=1.0),
    Case("DP-SGD, records of weight 2 and 1", method("dpsgd", weights=[2.0, *[1.0] * 5]), rate=0.5),
    Case("GReDP, 4 steps", method("gredp"), "paper", steps=4, sigma=1.0),
    Case("GReDP, 4 steps at rate ½", method("gredp"), "paper", steps=4, rate=0.5, sigma=1.0),
    Case("DP-SGD, LeNet on digits", method("dpsgd"), steps=4, sigma=8.0, alarm=True),
)  # fmt: skip


def run_case(
    case: Case,
    alpha: float,
    plays: int | None = None,
    delta: float = 1e-5,
    seed: int | None = None,
    tick: "Tick | None" = None,
) -> dict[str, Any]:
    """Play one case; the row of the table and of the record."""
    if case.options["method"] == "plain":
        raise GredpError("plain training claims no ε: there is nothing to refute")
    options = {"claim": case.claim, **case.options}
    head = {"name": case.name, "claim": case.claim, "sigma": case.sigma}
    effort: dict[str, Any] = {"alpha": alpha, "delta": delta, "seed": seed}
    if case.alarm:
        from gredp.audit.one_run import one_run

        alarm = one_run(*_digits(), options, case.sigma, claim=case.claim, steps=case.steps, **effort)
        return {**head, "game": "one run, gross-error alarm", **alarm.to_json()}
    from gredp.audit.game import audit
    from gredp.audit.victims import (
        EngineDraws,
        EngineForwards,
        EnginePersons,
        EngineRun,
        EngineStep,
        EngineTurn,
    )

    victim: EngineStep
    only: tuple[str, ...]
    if options.get("records_per_person") is not None:
        game, only, usual = "a person, not a record", ("random",), PLAYS
        victim = EnginePersons(options, case.sigma, case.steps, case.rate, grids=((8,),), seed=seed)
    elif "weights" in options or "poisson_sampling" in options:
        game, only, usual = "whole run", ("random",), RUN_PLAYS[1.0]
        victim = EngineDraws(options, case.sigma, case.steps, case.rate, grids=((8,),), seed=seed)
    elif case.steps > 1 or case.rate < 1:
        game, only, usual = "whole run", ("random",), RUN_PLAYS.get(case.rate, 3000)
        victim = EngineRun(options, case.sigma, case.steps, case.rate, grids=((8,),), seed=seed)
    else:
        game, only, usual = "one step", (), PLAYS
        kind: type[EngineStep] = EngineForwards if case.forwards > 1 else EngineStep
        if options.get("correlation_bands", 1) > 1:
            kind = EngineTurn
        victim = kind(options, case.sigma, seed=seed)
    claimed, proven = victim.claim(case.claim), victim.claim("proven").epsilon(delta)
    found = audit(victim, victim.grids, claimed, plays=plays or usual, only=only, tick=tick, **effort)
    return {**head, "game": game, "proven_epsilon": proven, **found.to_json()}


def _digits(canaries: int = 500) -> "tuple[nn.Module, Tensor, Tensor]":
    """A small LeNet and records to train it on."""
    from gredp.app.data import load
    from gredp.app.dataset import centered
    from gredp.app.models import build

    data = load("digits")
    x = centered(data.x_train[list(range(canaries))])
    return build("lenet-small", data.input_shape, data.classes), x, data.y_train[:canaries]


def run_all(
    alpha: float,
    plays: int | None = None,
    delta: float = 1e-5,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Every case, α shared out over them, on all cores; rows in the order of `CASES`."""
    rows: list[dict[str, Any]] = [{}] * len(CASES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=_one_thread) as pool:
        # The long ones first, so that no core waits at the end.
        order = sorted(range(len(CASES)), key=lambda i: (CASES[i].rate == 1, i))
        jobs = {pool.submit(run_case, CASES[i], alpha / len(CASES), plays, delta): i for i in order}
        for job in as_completed(jobs):
            rows[jobs[job]] = job.result()
            progress(CASES[jobs[job]].name)
    return rows


def _one_thread() -> None:
    """The cores are taken by the other cases."""
    import torch

    torch.set_num_threads(1)
