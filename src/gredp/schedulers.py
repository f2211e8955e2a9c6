"""Schedulers of noise and clipping norm under the names of Opacus: `step()` at the end of each epoch.

They set `noise_multiplier` or `max_grad_norm` of the optimizer: each change is a plan of its own, certified
and charged from the next step on. Factors must be public, known from the number of the epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from gredp.optimizer import PrivateOptimizer


class Scheduler(ABC):
    """Multiplies what it schedules by `factor(epoch)`, by default of what it was in the epoch before."""

    attribute: ClassVar[str]

    def __init__(self, optimizer: PrivateOptimizer, *, last_epoch: int = -1) -> None:
        self.optimizer, self.last_epoch = optimizer, last_epoch
        self.step()

    @abstractmethod
    def factor(self, epoch: int) -> float:
        """What the value of the epoch before, or of the beginning, is multiplied by."""

    def step(self) -> None:
        self.last_epoch += 1
        self._set(self.current, self.factor(self.last_epoch) if self.last_epoch else 1.0)

    @property
    def current(self) -> Any:
        """Of the optimizer: one number, or a list of norms."""
        return getattr(self.optimizer, self.attribute)

    def _set(self, base: Any, factor: float) -> None:
        scaled = [norm * factor for norm in base] if isinstance(base, list) else base * factor
        setattr(self.optimizer, self.attribute, scaled)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class _Exponential(Scheduler):
    def __init__(self, optimizer: PrivateOptimizer, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.gamma


class _Step(_Exponential):
    def __init__(
        self, optimizer: PrivateOptimizer, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size = step_size
        super().__init__(optimizer, gamma=gamma, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return 1.0 if epoch % self.step_size else self.gamma


class _Lambda(Scheduler):
    """Of what it was in the beginning."""

    def __init__(
        self, optimizer: PrivateOptimizer, function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.function, self.base = function, getattr(optimizer, self.attribute)
        super().__init__(optimizer, last_epoch=last_epoch)

    def factor(self, epoch: int) -> float:
        return self.function(epoch)

    def step(self) -> None:
        self.last_epoch += 1
        self._set(self.base, self.factor(self.last_epoch))


class ExponentialNoise(_Exponential):
    """The noise multiplier times `gamma` after every epoch."""

    attribute = "noise_multiplier"


class StepNoise(_Step):
    """The noise multiplier times `gamma` after every `step_size` epochs."""

    attribute = "noise_multiplier"


class LambdaNoise(_Lambda):
    """The first noise multiplier times `noise_lambda(epoch)`."""

    attribute = "noise_multiplier"

    def __init__(
        self, optimizer: PrivateOptimizer, *, noise_lambda: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, noise_lambda, last_epoch)


class ExponentialGradClip(_Exponential):
    """The clipping norm times `gamma` after every epoch."""

    attribute = "max_grad_norm"


class StepGradClip(_Step):
    """The clipping norm times `gamma` after every `step_size` epochs."""

    attribute = "max_grad_norm"


class LambdaGradClip(_Lambda):
    """The first clipping norm times `scheduler_function(epoch)`."""

    attribute = "max_grad_norm"

    def __init__(
        self, optimizer: PrivateOptimizer, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, scheduler_function, last_epoch)
