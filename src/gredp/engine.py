"""`PrivacyEngine.make_private` joins both rails around a user's model, optimizer and data."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gredp.budget import Sampling, noise_multiplier
from gredp.distributed import model_number, refuse_differences, run_on_rank_zero, share_weights
from gredp.errors import GredpError
from gredp.gradient.capture import Capture
from gredp.gradient.noise import GeneratorSource, NoiseSource, SecretSource
from gredp.gradient.step import PrivateStep
from gredp.gradient.units import blocks, padded_blocks
from gredp.guarantee import Guarantee
from gredp.mechanisms import Mechanism, mechanism
from gredp.mechanisms.banded import check_bands
from gredp.mechanisms.plan import Needs, positive_norm
from gredp.mechanisms.registry import noise_scale
from gredp.optimizer import PrivateOptimizer
from gredp.privacy.accountant import Accountant, check_delta_for, epsilon
from gredp.privacy.certificate import Block
from gredp.privacy.paper_claims import claimed_epsilon
from gredp.privacy.schedule import NoiseSchedule
from gredp.randomness import Secret
from gredp.request_checks import (
    check_criterion,
    check_parameters,
    check_request,
    checked_schedule,
    whole_bands,
)
from gredp.sampling import PoissonBatchSampler, poisson_loader
from gredp.sampling.loader import one_record
from gredp.sampling.same_records import refuse_other_records
from gredp.storage.checkpoint import contract
from gredp.storage.resumable import Resumable
from gredp.summary import Summary, html_table, run_on_zeros, summarize
from gredp.validation import validate


class PrivacyEngine(Resumable):
    """Trains any PyTorch model privately; the training loop stays as it is.

    Formal guarantee. After T calls of `optimizer.step()` on batches of the returned loader, the model's
    parameters (all T versions of them) are (ε, δ)-DP with ε = `get_epsilon(δ)`, for adding or removing
    one record, provided that the loss is a sum or mean over records of terms that depend on one record
    each, and that nothing but the returned objects has touched the data.

    `accountant` is "pld" (default, tighter) or "rdp"; Opacus' "prv" means "pld" here. Noise and batches come
    from a secret of this engine through a cryptographic keystream; `secure_mode` refuses generators that
    would take its place. `secret` is for tests.
    """

    def __init__(
        self, *, accountant: str = "pld", secure_mode: bool = False, secret: Secret | None = None
    ) -> None:
        name: Any = "pld" if accountant == "prv" else accountant
        self.secure_mode = secure_mode
        super().__init__(secret or Secret())
        self.accountant = Accountant(self.ledger, name)
        #: the δ that was asked for
        self.target_delta: float | None = None
        #: the multiplier as it was asked for: z, or the paper's σ under its claim
        self.requested_multiplier = math.nan

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str | None = None,
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        method: str = "dpsgd",
        noise: str = "white",
        claim: str = "proven",
        sample_rate: float | None = None,
        views: int = 1,
        noise_schedule: Sequence[tuple[int, float]] | NoiseSchedule | None = None,
        correlation_bands: int = 1,
        **options: Any,
    ) -> Any:
        """Returns (module, optimizer, data_loader); with a criterion before the loader in "ghost" mode.

        `noise_multiplier` is the proven z of each step; under `claim="paper"` it is the paper's σ. 0 is
        allowed and gives ε = ∞. `method` is plain, dpsgd, spectral_dp or gredp; `noise` of gredp is white,
        real or shaped; further options are those of the mechanism (`filter_ratio`, `noise_parts`, `grid`,
        `per_sample_noise`, `exponent`, `preconditioner`, `energy_noise`, `bands`, `groups`, `window`).

        `sample_rate` states q where the number of records is itself confidential; otherwise it is
        batch_size/records. Sums are divided by the loader's batch size, whatever was drawn.

        `views` asks the data set so many times for each record that was drawn, side by side in the batch:
        with random transforms, as many views of it. Their gradients are averaged within the record before
        it is clipped, once: K and z are those of a single view. The transforms need no secrecy, but those
        of one record must not depend on which others were drawn.

        `noise_schedule` lists stages (steps, factor): a step's noise, and so its z, is `noise_multiplier`
        times its stage's factor; the last one stays. It is public, and must not come from the data.

        With `correlation_bands` b above 1 a step takes back part of the noise of the b − 1 steps before it.
        The records are split into b parts that take turns, each drawn from at rate b·q: T steps cost as much
        as ⌈T/b⌉ steps at that rate (docs/theory.md, section 6).

        | case | what happens |
        |---|---|
        | a layer that mixes records, a parameter that no rule covers | refused by name |
        | a trainable parameter outside the optimizer, or one of the optimizer's outside the model | refused |
        | poisson_sampling=False, a model in torch's DistributedDataParallel | refused |
        | several processes | train as one, from the first one's weights; if told different things: refused |
        | correlation_bands·q above 1; correlation_bands with `claim="paper"`, plain or a schedule | refused |
        """
        if self.secure_mode and not (
            noise_generator is None and getattr(data_loader, "generator", None) is None
        ):
            raise GredpError(
                "secure_mode takes noise and batches from the engine's secret: give neither a "
                "noise_generator nor a data loader with a generator"
            )
        correlation_bands = whole_bands(correlation_bands)
        chosen = mechanism(method, noise, claim, clipping, correlation_bands, **options)
        schedule = checked_schedule(noise_schedule, correlation_bands)
        check_request(batch_first, loss_reduction, poisson_sampling, grad_sample_mode)
        check_criterion(criterion, loss_reduction)
        if views != 1 and chosen.grid == "padded":
            raise GredpError(
                "several views of a record have no padded spectrum of product form: use grid 'kernel'"
            )
        check_parameters(module, optimizer)
        split = self._new_split(correlation_bands) if correlation_bands > 1 else None
        loader = poisson_loader(data_loader, sample_rate, self.secret, views, split)
        sampler = loader.batch_sampler
        assert isinstance(sampler, PoissonBatchSampler)
        expected = float(sampler.expected)
        capture = Capture(module, loss_reduction, chosen.needs, sampler.views)
        try:
            blocks = _blocks(chosen, capture, loader)
            norms: Any = (
                list(map(positive_norm, max_grad_norm))
                if isinstance(max_grad_norm, Sequence)
                else positive_norm(max_grad_norm)
            )
            if method == "plain":
                sigma = 0.0
            else:
                unit = chosen.unit_multiplier(blocks, norms, expected)
                sigma = noise_scale(noise_multiplier, unit, claim)
            plan = chosen.plan(blocks, norms, sigma, expected)
        except Exception:
            capture.detach()
            raise
        source: NoiseSource = (
            SecretSource(self.secret) if noise_generator is None else GeneratorSource(noise_generator)
        )
        self._capture = capture
        private = PrivateOptimizer(
            optimizer,
            module=module,
            capture=capture,
            step=PrivateStep(plan, source, expected),
            ledger=self.ledger,
            sample_rate=check_bands(correlation_bands, sampler.sample_rate),
            expected_batch_size=expected,
            loss_reduction=loss_reduction,
            sigma=sigma,
            claimed_by_paper=chosen.claimed_by_paper,
            max_grad_norm=norms,
            schedule=schedule,
            split=split,
            handed=sampler.handed,
        )
        if split is not None:
            sampler.handed.next_turn = lambda: private.next_turn
        refuse_differences(contract(private) | {"records": sampler.records, "steps": sampler.steps})
        private.private_step.number = number = model_number()
        key = bytes(self.secret.keystream(32, "same records", number)[:32])
        refuse_other_records(loader, key)
        share_weights(module)
        capture.state.remember()
        self._optimizer, self.requested_multiplier = private, noise_multiplier
        self._loader = loader
        if split is not None:
            self._use_split(run_on_rank_zero(lambda: (None, split.key), "the split of the records")[1])
        if grad_sample_mode == "ghost":
            return module, private, criterion, loader
        return module, private, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        claim: str = "proven",
        sample_rate: float | None = None,
        views: int = 1,
        noise_schedule: Sequence[tuple[int, float]] | NoiseSchedule | None = None,
        correlation_bands: int = 1,
        allow_large_delta: bool = False,
        **settings: Any,
    ) -> Any:
        """As `make_private`, with the noise that `epochs` passes of the loader need for the target.

        Under `claim="proven"` the run ends at a proven ε at most `target_epsilon`, what this engine has spent
        before included; steps beyond those epochs are charged on top. With a `noise_schedule`, z is the
        common factor of its stages. Under `claim="paper"` σ is what the paper's experiments would take, and
        the proven ε is larger.

        A `target_delta` of 1/records or more is refused unless `allow_large_delta`, and warned of from a
        tenth of it on; with a stated `sample_rate`, records are batch_size/sample_rate.
        """
        if epochs <= 0 or epochs != int(epochs):
            raise GredpError(f"the number of epochs must be a positive whole number, not {epochs}")
        check_parameters(module, optimizer)
        loader = poisson_loader(data_loader, sample_rate, self.secret, views)
        sampler = loader.batch_sampler
        assert isinstance(sampler, PoissonBatchSampler)
        plain = settings.get("method") == "plain"
        if not plain:
            check_delta_for(target_delta, sampler.expected / sampler.sample_rate, allow_large_delta)
        schedule, bands = checked_schedule(noise_schedule, correlation_bands), whole_bands(correlation_bands)
        sampling = Sampling(sampler.sample_rate, int(epochs) * sampler.steps, bands)
        multiplier = 0.0
        if not plain:
            multiplier = noise_multiplier(
                target_epsilon,
                target_delta,
                sampling,
                claim=claim,
                accountant=self.accountant.name,
                spent=self.ledger.entries,
                schedule=schedule,
            )
        self.target_delta = target_delta
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=multiplier,
            max_grad_norm=max_grad_norm,
            claim=claim,
            sample_rate=sample_rate,
            views=views,
            noise_schedule=schedule,
            correlation_bands=bands,
            **settings,
        )

    def get_epsilon(self, delta: float, further_steps: int = 0) -> float:
        """The proven ε spent so far at `delta`; with `further_steps`, what it will be after as many more."""
        if not further_steps:
            return self.accountant.get_epsilon(delta)
        further = self._private()[1].cost(further_steps)
        return epsilon((*self.ledger.entries, *further), delta, self.accountant.name)

    def guarantee(self, delta: float, further_steps: int = 0) -> Guarantee:
        """What holds now, or would after `further_steps` more: proven ε, and the claimed one beside it."""
        _, optimizer = self._private()
        return Guarantee.of(
            (*self.ledger.entries, *optimizer.cost(further_steps)),
            delta,
            step=optimizer.one_step,
            sigma=optimizer.sigma,
            accountant=self.accountant.name,
        )

    @property
    def averaged(self) -> nn.Module:
        raise AttributeError("averaged is gone: average the released weights by torch's AveragedModel")

    def get_claimed_epsilon(self, delta: float) -> float | None:
        """What the paper would report for the same run; None where it makes no claim."""
        return claimed_epsilon(self.ledger.entries, delta)

    @staticmethod
    def is_compatible(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: Any = None
    ) -> bool:
        """Whether `make_private` would take this model."""
        return not validate(module)

    def summary(self, model: nn.Module | None = None, example: Any = None, batch: int = 1) -> Summary:
        """The layers that are trained privately: rule, parameters, memory for each of `batch` records.

        By default those of the private model, run on zeros shaped as a record of its loader. Another model,
        before it is made private, needs an `example` input (a batch) for the memory to be known.
        """
        errors = validate(model) if model is not None else []
        if errors:
            raise errors[0]
        needs: Needs = "norms" if self._capture is None else self._capture.needs
        if model is None:
            model = self._private()[0]
        run: Any = None
        if example is not None:
            run = partial(run_on_zeros, model, example)
        elif self._loader is not None and self._capture is not None and model is self._capture.module:
            run = partial(run_on_zeros, model, one_record(self._loader))
        return summarize(model, run, batch, needs)

    def __repr__(self) -> str:
        return f"PrivacyEngine(accountant={self.accountant.name!r}, steps={self.ledger.steps})"

    def _shown(self) -> list[tuple[str, str]]:
        if self._optimizer is None:
            return [("nothing spent", "make_private comes first")]
        rows = self.guarantee(self.target_delta or 1e-5).rows()
        assert self._loader is not None
        seeded = self.secret.insecure or self._loader.generator is not None
        if seeded or not isinstance(self._optimizer.private_step.source, SecretSource):
            rows.insert(0, ("INSECURE", "noise or batches from a seed: ε does not hold for who knows it"))
        return rows

    def __str__(self) -> str:
        """The guarantee, at the δ that was asked for, or 1e-5."""
        rows = self._shown()
        width = max(len(name) for name, _ in rows)
        return "\n".join(["PrivacyEngine", *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        return html_table(self._shown(), ("PrivacyEngine", ""))


def _blocks(chosen: Mechanism, capture: Capture, loader: DataLoader[Any]) -> list[Block]:
    if chosen.grid != "padded":
        return blocks(capture.module, capture.units)
    return padded_blocks(
        capture.module, capture.units, lambda: run_on_zeros(capture.module, one_record(loader))
    )
