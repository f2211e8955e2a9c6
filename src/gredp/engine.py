"""`PrivacyEngine.make_private` joins both paths around a user's model, optimizer and data."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gredp.budget import Sampling, noise_multiplier
from gredp.distributed import model_number, reject_differences, run_on_rank_zero, share_weights
from gredp.errors import GredpError, choose
from gredp.gradient.capture import Capture
from gredp.gradient.noise import GeneratorSource, SecretSource
from gredp.gradient.step import PrivateStep
from gredp.gradient.units import blocks, padded_blocks
from gredp.guarantee import Guarantee
from gredp.mechanisms import mechanism
from gredp.mechanisms.plan import Needs
from gredp.mechanisms.stages import Planner
from gredp.memory import keep_freed_memory
from gredp.opacus_names import OpacusNames, without_opacus_options
from gredp.optimizer import PrivateOptimizer
from gredp.privacy.accountant import Accountant, check_delta_for, epsilon
from gredp.privacy.ledger import one_unit
from gredp.privacy.paper_claims import claimed_epsilon
from gredp.privacy.schedule import NoiseSchedule
from gredp.randomness import Secret
from gredp.request_checks import (
    check_criterion,
    check_parameters,
    check_request,
    checked_schedule,
    warn_of_fixed_batches,
    whole_bands,
)
from gredp.sampling import PrivateLoader, poisson_loader
from gredp.sampling.persons import PersonIds
from gredp.sampling.same_records import reject_other_records
from gredp.storage.checkpoint import contract
from gredp.summary import Summary, html_table, run_on_zeros, summarize
from gredp.validation import validate


class Private(NamedTuple):
    """What `make_private` returns: `model, optimizer, loader = engine.make_private(...)`."""

    model: nn.Module
    optimizer: PrivateOptimizer
    loader: PrivateLoader


class PrivacyEngine(OpacusNames):
    """Trains any PyTorch model privately; the training loop stays as it is.

    Formal guarantee. After T calls of `optimizer.step()` on batches of the returned loader, the model's
    parameters (all T versions of them) are (ε, δ)-DP with ε = `get_epsilon(δ)`, for adding or removing one
    record (one person with all of their records, with `persons`), if the loss is a sum or mean over records
    of terms that depend on one record each, and if only the returned objects have touched the data.

    `accountant` is "pld" (default, tighter) or "rdp"; Opacus' "prv" means "pld" here. Noise and batches come
    from a secret of this engine through a cryptographic keystream; `secure_mode` rejects generators that
    would take its place. `secret` is for tests.
    """

    def __init__(
        self, *, accountant: str = "pld", secure_mode: bool = False, secret: Secret | None = None
    ) -> None:
        self.secure_mode = secure_mode
        super().__init__(secret or Secret())
        self.accountant = Accountant(self.ledger, "pld" if accountant == "prv" else accountant)
        #: the requested δ
        self.target_delta: float | None = None
        #: the requested multiplier: z, or the paper's σ under its claim
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
        persons: PersonIds | None = None,
        records_per_person: int | None = None,
        weights: Sequence[float] | torch.Tensor | None = None,
        noise_schedule: Sequence[tuple[int, float]] | NoiseSchedule | None = None,
        correlation_bands: int = 1,
        precision: str = "single",
        **options: Any,
    ) -> Private:
        """Make training private at a given noise; returns `Private`, which unpacks as in Opacus.

        | argument | default | meaning |
        |---|---|---|
        | `module` | | the model; it is returned unwrapped, with hooks on its layers |
        | `optimizer` | | any `torch.optim` optimizer of the model's parameters, except LBFGS |
        | `criterion` | `None` | the loss, if it should be checked; "ghost" mode returns it |
        | `data_loader` | | a `DataLoader` with a `batch_size`, which becomes the expected batch size |
        | `noise_multiplier` | | the proven z of each step (the paper's σ under its claim); 0 gives ε = ∞ |
        | `max_grad_norm` | | clipping norm of a record's gradient, or one for each layer or parameter |
        | `batch_first` | `True` | False: records are the second dimension of the model's inputs |
        | `loss_reduction` | `"mean"` | how the loss joins the records of a batch: "mean" or "sum" |
        | `poisson_sampling` | `True` | each record joins each batch by itself; False: fixed batches |
        | `clipping` | `None` | "flat" (the default), "automatic", "per_layer", "adaptive", and others |
        | `noise_generator` | `None` | for tests: ε does not hold against anyone who knows its seed |
        | `grad_sample_mode` | `"hooks"` | Opacus' modes mean the same here; "ghost" returns `criterion` too |
        | `method` | `"dpsgd"` | "plain", "dpsgd", "spectral_dp" or "gredp" |
        | `noise` | `"white"` | of gredp: "white", "real" or "shaped" |
        | `claim` | `"proven"` | "paper" takes σ as the paper does; the proven ε is then larger |
        | `sample_rate` | `None` | q, if the number of records is confidential; otherwise batch_size/records |
        | `views` | `1` | inputs of each drawn record, side by side: random transforms give as many views |
        | `persons` | `None` | the id of each record's person, or person → record numbers: ε is then theirs |
        | `records_per_person` | `None` | with `persons`, records of one that take part in a draw; None is 4 |
        | `weights` | `None` | public, of each record: how often it is drawn; ε is that of the heaviest |
        | `noise_schedule` | `None` | public stages (steps, factor of the noise); the last one stays |
        | `correlation_bands` | `1` | b steps over which noise is correlated (docs/theory.md, section 6) |
        | `precision` | `"single"` | "bf16" rounds products of each record, before norm and sum: quicker |
        | `**options` | | of the method, such as `filter_ratio`, `noise_parts`, `grid`, `exponent` |

        Sums are divided by the loader's batch size, whatever was drawn. The gradients of a record's views are
        averaged before the record is clipped, so K and z are those of one view. The transforms of one record
        must not depend on which others were drawn. With `persons` those are drawn: `batch_size` counts
        persons, and the gradients of each are averaged and clipped as one. With correlation bands the records
        are split into b parts that take turns, each drawn at rate b·q: T steps cost as ⌈T/b⌉ at that rate.

        | case | what happens |
        |---|---|
        | a layer that mixes records, a parameter that no rule covers | rejected by name |
        | a trainable parameter that the optimizer lacks, or one that is not the model's | rejected |
        | a model in torch's DistributedDataParallel | rejected |
        | a record without one person; `persons` after steps without them, or the reverse | rejected |
        | several processes | train as one, from the first one's weights; rejected if their settings differ |
        | correlation_bands·q above 1; correlation bands with `claim="paper"`, plain, a schedule | rejected |
        """
        if self.secure_mode and (noise_generator or getattr(data_loader, "generator", None)) is not None:
            raise GredpError("secure_mode draws from the engine's secret: remove the generators")
        keep_freed_memory()
        bands = whole_bands(correlation_bands)
        chosen = mechanism(method, noise, claim, clipping, bands, **without_opacus_options(options))
        schedule = checked_schedule(noise_schedule, bands, poisson_sampling)
        check_request(loss_reduction, grad_sample_mode)
        check_criterion(criterion, loss_reduction)
        check_parameters(module, optimizer)
        split = self.secret.split(bands) if bands > 1 else None
        whose = persons, records_per_person, weights, not poisson_sampling
        loader = poisson_loader(data_loader, sample_rate, self.secret, views, split, *whose)
        sampler, split = loader.poisson, loader.poisson.split
        if sampler.views != 1 and chosen.grid == "padded":
            raise GredpError("views and persons have no padded spectrum of product form: use grid='kernel'")
        one_unit(self.ledger.entries, sampler.unit)
        expected = float(sampler.expected)
        choose("precision", precision, ("single", "bf16"))
        rounded = precision == "bf16"
        capture = Capture(module, loss_reduction, chosen.needs, sampler.views, rounded, batch_first)
        loader.collate_fn.axis = int(not batch_first)  # type: ignore[union-attr]
        try:
            shapes = blocks(module, capture.units)
            if chosen.grid == "padded":
                run = partial(run_on_zeros, module, loader.one_record())
                shapes = padded_blocks(module, capture.units, run)
            planner = Planner(chosen, tuple(shapes), expected)
            plan, sigma, norms = planner.plan(max_grad_norm, noise_multiplier, claim)
        except Exception:
            capture.detach()
            raise
        self._capture = capture
        source = SecretSource(self.secret) if noise_generator is None else GeneratorSource(noise_generator)
        private = PrivateOptimizer(
            optimizer,
            module=module,
            capture=capture,
            step=PrivateStep(plan, source, expected),
            ledger=self.ledger,
            sampler=sampler,
            loss_reduction=loss_reduction,
            sigma=sigma,
            planner=planner,
            max_grad_norm=norms,
            schedule=schedule,
        )
        reject_differences(contract(private) | {"records": sampler.records, "steps": sampler.steps})
        private.private_step.number = number = model_number()
        key = bytes(self.secret.keystream(32, "same records", number)[:32])
        reject_other_records(loader, key)
        share_weights(module)
        capture.state.remember()
        module.__dict__.setdefault("_module", module)  # what Opacus returns has the model there
        self._optimizer, self.requested_multiplier, self._loader = private, noise_multiplier, loader
        warn_of_fixed_batches(private.noise_multiplier, sampler)
        if split is not None:
            self._use_split(run_on_rank_zero(lambda: (None, split.key), "the split of the records")[1])
        if grad_sample_mode == "ghost":
            return module, private, criterion, loader  # type: ignore[return-value]  # Opacus' four in this mode
        return Private(module, private, loader)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        allow_large_delta: bool = False,
        **request: Any,
    ) -> Private:
        """As `make_private`, with the least noise at which `epochs` passes end within the target.

        | argument | default | meaning |
        |---|---|---|
        | `target_epsilon` | | the proven ε at the end, with what this engine has spent before |
        | `target_delta` | | δ; warned of from 1/(10·records) on |
        | `epochs` | | passes of the loader; steps beyond them are charged on top |
        | `allow_large_delta` | `False` | accept a δ of 1/records or more, which is rejected otherwise |
        | `**request` | | any other argument of `make_private` |

        Under `claim="paper"` σ is what the paper's experiments would take, and the proven ε is larger. With a
        stated `sample_rate`, records are batch_size/sample_rate. A `noise_schedule` is multiplied by z.

        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model, engine = torch.nn.Linear(4, 2), PrivacyEngine(accountant="rdp")
        >>> data = TensorDataset(torch.randn(100, 4), torch.zeros(100).long())
        >>> model, optimizer, loader = engine.make_private_with_epsilon(
        ...     module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(data, batch_size=20),
        ...     target_epsilon=2.0,
        ...     target_delta=1e-4,
        ...     epochs=1,
        ...     max_grad_norm=1.0,
        ... )
        >>> for x, y in loader:
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> print(f"{engine.get_epsilon(1e-4):.2f}")
        2.00
        """
        if epochs <= 0 or epochs != int(epochs):
            raise GredpError(f"the number of epochs must be a positive whole number, not {epochs}")
        check_parameters(module, optimizer)
        views, rate = request.get("views", 1), request.get("sample_rate")
        fixed = not request.get("poisson_sampling", True)
        whose = request.get("persons"), request.get("records_per_person"), request.get("weights"), fixed
        sampler = poisson_loader(data_loader, rate, self.secret, views, None, *whose).poisson
        one_unit(self.ledger.entries, sampler.unit)
        bands = request.get("correlation_bands", 1)
        schedule = checked_schedule(request.get("noise_schedule"), bands, not fixed)
        turns = (whole_bands(bands), sampler.turn_rate)
        bands, rate = (sampler.steps, sampler.sample_rate) if fixed else turns
        multiplier = 0.0
        if request.get("method") != "plain":
            check_delta_for(target_delta, sampler.expected / sampler.sample_rate, allow_large_delta)
            multiplier = noise_multiplier(
                target_epsilon,
                target_delta,
                Sampling(rate, int(epochs) * sampler.steps, bands),
                claim=request.get("claim", "proven"),
                accountant=self.accountant.name,
                spent=self.ledger.entries,
                schedule=schedule,
            )
        self.target_delta = target_delta
        request |= {"module": module, "optimizer": optimizer, "data_loader": data_loader}
        made = self.make_private(noise_multiplier=multiplier, max_grad_norm=max_grad_norm, **request)
        made[1].target_epsilon = target_epsilon
        return made

    def get_epsilon(self, delta: float, further_steps: int = 0) -> float:
        """The proven ε spent so far at `delta`; with `further_steps`, what it will be after as many more."""
        further = self._private()[1].cost(further_steps) if further_steps else ()
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

    def get_claimed_epsilon(self, delta: float) -> float | None:
        """What the paper would report for the same run; None where it makes no claim."""
        return claimed_epsilon(self.ledger.entries, delta)

    def summary(self, model: nn.Module | None = None, example: Any = None, batch: int = 1) -> Summary:
        """The layers that are trained privately: rule, parameters, memory for each of `batch` records.

        By default those of the private model, run on zeros shaped as a record of its loader. Another model,
        before it is made private, needs an `example` input (a batch) for the memory to be known.
        """
        if model is None:
            model = self._private()[0]
        elif errors := validate(model):
            raise errors[0]
        needs: Needs = "norms" if self._capture is None else self._capture.needs
        if example is None and self._loader and self._capture and model is self._capture.module:
            example = self._loader.one_record()
        return summarize(
            model, None if example is None else partial(run_on_zeros, model, example), batch, needs
        )

    def __repr__(self) -> str:
        return f"PrivacyEngine(accountant={self.accountant.name!r}, steps={self.ledger.steps})"

    def _shown(self) -> list[tuple[str, str]]:
        if self._optimizer is None:
            return [("nothing spent", "make_private comes first")]
        rows = self.guarantee(self.target_delta or 1e-5).rows()
        assert self._loader is not None
        assert self._capture is not None
        if self._capture.rounded:
            rows.append(("precision", "bfloat16 products, clipped by the norms of what is summed"))
        if times := self._capture.exposed:
            rows.append(("NOT COVERED", f"per-sample gradients were read {times} times: outside ε"))
        seeded = self.secret.insecure or self._loader.generator is not None
        if seeded or not isinstance(self._optimizer.private_step.source, SecretSource):
            rows.insert(0, ("INSECURE", "noise or batches come from a seed: anyone who knows it voids ε"))
        return rows

    def __str__(self) -> str:
        """The guarantee, at the requested δ, or 1e-5."""
        rows = self._shown()
        width = max(len(name) for name, _ in rows)
        return "\n".join(["PrivacyEngine", *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        return html_table(self._shown(), ("PrivacyEngine", ""))
