"""The optimiser a user steps: it charges the ledger, asks rail A for a gradient, and hands it on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gredp.distributed import world_size
from gredp.errors import GredpError
from gredp.gradient.capture import Capture
from gredp.gradient.step import PrivateStep
from gredp.privacy.ledger import Ledger
from gredp.randomness import Split


class PrivateOptimizer(Optimizer):
    """Wraps any `torch.optim` optimiser; `step()` replaces `p.grad` by the private gradient first.

    Formal guarantee. Every call of `step()` that updates parameters has been charged to the ledger with
    the plan's certificate and the loader's rate, before noise was drawn. A part of a logical batch that
    is not its last only adds up. Of several processes the first one charges on the disk, and all step alike.

    | case | what happens |
    |---|---|
    | step() without a backward since the last one | refused: those gradients were spent |
    | an empty batch | noise alone; charged |
    | zero_grad() before step() | the last backward is forgotten; nothing charged |
    | correlated noise, and a batch of the loader was left out or comes again | refused |
    """

    def __init__(
        self,
        original: Optimizer,
        *,
        module: nn.Module,
        capture: Capture,
        step: PrivateStep,
        ledger: Ledger,
        sample_rate: float,
        expected_batch_size: float,
        loss_reduction: str,
        sigma: float,
        claimed_by_paper: bool,
        max_grad_norm: Any,
        split: Split | None = None,
    ) -> None:
        # Optimizer.__init__ would build groups and state of its own; those of `original` are the truth.
        self.original_optimizer = original
        self.capture = capture
        self.private_step = step
        self.ledger = ledger
        self.certificate = step.plan.certificate()
        self.sample_rate = sample_rate
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = loss_reduction
        self.sigma = sigma
        self.claimed_multiplier = sigma if claimed_by_paper else None
        self.max_grad_norm = max_grad_norm
        #: whose parts take turns where noise is correlated over steps; `sample_rate` is then that of a turn
        self.split = split
        self._turn: int | None = None
        self._parameters = {name: p for name, p in module.named_parameters() if name in step.views}
        self._frozen = {name: p for name, p in module.named_parameters() if name not in step.views}
        self._skip = False
        self._processes = world_size()

    @property
    def noise_multiplier(self) -> float:
        """The proven multiplier of every step."""
        return self.certificate.noise_multiplier

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise GredpError("parameters cannot join a private optimiser: their gradients would not be certified")

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Whether the physical batch that comes next is not the last of its logical batch."""
        self._skip = do_skip

    def signal_turn(self, turn: int) -> None:
        """The number of the step that the batch which comes next was drawn for."""
        self._turn = turn

    @property
    def next_turn(self) -> int:
        """The number of the step that comes next, among those of the split."""
        return 0 if self.split is None else self.ledger.steps_of(self.split.name)

    def begin_logical_batches(self) -> bool:
        """Forget a logical batch that was left unfinished; True if there was one."""
        unfinished = self.private_step.accumulated
        self.private_step.discard()
        self.capture.drop()
        self._skip = False
        return unfinished

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, parameter in self._frozen.items():
            if parameter.requires_grad or parameter.grad is not None:
                raise GredpError(
                    f"parameter {name} was unfrozen after make_private: its gradient would be neither "
                    "clipped nor noised; unfreeze first, then make the model private"
                )
        if world_size() != self._processes:
            raise GredpError(
                f"{world_size()} processes, but {self._processes} when the model was made private: "
                "join them first, then make it private"
            )
        if self.split is not None and self._turn != self.next_turn:
            raise GredpError(
                f"step {self.next_turn + 1} needs the batch that the loader drew for it, not that of step "
                f"{'none' if self._turn is None else self._turn + 1}: with correlation bands every batch is "
                "stepped with once, in order, before the next one is taken"
            )
        spectra = self.capture.take()
        if spectra is None:
            raise GredpError(
                "optimizer.step() without a new backward pass: gradients are spent once; "
                "check that model.train() was called and that the loss depends on the model"
            )
        self.private_step.accumulate(spectra)
        if self._skip:
            return loss
        self._charge()
        gradients = self.private_step.release(self._parameters, self.ledger.steps)
        divisor = self.expected_batch_size if self.loss_reduction == "mean" else 1.0
        for name, parameter in self._parameters.items():
            released = gradients[name].div_(divisor).to(parameter.dtype)
            parameter.grad = released if parameter.requires_grad else None  # None: frozen in the meantime
        self.original_optimizer.step()
        return loss

    def _charge(self) -> None:
        turns = () if self.split is None else (self.split.parts, self.split.name)
        self.ledger.charge(self.certificate, self.sample_rate, self.claimed_multiplier, *turns)
        self._turn = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.capture.drop()
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return (
            f"PrivateOptimizer(noise_multiplier={self.noise_multiplier:.4g}, "
            f"sample_rate={self.sample_rate:.4g}, {self.original_optimizer!r})"
        )
