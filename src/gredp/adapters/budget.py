"""What adapters share: the budget of a run, its Poisson batches, physical batches, and rejections."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
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
from gredp.sampling import PrivateLoader, part_of, poisson_loader

#: metrics that no record can change
COUNTS = ("epsilon", "epoch", "step")


@dataclass
class Budget:
    """A target ε or a noise multiplier, for a number of steps that is fixed before the first one.

    Formal guarantee. The run takes at most `steps` steps, each charged by the engine; with `target_epsilon`
    its proven ε ends at most there. Whatever calls the optimizer: the ledger asks before it charges, and a
    step that would pass either end is rejected, so that nothing of it is released.

    `options` go to `PrivacyEngine.make_private`, except `allow_large_delta`, which is that of
    `make_private_with_epsilon`. With a `folder` every step is charged on the disk, and an interrupted run
    resumes from there: see `PrivacyEngine.load`. `public_metrics` name what may decide beside counts.
    """

    delta: float
    max_grad_norm: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    folder: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    engine: PrivacyEngine = field(default_factory=PrivacyEngine)
    max_physical_batch_size: int | None = None
    public_metrics: Collection[str] = ()
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
        """Make `module` private for `steps` steps on the batches of `loader`, or resume in `folder`."""
        sampler = loader.poisson
        if not (steps >= 1 and math.isfinite(steps)):
            raise GredpError(f"the number of steps must be fixed and positive before training, not {steps}")
        check_delta_for(self.delta, sampler.expected / sampler.sample_rate, self.allow_large_delta)
        self.steps, self.before = int(steps), self.engine.ledger.steps
        multiplier, spent = self.noise_multiplier, self.engine.ledger.entries
        if multiplier is None:
            assert self.target_epsilon is not None
            sampling, name = Sampling(sampler.sample_rate, self.steps), self.engine.accountant.name
            target = (self.target_epsilon, self.delta)
            multiplier = noise_multiplier(*target, sampling, accountant=name, spent=spent)
        _, private, _ = self.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=multiplier,
            max_grad_norm=self.max_grad_norm,
            **self.options,
        )
        self.planned = counted((*spent, *private.cost(self.steps)))
        self.engine.ledger.ceiling = self._reject_beyond
        if self.folder is not None and Path(self.folder).exists():
            self.engine.load(self.folder)
        self.save()
        return private

    def save(self) -> None:
        """Write a checkpoint, if there is a folder to keep it in."""
        if self.folder is not None:
            self.engine.save(self.folder)

    def parts(self, batch: Any, records: int) -> Iterator[tuple[Any, bool]]:
        """Parts of a logical batch that fit into memory, and whether it is the last; run a backward for each.

        All but the last are added up here. The last is left to the program, which then calls `step()`.
        """
        _, private = self.engine._private()
        size = self.max_physical_batch_size or max(records, 1)
        last = max(0, (records - 1) // size * size)
        for start in range(0, last + 1, size):
            private.signal_skip_step(start != last)
            yield part_of(batch, slice(start, start + size)), start == last
            if start != last:
                private.step()

    @property
    def charged(self) -> int:
        return self.engine.ledger.steps - max(self.before, self.engine.ledger.inherited)

    @property
    def used_up(self) -> bool:
        """Whether every step that was planned has been charged."""
        return self.charged >= self.steps

    def _reject_beyond(self, step: Entry) -> None:
        """Programs may not stop when told to, or step twice on one batch."""
        if self.used_up:
            raise GredpError(f"all {self.steps} planned steps are charged: training is over")
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


def reject_private_metric(who: str, metric: str | None, public: Collection[str]) -> None:
    """A loss of private records decides nothing: ε covers the steps, not a choice by what they were on."""
    if metric is not None and metric not in COUNTS and metric not in public:
        raise GredpError(
            f"{who} decides by {metric!r}, which ε does not cover: remove it, or, if it is measured on "
            f"public records alone, declare it with public_metrics=({metric!r},)"
        )


def reject(reasons: dict[str, Any]) -> None:
    """Reject a trainer by the first of `reasons` that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise GredpError(f"cannot train privately: {reason}")
