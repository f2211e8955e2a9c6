"""The optimizer a user steps: it charges the ledger, then applies the private gradient."""

import math
import warnings
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from gredp.distributed import rejected_by_all, world_size
from gredp.errors import GredpError
from gredp.gradient.adaptive import AdaptedNorms
from gredp.gradient.capture import Capture
from gredp.gradient.received import Forward
from gredp.gradient.rules import exact
from gredp.gradient.step import PrivateStep
from gredp.mechanisms.plan import StepPlan
from gredp.mechanisms.stages import Planner, stages_of
from gredp.privacy.ledger import Entry, Ledger, Unit
from gredp.privacy.schedule import CONSTANT, NoiseSchedule
from gredp.randomness import Split
from gredp.sampling.draws import Draw
from gredp.sampling.samplers import PoissonBatchSampler


def _of_original(name: str) -> Any:
    """An attribute of the wrapped optimizer, which stays the only one to hold it."""
    return property(
        lambda self: getattr(self.original_optimizer, name),
        lambda self, value: setattr(self.original_optimizer, name, value),
    )


class PrivateOptimizer(Optimizer):
    """Wraps any `torch.optim` optimizer; `step()` replaces `p.grad` by the private gradient first.

    Formal guarantee. Every call of `step()` that updates parameters has been charged to the ledger with
    the plan's certificate and the loader's rate, before noise was drawn. A part of a logical batch that
    is not its last only adds up. Of several processes the first one charges on the disk, and all charge and
    step alike: at rate 1 if the batch of any of them is not new.

    | case | what happens |
    |---|---|
    | step() without a backward since the last one | rejected: those gradients were spent |
    | a second step on a batch of the loader | charged at rate 1, with a warning: no new draw hides it |
    | more or fewer inputs than records were drawn | rejected: each input is clipped as one record |
    | several forwards on one batch, one backward or several | a record's gradients add up, clipped once |
    | batches of the loader are added up, a second step on a part of one | rejected |
    | batches of the caller's own, before the loader was used | charged as the loader's: the caller's word |
    | an exception within step() | the sum is dropped; what was charged stays charged |
    | an empty batch | noise alone; charged |
    | zero_grad() before step() | the last backward is dropped; nothing charged |
    | correlated noise, and a batch of the loader is skipped or repeated | rejected |
    """

    param_groups = _of_original("param_groups")
    state = _of_original("state")
    defaults = _of_original("defaults")
    register_step_pre_hook = _of_original("register_step_pre_hook")
    register_step_post_hook = _of_original("register_step_post_hook")
    state_dict = _of_original("state_dict")
    load_state_dict = _of_original("load_state_dict")

    def __init__(
        self,
        original: Optimizer,
        *,
        module: nn.Module,
        capture: Capture,
        step: PrivateStep,
        ledger: Ledger,
        sampler: PoissonBatchSampler,
        loss_reduction: str,
        sigma: float,
        planner: Planner,
        max_grad_norm: float | list[float],
        schedule: NoiseSchedule = CONSTANT,
    ) -> None:
        # Optimizer.__init__ would build groups and state of its own; those of `original` are the truth.
        self.original_optimizer = original
        self._step_hooks: list[Callable[[PrivateOptimizer], Any]] = []
        self.capture = capture
        self.private_step = step
        self.ledger = ledger
        self.schedule = schedule
        #: steps that were charged to the ledger before this model's first
        self.charged_before = ledger.steps
        self.sampler = sampler
        #: where noise is correlated over steps, that of the part whose turn it is
        self.sample_rate = sampler.turn_rate
        self.expected_batch_size = float(sampler.expected)
        self.loss_reduction = loss_reduction
        self.planner = planner
        #: what `make_private_with_epsilon` promised, until less noise than that is set
        self.target_epsilon: float | None = None
        self._adopt(step.plan, sigma, max_grad_norm)
        self._stage = self._stages[0]  # that of the sum
        #: multiplier and norm that `make_private` was asked for
        self.requested = self.noise_multiplier, max_grad_norm
        self._parameters = {name: p for name, p in module.named_parameters() if name in step.block_views}
        self._frozen = {name for name, _ in module.named_parameters() if name not in step.block_views}
        self._owned = set(module.parameters())
        #: the batches that the loader has handed out
        self.handed = sampler.handed
        capture.handed_out = lambda: None if self.handed.unused is None else self.handed.count
        if self.split is not None:
            self.handed.next_turn = lambda: self.next_turn
        self._skip = False
        self._summed: Draw | None = None  # the draw whose records are in the sum, where it is known
        self._newest: Draw | None = None  # the last one that was handed out when the sum began
        self._processes = world_size()

    def _adopt(self, plan: StepPlan, sigma: float, max_grad_norm: float | list[float]) -> None:
        """From the next sum on, this is the plan of every step; where the noise is scheduled, at factor 1."""
        self.certificate, self.sigma, self.planned_norm = plan.certificate(), sigma, max_grad_norm
        self.claimed_multiplier = sigma if self.planner.mechanism.claimed_by_paper else None
        #: the plans of all steps and their certificates
        self._stages = stages_of(plan, self.schedule, self.claimed_multiplier)

    @property
    def noise_multiplier(self) -> float:
        """The proven multiplier of every step; where the noise is scheduled, at factor 1.

        Setting it, or `max_grad_norm`, makes and certifies a new plan: the steps that follow are noised and
        charged by it. A logical batch that was begun ends as it began. Values must be public, known from the
        number of the step and not from the data: ε is that of a composition fixed beforehand.
        """
        return self.certificate.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if value != self.noise_multiplier:
            self._change("noise_multiplier", value, self.planned_norm)

    @property
    def max_grad_norm(self) -> float | list[float]:
        """One for all, or one for each layer or parameter; with adaptive clipping that of the next step."""
        learned = self.private_step.learned
        if not isinstance(learned, AdaptedNorms):
            return self.planned_norm
        return learned.norms[0] if len(learned.norms) == 1 else learned.norms

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | list[float]) -> None:
        if value != self.planned_norm:
            self._change("max_grad_norm", self.noise_multiplier, value)

    def _change(self, what: str, noise_multiplier: float, max_grad_norm: Any) -> None:
        self.planner.reject_change(what, self.schedule, self.split is not None)
        adopted = self.planner.plan(max_grad_norm, noise_multiplier)
        if self.target_epsilon is not None and noise_multiplier < self.noise_multiplier:
            warnings.warn(
                f"a noise multiplier of {noise_multiplier:.4g} is below the {self.noise_multiplier:.4g} that "
                f"was made for ε = {self.target_epsilon:g}: the run may end above, get_epsilon() tells",
                stacklevel=3,
            )
            self.target_epsilon = None
        self._adopt(*adopted)

    @property
    def split(self) -> Split | None:
        """Whose parts take turns, where noise is correlated over steps."""
        return self.sampler.split

    def cost(self, steps: int) -> tuple[Entry, ...]:
        """What the ledger will be charged for so many steps more; turns go on from those it holds."""
        first = self.ledger.steps - self.charged_before
        costs = groupby(self._stages[self.schedule.stage(first + step)].cost for step in range(steps))
        return tuple(
            Entry(z, self.sample_rate, len(list(same)), claimed, *self._turns) for (z, claimed), same in costs
        )

    @property
    def one_step(self) -> Entry:
        """What a step is charged; where the noise is scheduled, at factor 1."""
        return Entry(self.noise_multiplier, self.sample_rate, 1, self.claimed_multiplier, *self._turns)

    @property
    def _turns(self) -> tuple[int, str, Unit]:
        """Bands, split and unit of an entry."""
        parts = (1, "") if self.split is None else (self.split.parts, self.split.name)
        return (*parts, self.sampler.unit)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise GredpError("parameters cannot join a private optimizer: their gradients would not be certified")

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Whether the physical batch that comes next is not the last of its logical batch.

        For parts of one batch only: another draw may hold the same records again.
        """
        self._skip = do_skip

    @property
    def next_turn(self) -> int:
        """The number of the step that comes next, among those of the split."""
        return 0 if self.split is None else self.ledger.steps_of(self.split.name)

    def forget(self) -> bool:
        """Drop a logical batch that was left unfinished; True if there was one."""
        unfinished = self.private_step.accumulated
        self.private_step.discard()
        self.capture.drop()
        self.handed.waiting, self.handed.in_parts = None, False
        self._skip = False
        return unfinished

    @rejected_by_all
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reject_strangers()
        if world_size() != self._processes:
            were = f"{self._processes} in make_private, {world_size()} now"
            raise GredpError(f"the number of processes changed ({were}): join them before make_private")
        forwards = self.capture.forwards
        spectra = self.capture.take()
        if spectra is None:
            raise GredpError("optimizer.step() without a new backward pass: check model.train() and the loss")
        try:
            draw, last = self._draw_of(spectra.batch, forwards)
            if last:
                self.capture.state.reject_changes()
                if draw is not None and not self.private_step.accumulated:
                    self.capture.reduction.compare()
            with exact(next(iter(self._parameters.values())).device):
                if not self.private_step.accumulated:  # under the plan of the next step in the ledger
                    number = self.schedule.stage(self.ledger.steps - self.charged_before)
                    self._stage = self._stages[number]
                    self.private_step.begin_sum(self._stage.plan)
                self.private_step.accumulate(spectra)
                if not last:
                    return loss
                self._charge(draw)
                gradients = self.private_step.release(self._parameters, self.ledger.steps)
        except BaseException:  # an interrupt among them: the records of the next batch must not join these
            self.private_step.discard()
            raise
        divisor = self.expected_batch_size if self.loss_reduction == "mean" else 1.0
        for name, parameter in self._parameters.items():
            released = gradients[name].div_(divisor).to(parameter.dtype)
            parameter.grad = released if parameter.requires_grad else None  # None: frozen in the meantime
        for hook in self._step_hooks:
            hook(self)
        self.original_optimizer.step()
        return loss

    def attach_step_hook(self, hook: Callable[["PrivateOptimizer"], Any]) -> None:
        """Call `hook(optimizer)` in every step, when the noisy gradients are there, before they are used."""
        self._step_hooks.append(hook)

    def _reject_strangers(self) -> None:
        """Parameters that would move without a certificate, or stay where they are without a word."""
        for name, parameter in self.capture.module.named_parameters():
            ours = self._parameters.get(name) is parameter
            if not ours and (parameter.requires_grad or parameter.grad is not None):
                came = "was unfrozen" if name in self._frozen else "was added"
                raise GredpError(f"parameter {name} {came} after make_private: change the model before that")
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter not in self._owned:
                what = f"a parameter of shape {tuple(parameter.shape)}"
                raise GredpError(f"{what} of the optimizer was not the model's in make_private: remove it")

    def _draw_of(self, records: int, forwards: list[Forward]) -> tuple[Draw | None, bool]:
        """The draw that these records are of, and whether they complete it; None for batches of the caller's.

        Rejects sums in which a record could be twice, and rows that are not records.
        """
        inputs = self.handed.of_one_batch([forward.inputs for forward in forwards])
        part = self.handed.waiting
        if part is not None:
            if self.private_step.accumulated and self._summed is not part.draw:
                self.private_step.discard()  # its loop was left early
            self.handed.check(records, part.records)
            self.handed.waiting, self._summed = None, part.draw
            self._reject_out_of_turn(part.draw)
            return part.draw, part.last
        before = self.private_step.records if self.private_step.accumulated else 0
        if self.handed.in_parts and before:
            raise GredpError("this part of a batch was stepped on already: its records would count twice")
        if self._skip or self.private_step.accumulated:
            draw = self._draw_in_parts(before + records, inputs)
        else:
            draw = self.handed.find(records, inputs)
        self._reject_out_of_turn(draw)
        return draw, not self._skip

    def _draw_in_parts(self, records: int, inputs: list[StorageWeakRef]) -> Draw | None:
        """Parts that the caller cut by hand: all of one draw, and at the end all of that draw."""
        handed = self.handed
        newest = handed.unused[-1] if handed.unused else None
        draw = handed.by_memory(inputs)
        if not self.private_step.accumulated:
            self._summed, self._newest = draw, newest
        most = max((d.records for d in ([draw] if draw else handed.unused or ())), default=math.inf)
        if handed.unused is not None and (
            draw is not self._summed or newest is not self._newest or records > most
        ):
            raise GredpError(
                "these inputs are of more than one draw, and a record may be in several: for larger batches "
                "use a larger batch_size with BatchMemoryManager; the sum is dropped"
            )
        return draw if self._skip else handed.find(records, inputs)

    def _reject_out_of_turn(self, draw: Draw | None) -> None:
        if self.split is None or (draw is not None and not draw.used and draw.turn == self.next_turn):
            return
        given = "a batch of your own" if draw is None else f"that of step {draw.turn + 1}"
        raise GredpError(
            f"step {self.next_turn + 1} needs the batch that the loader drew for it, not {given}: with "
            "correlation bands or fixed batches, step on each batch once, in order, before taking the next"
        )

    def _charge(self, draw: Draw | None) -> None:
        rate = self.sample_rate
        # Of several processes the worst decides: the sum is that of all their batches.
        stale = rate < 1 and draw is not None and draw.used
        if self.private_step.agree(self.ledger.steps + 1, stale):
            # Given what the first step on a batch showed, who was drawn into it is no secret any more: the
            # step is a Gaussian mechanism without sampling, composed with the first one (docs/theory.md).
            again = "a second step on a batch is charged without amplification by sampling, at rate 1"
            warnings.warn(f"{again}: take a new batch from the loader for each step", stacklevel=4)
            rate = 1.0
        if draw is not None:
            self.handed.use(draw)
        self.ledger.charge(self._stage.certificate, rate, self._stage.claimed_multiplier, *self._turns)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # torch's GradScaler asks for it before a step
        raise GredpError("a GradScaler's factor would be clipped away: leave it out; bfloat16 needs none")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.capture.drop()
        self.original_optimizer.zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GredpError("a private optimizer is neither copied nor pickled: keep its state_dict()")

    def __repr__(self) -> str:
        return (
            f"PrivateOptimizer(noise_multiplier={self.noise_multiplier:.4g}, "
            f"sample_rate={self.sample_rate:.4g}, {self.original_optimizer!r})"
        )
