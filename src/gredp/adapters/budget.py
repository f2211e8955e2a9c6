"""What every adapter is told, and how it becomes a private optimizer and Poisson batches."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gredp.budget import Sampling, noise_multiplier
from gredp.engine import PrivacyEngine
from gredp.errors import GredpError
from gredp.optimizer import PrivateOptimizer
from gredp.privacy.accountant import check_delta_for, epsilon, round_up
from gredp.privacy.ledger import Entry
from gredp.sampling import PrivateLoader, poisson_loader

#: metrics that no record can change
COUNTS = ("epsilon", "epoch", "step")


@dataclass
class Budget:
    """A target ε or a noise multiplier, for a number of steps that is fixed before the first one.

    Formal guarantee. The run takes at most `steps` steps, each charged by the engine; with `target_epsilon`
    its proven ε ends at most there. Whatever calls the optimizer: the ledger asks before it charges, and a
    step that would pass either end is refused, so that nothing of it is released.

    `options` go to `PrivacyEngine.make_private`, but for `allow_large_delta`, which is that of
    `make_private_with_epsilon`. With a `folder` every step is charged on the disk, and a run
    that broke off goes on from there: see `PrivacyEngine.load`.
    """

    delta: float
    max_grad_norm: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    folder: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    engine: PrivacyEngine = field(default_factory=PrivacyEngine)
    steps: int = 0
    #: steps of the engine that were charged before this run's first
    before: int = 0
    #: what may be charged without asking the accountant again
    planned: Counter[Entry] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise GredpError("give either target_epsilon or noise_multiplier")
        self.options = dict(self.options)
        self.allow_large_delta = self.options.pop("allow_large_delta", False)
        for name in {"sample_rate", "claim", "correlation_bands", "noise_schedule"} & set(self.options):
            raise GredpError(f"{name} is not for adapters: use PrivacyEngine in a loop of your own")

    def poisson(self, loader: Any) -> PrivateLoader:
        """The same data in Poisson batches, drawn from the engine's secret."""
        if not isinstance(loader, DataLoader):
            raise GredpError(f"private training takes one DataLoader, not a {type(loader).__name__}")
        return poisson_loader(loader, secret=self.engine.secret)

    def spend(
        self, module: nn.Module, optimizer: Optimizer, loader: PrivateLoader, steps: float
    ) -> PrivateOptimizer:
        """Make `module` private for `steps` steps on the batches of `loader`, or go on in `folder`."""
        sampler = loader.poisson
        if not (steps >= 1 and math.isfinite(steps)):
            raise GredpError(f"the number of steps must be fixed and positive before training, not {steps}")
        check_delta_for(self.delta, sampler.expected / sampler.sample_rate, self.allow_large_delta)
        self.steps, self.before = int(steps), self.engine.ledger.steps
        multiplier, spent = self.noise_multiplier, self.engine.ledger.entries
        if multiplier is None:
            assert self.target_epsilon is not None
            sampling, name = Sampling(sampler.sample_rate, self.steps), self.engine.accountant.name
            multiplier = noise_multiplier(
                self.target_epsilon, self.delta, sampling, accountant=name, spent=spent
            )
        _, private, _ = self.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=multiplier,
            max_grad_norm=self.max_grad_norm,
            **self.options,
        )
        self.planned = counted((*spent, *private.cost(self.steps)))
        self.engine.ledger.ceiling = self._refuse_beyond
        if self.folder is not None and Path(self.folder).exists():
            self.engine.load(self.folder)
        self.save()
        return private

    def save(self) -> None:
        """Write a checkpoint, if there is a folder to keep it in."""
        if self.folder is not None:
            self.engine.save(self.folder)

    @property
    def charged(self) -> int:
        return self.engine.ledger.steps - max(self.before, self.engine.ledger.inherited)

    @property
    def used_up(self) -> bool:
        """Whether every step that was planned has been charged."""
        return self.charged >= self.steps

    def _refuse_beyond(self, step: Entry) -> None:
        """Programs may go on although they were told to end, or step twice where they were to step once."""
        if self.used_up:
            raise GredpError(f"all {self.steps} steps that were planned are charged: there is no other")
        ledger, name = self.engine.ledger, self.engine.accountant.name
        would = (*ledger.entries, step)
        if self.target_epsilon is None or counted(would) <= self.planned:
            return
        spent = epsilon(would, self.delta, name)
        if spent > self.target_epsilon:
            raise GredpError(
                f"one more step, at rate {step.sample_rate:.4g}, would end at ε = {round_up(spent)}, above "
                f"the target of {self.target_epsilon}, after {self.charged} of {self.steps} planned steps: "
                "step once for each batch of the loader"
            )

    @property
    def epsilon(self) -> float:
        """The proven ε spent so far at `delta`."""
        return self.engine.get_epsilon(self.delta)


def counted(entries: Iterable[Entry]) -> Counter[Entry]:
    """Steps of each kind, wherever they stand."""
    kinds: Counter[Entry] = Counter()
    for entry in entries:
        kinds[replace(entry, steps=1)] += entry.steps
    return kinds


def refuse_private_metric(who: str, metric: str | None, public: Collection[str]) -> None:
    """A loss of private records decides nothing: ε covers the steps, not a choice by what they were on."""
    if metric is not None and metric not in COUNTS and metric not in public:
        raise GredpError(
            f"{who} decides by {metric!r}, which ε does not cover: leave it out, or, if that is measured on "
            f"public records alone, declare it with public_metrics=({metric!r},)"
        )
