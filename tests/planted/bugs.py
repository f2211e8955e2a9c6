"""Planted bugs: ways in which private training breaks, as patches of the running library.

The self-test plants them one by one and shows that the auditor notices. Never call one outside of a test.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import gredp.adapters.budget as adapter_budget
import gredp.app.features.normalize as normalize
import gredp.app.session as session
import gredp.app.train as loop
import gredp.budget as budget
import gredp.distributed as distributed
import gredp.engine as engine
import gredp.gradient.batch_dimension as batch_dimension
import gredp.gradient.capture as capture
import gredp.gradient.clip as clip
import gredp.gradient.correlated as correlated
import gredp.gradient.factored as factored
import gredp.gradient.noise as noise
import gredp.gradient.norms as norms
import gredp.gradient.per_sample as per_sample
import gredp.gradient.received as received
import gredp.gradient.reduction as reduction
import gredp.gradient.shaping as shaping
import gredp.gradient.shared as shared
import gredp.gradient.state as state
import gredp.gradient.step as step
import gredp.gradient.summation as summation
import gredp.mechanisms.plan as plan
import gredp.optimizer as optimizer
import gredp.privacy.accountant as accountant
import gredp.privacy.calibrate as calibrate
import gredp.privacy.ledger as ledger
import gredp.randomness as randomness
import gredp.sampling as sampling
import gredp.sampling.samplers as samplers
import gredp.spectrum as spectrum
import gredp.storage.checkpoint as checkpoint
import gredp.storage.evidence as evidence
import gredp.storage.ledger_file as ledger_file
import gredp.storage.record as record
import gredp.storage.resumable as resumable
import gredp.validation as validation

SOURCES = (noise.SecretSource, noise.GeneratorSource)


class Patch:
    """Replaces attributes, and puts the old ones back."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        self._old.append((owner, name, vars(owner).get(name, self)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._old:
            owner, name, value = self._old.pop()
            delattr(owner, name) if value is self else setattr(owner, name, value)


@contextmanager
def planted(plant: Any) -> Iterator[None]:
    """The bug is in the library while this lasts."""
    patch = Patch()
    try:
        plant(patch)
        yield
    finally:
        patch.undo()


# ------------------------------------------------------------------ patches of the library


def fft_without_unitary_scaling(patch: Patch) -> None:
    """The library's default: the way there unscaled, the way back by 1/n; a round trip looks right."""

    def there(x, axes):
        return torch.fft.rfftn(x, dim=tuple(range(-axes, 0)))

    def back(x, axes, length):
        if axes > 1:
            x = torch.fft.ifftn(x, dim=tuple(range(-axes, -1)))
        return torch.fft.irfft(x, n=length)

    patch.setattr(spectrum, "half_fft", there)
    patch.setattr(spectrum, "half_ifft", back)


def half_spectrum_without_root_two(patch: Patch) -> None:
    """Interior bins of a half spectrum stand for two coefficients each; halving them twice loses noise."""
    honest = spectrum.BlockView.noise_parts

    def halved_once_more(self, a, b):
        parts = honest(self, a, b)
        parts[1 : (self.length + 1) // 2] /= math.sqrt(2)
        return parts

    patch.setattr(spectrum.BlockView, "noise_parts", halved_once_more)


def real_noise_only(patch: Patch) -> None:
    honest = spectrum.BlockView.noise_parts
    patch.setattr(spectrum.BlockView, "noise_parts", lambda self, a, b: honest(self, math.sqrt(2) * a, 0.0))


def last_coefficient_without_noise(patch: Patch) -> None:
    honest = spectrum.BlockView.noise_parts

    def all_but_the_last(self, a, b):
        parts = honest(self, a, b)
        parts[-1] = 0
        return parts

    patch.setattr(spectrum.BlockView, "noise_parts", all_but_the_last)


def clip_of_the_mean_loss(patch: Patch) -> None:
    """Norms taken of gradients of the mean loss, factors applied to those of the sum."""
    honest = clip.energies
    patch.setattr(clip, "energies", lambda gradient, view: honest(gradient, view) / gradient.batch**2)


def views_clipped_one_by_one(patch: Patch) -> None:
    """Each view of a record is bounded by itself, so that K of them move the sum by up to K·C."""
    patch.setattr(capture.Capture, "views", property(lambda self: 1, lambda self, views: None))
    rows_not_compared_with_records(patch)


def records_of_a_person_clipped_one_by_one(patch: Patch) -> None:
    """Each of the k records of a drawn person is bounded by itself: they move the sum by up to k·C."""
    views_clipped_one_by_one(patch)


def forwards_clipped_one_by_one(patch: Patch) -> None:
    """Each forward of a step is bounded by itself, so that k of them move the sum by up to k·C."""

    def side_by_side(first, second, grid_axes):
        return per_sample.Dense(torch.cat([first.dense(), second.dense()]), grid_axes)

    def all_of_them(spectra, *rest):
        return honest(replace(spectra, batch=max(g.batch for g in spectra.gradients.values())), *rest)

    honest = clip.clip
    patch.setattr(received, "add", side_by_side)
    patch.setattr(step, "clip", all_of_them)


def forwards_on_two_draws_added_up(patch: Patch) -> None:
    """A record may be in both, in other rows, and is charged for one."""
    patch.setattr(received.Received, "_reject_other_draw", lambda self, forward: None)
    patch.setattr(sampling.HandedOut, "by_memory", lambda self, inputs: None)
    honest = optimizer.PrivateOptimizer._draw_of
    patch.setattr(
        optimizer.PrivateOptimizer, "_draw_of", lambda self, records, forwards: honest(self, records, [])
    )


def units_mixed_in_a_ledger(patch: Patch) -> None:
    """Steps on records and steps on persons are added up as if they were of one kind."""
    patch.setattr(ledger, "one_unit", lambda entries, unit: None)
    patch.setattr(engine, "one_unit", lambda entries, unit: None)


def statistics_of_records_for_persons(patch: Patch) -> None:
    """The query before training counts each record of a person in full."""
    honest = normalize.release

    def in_full(engine, x, query, shares=None):
        return honest(engine, x, query, None if shares is None else shares.ceil())

    patch.setattr(normalize, "release", in_full)
    patch.setattr(session, "release", in_full)


def views_of_a_record_torn_apart(patch: Patch) -> None:
    """A physical batch may end between two views, and the next one's records begin with what is left."""

    def torn(self, sampler, queue):
        size = self.loader.max_physical_batch_size + 1
        for draw, drawn in sampler.draws():
            inputs = sampler.inputs(drawn)
            for start in range(0, max(len(inputs), 1), size):
                rows = inputs[start : start + size]
                queue.append(sampling.Part(draw, len(rows) // sampler.views, start + size >= len(inputs)))
                yield rows

    patch.setattr(sampling.loader._Parts, "_drawn", torn)


def a_schedule_that_is_charged_and_not_drawn(patch: Patch) -> None:
    """Every step draws the noise of factor 1, whatever factor it was charged for."""
    honest = step.PrivateStep.begin_sum
    patch.setattr(step.PrivateStep, "begin_sum", lambda self, plan: honest(self, self.plan))


def noise_divided_by_the_batch(patch: Patch) -> None:
    for source in SOURCES:
        draw = source.normal
        patch.setattr(
            source, "normal", lambda self, shape, like, draw=draw: draw(self, shape, like) / math.sqrt(2)
        )


def divisor_from_the_batch_that_was_drawn(patch: Patch) -> None:
    take = capture.Capture.take
    drawn = [1.0]

    def noting(self):
        spectra = take(self)
        drawn[0] = float(spectra.batch) if spectra else 1.0
        return spectra

    patch.setattr(capture.Capture, "take", noting)
    patch.setattr(
        optimizer.PrivateOptimizer,
        "expected_batch_size",
        property(lambda self: drawn[0], lambda self, value: None),
    )


def steps_from_the_length_of_the_data(patch: Patch) -> None:
    honest = sampling.PoissonBatchSampler.__init__

    def init(self, records, sample_rate, steps, *source):
        honest(self, records, sample_rate, records // 2, *source)

    patch.setattr(sampling.PoissonBatchSampler, "__init__", init)


def shuffling_accounted_as_poisson(patch: Patch) -> None:
    def shuffled(self):
        size, left = round(self.records * self.sample_rate), []
        for _ in range(self.steps):
            if len(left) < size:
                left = torch.randperm(self.records, generator=self.generator).tolist()
            yield [left.pop() for _ in range(size)]

    patch.setattr(sampling.PoissonBatchSampler, "__iter__", shuffled)


def empty_batches_skipped(patch: Patch) -> None:
    honest = optimizer.PrivateOptimizer.step

    def skipping(self, closure=None):
        if self.capture._batch == 0:
            for p in self._parameters.values():
                p.grad = torch.zeros_like(p)
            return self.capture.drop()
        return honest(self, closure)

    patch.setattr(optimizer.PrivateOptimizer, "step", skipping)


def not_finite_records_pass(patch: Patch) -> None:
    """A factor of 0 is not enough: 0·∞ is NaN, and spreads to every record's weights."""
    patch.setattr(per_sample.PerSampleGradient, "zero_unless", lambda self, mask: self)


def noise_for_each_micro_batch(patch: Patch) -> None:
    patch.setattr(sampling.Part, "last", property(lambda self: True, lambda self, last: None))


def micro_batches_clipped_as_one(patch: Patch) -> None:
    """One factor for the whole physical batch instead of one for each record."""
    honest = clip.clip

    def blunt(spectra, plan, views, weights):
        clipped = honest(spectra, plan, views, weights)
        mean = {name: f.mean().expand_as(f) for name, f in clipped.factors.items()}
        return replace(clipped, factors=mean)

    patch.setattr(step, "clip", blunt)


def a_norm_that_misses_a_factor(patch: Patch) -> None:
    patch.setattr(factored.Circulant, "squared_norm", lambda self: self.left.square().sum((1, 2, 3)) * 0.01)


def weights_left_out_of_the_clip(patch: Patch) -> None:
    honest = clip.clip

    def unweighted(spectra, plan, views, weights):
        return honest(spectra, plan, views, {n: torch.ones_like(w) for n, w in weights.items()})

    patch.setattr(step, "clip", unweighted)


def an_order_for_each_step(patch: Patch) -> None:
    """Batches of a fixed size, each from an order of its own: a record comes back within an epoch."""

    def anew(self, turn=0):
        return self.split.shuffled(self.records, turn)[: int(self.expected)].tolist()

    patch.setattr(samplers.ShuffledBatchSampler, "draw", anew)


def weights_charged_at_their_mean(patch: Patch) -> None:
    """A record of twice the weight is drawn twice as often, and charged as any other."""
    honest = samplers.PoissonBatchSampler.__init__

    def forgetful(self, *settings, **more):
        honest(self, *settings, **more)
        if self.shares is not None:
            drawn_at, self.turn_rate = self.turn_rate, self.sample_rate
            self.draw = lambda turn=0: self.draw_at(drawn_at).tolist()

    patch.setattr(samplers.PoissonBatchSampler, "__init__", forgetful)


def noise_of_the_first_norm(patch: Patch) -> None:
    """The norm adapts and the noise does not."""
    honest = noise.add_noise

    def stiff(bounded, parameters, weights, source):
        return honest(bounded, parameters, {n: torch.ones_like(w) for n, w in weights.items()}, source)

    patch.setattr(step, "add_noise", stiff)


def counts_without_noise(patch: Patch) -> None:
    """Norms follow how many records were within them, exactly."""
    honest = step.PrivateStep._noised

    def silent(self, parameters, number):
        counts = self._bounded.shares
        released = honest(self, parameters, number)
        return released if counts is None else {**released, step.SHARES: counts}

    patch.setattr(step.PrivateStep, "_noised", silent)


def counts_left_out_of_the_certificate(patch: Patch) -> None:
    """All of the budget goes to the gradients, and the counts come on top."""
    honest = plan.StepPlan.certificate

    def short(self):
        return honest(replace(self, quantile=None))

    patch.setattr(plan.StepPlan, "certificate", short)


def layers_that_share_a_norm_counted_once(patch: Patch) -> None:
    from gredp.privacy.certificate import Certificate

    patch.setattr(
        Certificate, "noise_multiplier", property(lambda self: 1 / max(r.sensitivity for r in self.releases))
    )


def accountant_fed_another_sigma(patch: Patch) -> None:
    honest = ledger.Ledger.charge

    def flattering(self, certificate, *rest):
        releases = tuple(replace(r, noise_std=r.noise_std * math.sqrt(2)) for r in certificate.releases)
        honest(self, replace(certificate, releases=releases), *rest)

    patch.setattr(ledger.Ledger, "charge", flattering)


def losses_composed_by_a_plain_transform(patch: Patch) -> None:
    """Its rounding, 1e-13 of the whole mass, is taken for nothing beside δ."""

    def plain(spent, delta, scale):
        from dp_accounting import dp_event, pld

        width = 2.0 ** math.floor(math.log2(max(scale * 1e-4, 1e-7)))
        composed = pld.PLDAccountant(value_discretization_interval=width)
        for z, q, n in spent:
            step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z))
            composed.compose(dp_event.SelfComposedDpEvent(step, n))
        return float(composed.get_epsilon(delta))

    patch.setattr(accountant, "_pld_epsilon", plain)
    patch.setattr(accountant, "_epsilon", accountant._epsilon.__wrapped__)  # which remembers nothing


def charged_after_the_update(patch: Patch) -> None:
    honest = ledger.Ledger.charge
    patch.setattr(
        ledger.Ledger, "charge", lambda self, *rest: self.__dict__.setdefault("late", []).append(rest)
    )
    # The keystream asks for the number of a step that is charged; here it counts for itself.
    patch.setattr(noise.SecretSource, "begin", lambda self, step: setattr(self, "_step", self._step + 1))
    stepped = optimizer.PrivateOptimizer.step

    def late(self, closure=None):
        result = stepped(self, closure)
        for rest in self.ledger.__dict__.pop("late", []):
            honest(self.ledger, *rest)
        return result

    patch.setattr(optimizer.PrivateOptimizer, "step", late)


def calibration_from_the_wrong_side(patch: Patch) -> None:
    patch.setattr(budget, "calibrate", lambda *rest: calibrate.calibrate(*rest) * 0.999)


def noise_from_the_global_seed(patch: Patch) -> None:
    for source in SOURCES:
        patch.setattr(source, "normal", lambda self, shape, like: torch.randn(shape, dtype=like.dtype))


def the_same_draw_every_step(patch: Patch) -> None:
    def replayed(self, shape, like):
        return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype)

    for source in SOURCES:
        patch.setattr(source, "normal", replayed)


def spent_gradients_used_again(patch: Patch) -> None:
    honest = capture.Capture.take

    def keep(self):
        self.last = honest(self) or getattr(self, "last", None)
        return self.last

    patch.setattr(capture.Capture, "take", keep)
    patch.setattr(
        capture.Capture,
        "drop",
        lambda self: self.__dict__.update(_pending={}, _batch=None, forwards=[]),
    )


def weights_learned_before_the_release(patch: Patch) -> None:
    honest = step.PrivateStep.accumulate

    def peeking(self, spectra):
        honest(self, spectra)
        if self.learned is not None:
            self.learned.learn(self._bounded.shares, 0.0)

    patch.setattr(step.PrivateStep, "accumulate", peeking)


def batch_norm_let_through(patch: Patch) -> None:
    patch.setattr(validation, "problem", lambda layer: None)


def buffers_not_watched(patch: Patch) -> None:
    """No look at what the model holds beside its trained parameters."""
    patch.setattr(state.UntrainedState, "_reject", lambda self, tensors: None)


def buffers_watched_in_the_forward_only(patch: Patch) -> None:
    """A backward hook, or the loop between two steps, writes what it likes."""
    patch.setattr(state.UntrainedState, "reject_changes", lambda self: None)


def coincidences_taken_for_records(patch: Patch) -> None:
    """Rows that are as many as the records, of a position table or of time, are clipped in their place."""
    patch.setattr(batch_dimension, "rows_of_zeros", lambda *_: {})


def every_shared_table_taken_for_positions(patch: Patch) -> None:
    """Rows that all records share are broadcast to each, though other records may have chosen them."""
    patch.setattr(capture, "is_shared", lambda layer, x: isinstance(layer, torch.nn.Embedding))


def shared_tables_expanded_at_once(patch: Patch) -> None:
    """The first record gets the gradients of all, where the model takes the only row of what they share."""
    patch.setattr(shared.Shared, "of", staticmethod(lambda copies, beside: copies.squeeze(1)))


def reductions_taken_at_their_word(patch: Patch) -> None:
    """A summed loss that is said to be a mean: one record changes the weight of all others."""
    patch.setattr(reduction.LossReduction, "look", lambda self, layer, gradient: None)


def only_plain_reductions_checked(patch: Patch) -> None:
    """A factor of the caller's own hides what the loss is."""
    patch.setattr(reduction.LossReduction, "compare", lambda self: None)


def gradients_outside_their_layer_let_through(patch: Patch) -> None:
    patch.setattr(capture, "_reject_raw_gradient", lambda name: lambda grad: None)


def tied_parameters_counted_once(patch: Patch) -> None:
    patch.setattr(received, "add", lambda first, second, grid_axes: first)


def a_linear_norm_that_misses_its_input(patch: Patch) -> None:
    patch.setattr(factored.Outer, "squared_norm", lambda self: norms.squares(self.left))


def unfrozen_parameters_stepped(patch: Patch) -> None:
    patch.setattr(optimizer.PrivateOptimizer, "_reject_strangers", lambda self: None)


def foreign_parameters_stepped(patch: Patch) -> None:
    """The check of what the optimizer holds finds nothing foreign."""
    honest = optimizer.PrivateOptimizer._reject_strangers

    def blind(self):
        self._owned |= {p for group in self.param_groups for p in group["params"]}
        honest(self)

    patch.setattr(optimizer.PrivateOptimizer, "_reject_strangers", blind)


def noise_repeated_after_a_restart(patch: Patch) -> None:
    """A seed kept with the run: after a resume the first steps' noise is drawn again, on other records."""

    honest = randomness.Secret.__init__
    patch.setattr(randomness.Secret, "__init__", lambda self, insecure_seed=None: honest(self, 1))


def sampling_with_24_bits(patch: Patch) -> None:
    """Single-precision uniforms are multiples of 2⁻²⁴: the smallest rates are not met."""

    def coarse(self):
        for _ in range(self.steps):
            draw = torch.rand(self.records, generator=self.generator)
            yield (draw < self.sample_rate).nonzero().flatten().tolist()

    patch.setattr(sampling.PoissonBatchSampler, "__iter__", coarse)


def norm_products_in_single_precision(patch: Patch) -> None:
    """The square of a tiny factor is 0, and a record whose norm comes out as 0 passes the clip."""
    for module in (per_sample, factored):
        patch.setattr(module, "squares", lambda m: m.flatten(1).square().sum(1))


def norms_without_their_allowance(patch: Patch) -> None:
    """As they come out of single precision: a few digits short for one record in two."""
    for kind in (per_sample.PerSampleGradient, factored.Circulant):
        patch.setattr(kind, "allowance", lambda self, transforms, size: 0.0)


def the_start_left_out_of_the_key(patch: Patch) -> None:
    """Noise replayed after a resume, where nothing else tells two starts apart."""
    honest = randomness.Secret._key_for

    def replayed(self, *rest):
        self.incarnation = 0
        return honest(self, *rest)

    patch.setattr(randomness.Secret, "_key_for", replayed)


def a_step_noised_again(patch: Patch) -> None:
    patch.setattr(noise.SecretSource, "begin", lambda self, step: None)


def charges_forgotten_on_resume(patch: Patch) -> None:
    patch.setattr(ledger.Ledger, "keep_in", lambda self, file: setattr(self, "file", file))


def charges_written_late(patch: Patch) -> None:
    """Each charge reaches the disk with the next one."""
    honest = ledger_file.LedgerFile.append
    held: list[Any] = []

    def late(self, entry):
        for previous in held:
            honest(self, previous)
        held[:] = [entry]

    patch.setattr(ledger_file.LedgerFile, "append", late)


def lines_cut_off_a_ledger_not_missed(patch: Patch) -> None:
    honest = ledger_file.evidence
    start = evidence.Place(0)
    patch.setattr(ledger_file, "evidence", lambda ledger: honest(ledger) | {evidence.MARK: start})


def a_ledger_believed_whatever_else_is_there(patch: Patch) -> None:
    patch.setattr(ledger_file, "evidence", lambda ledger: {evidence.MARK: evidence.read_mark(ledger)})


def a_fork_that_forgets_its_parent(patch: Patch) -> None:
    patch.setattr(ledger.Ledger, "begin_with", lambda self, entries: None)


def a_shape_that_is_believed(patch: Patch) -> None:
    """The weights of the next step come from the checkpoint."""
    honest = shaping.LearnedShape.restore

    def believing(self, state):
        honest(self, state)
        self._squared = state.get("squared", self._squared)

    patch.setattr(shaping.LearnedShape, "restore", believing)


def contracts_not_compared(patch: Patch) -> None:
    patch.setattr(checkpoint, "contract", lambda optimizer: {})


def noise_of_every_process_added_up(patch: Patch) -> None:
    patch.setattr(step, "rank", lambda: 0)
    patch.setattr(step, "broadcast", distributed.all_reduce_sum)


def noise_of_every_process_averaged(patch: Patch) -> None:
    def mean(tensors):
        return {n: t / distributed.world_size() for n, t in distributed.all_reduce_sum(tensors).items()}

    patch.setattr(step, "rank", lambda: 0)
    patch.setattr(step, "broadcast", mean)


def noise_divided_by_the_number_of_processes(patch: Patch) -> None:
    """1/N of the deviation in each, where 1/√N would add up to the certificate's."""
    draw = noise.SecretSource.normal

    def share(self, shape, like):
        return draw(self, shape, like) / distributed.world_size()

    patch.setattr(noise.SecretSource, "normal", share)
    noise_of_every_process_added_up(patch)


def every_process_keeps_its_own_noise(patch: Patch) -> None:
    patch.setattr(step, "rank", lambda: 0)
    patch.setattr(step, "broadcast", dict)


def one_seed_for_all_processes(patch: Patch) -> None:
    honest = randomness.Secret.__init__
    patch.setattr(randomness.Secret, "__init__", lambda self, insecure_seed=None: honest(self, 0))


def every_process_takes_the_whole_batch(patch: Patch) -> None:
    """Each record would count as often as there are processes: N times the clipping norm."""
    patch.setattr(sampling.samplers, "rank", lambda: 0)
    patch.setattr(sampling.samplers, "world_size", lambda: 1)


def freshness_decided_by_each_process(patch: Patch) -> None:
    """The first one's batch is new, and it alone charges on the disk."""
    honest = step.PrivateStep.agree

    def alone(self, number, stale):
        honest(self, number, stale)
        return stale

    patch.setattr(step.PrivateStep, "agree", alone)


def exchanges_without_a_tag(patch: Patch) -> None:
    """The sums of two models with other clipping norms are added up."""
    patch.setattr(distributed, "_tag", lambda what: 0)


def records_of_processes_not_compared(patch: Patch) -> None:
    """A record may be in two of them, and is clipped in each."""
    patch.setattr(engine, "reject_other_records", lambda loader, key: None)


def sums_of_other_processes_left_out(patch: Patch) -> None:
    patch.setattr(summation, "all_reduce_sum", dict)


def a_query_without_its_charge(patch):
    release = normalize.release

    def free(engine, x, query, *persons):
        spare = engine.ledger
        engine.ledger = ledger.Ledger()
        try:
            return release(engine, x, query, *persons)
        finally:
            engine.ledger = spare

    patch.setattr(session, "release", free)


def a_query_without_its_clip(patch):
    patch.setattr(normalize, "clip_norm", lambda channels: 1e30)


def parts_that_do_not_take_turns(patch: Patch) -> None:
    """Plain Poisson batches under noise that is taken back: a record may be in two steps side by side."""
    patch.setattr(
        sampling.PoissonBatchSampler, "draw", lambda self, turn=0: self.draw_at(self.sample_rate).tolist()
    )


def columns_longer_than_certified(patch: Patch) -> None:
    """The largest coefficient is 1 instead of their norm: less noise than is accounted for."""
    honest, certified = plan.coefficients, plan.StepPlan.certificate

    def longer(bands):
        column = honest(bands)
        return tuple(c / column[0] for c in column)

    patch.setattr(plan, "coefficients", longer)
    patch.setattr(plan.StepPlan, "certificate", lambda self: certified(replace(self, correlation=(1.0,))))


def noise_that_forgets(patch: Patch) -> None:
    """Nothing is taken back: not the covariance that is certified, though no less private."""
    honest = correlated.CorrelatedSource.begin

    def begin(self, step):
        self._drawn = {}
        honest(self, step)

    patch.setattr(correlated.CorrelatedSource, "begin", begin)


def noise_taken_back_with_a_wrong_sign(patch: Patch) -> None:
    """Added instead: prefix sums grow, and the released sums say more than is certified."""
    honest = correlated.CorrelatedSource.__init__

    def init(self, source, coefficients):
        honest(self, source, (coefficients[0], *(-c for c in coefficients[1:])))

    patch.setattr(correlated.CorrelatedSource, "__init__", init)


def noise_kept_with_the_checkpoint(patch: Patch) -> None:
    """A run that goes on from it takes back what steps that were lost have taken back before."""
    begun, saved = correlated.CorrelatedSource.begin, resumable.write_checkpoint
    kept: list[Any] = []

    def begin(self, step):
        if not self._drawn:
            self._drawn = {step - len(kept) + i: blocks for i, blocks in enumerate(kept)}
        begun(self, step)

    def save(folder, module, private, *rest):
        kept[:] = private.private_step._noise._drawn.values()
        saved(folder, module, private, *rest)

    patch.setattr(correlated.CorrelatedSource, "begin", begin)
    patch.setattr(resumable, "write_checkpoint", save)


def accountant_fed_the_rate_of_all_records(patch: Patch) -> None:
    """q instead of b·q: a part is drawn from b times as often when it has its turn."""
    honest = optimizer.PrivateOptimizer.__init__

    def init(self, *original, **settings):
        honest(self, *original, **settings)
        self.sample_rate = self.sampler.sample_rate

    patch.setattr(optimizer.PrivateOptimizer, "__init__", init)
    patch.setattr(budget, "check_bands", lambda bands, sample_rate: sample_rate)


def turns_rounded_down(patch: Patch) -> None:
    honest = ledger.mechanisms

    def fewer(entries):
        return honest(replace(e, steps=e.steps // e.bands * e.bands) for e in entries)

    patch.setattr(ledger, "mechanisms", fewer)
    patch.setattr(accountant, "mechanisms", fewer)


def splits_counted_as_one(patch: Patch) -> None:
    honest = ledger.mechanisms

    def together(entries):
        return honest(replace(e, split="all") if e.split else e for e in entries)

    patch.setattr(ledger, "mechanisms", together)
    patch.setattr(accountant, "mechanisms", together)


def kinds_of_steps_mixed_in_a_split(patch: Patch) -> None:
    """Each kind is counted as ⌈n/b⌉ turns, and all n may have been those of one part."""
    for module in (ledger, ledger_file):
        patch.setattr(module, "one_kind", lambda entries, step: None)


def another_split_after_a_restart(patch: Patch) -> None:
    """A record that has just had its turn may have it again."""

    def redrawn(self, facts):
        sampler = self._loader.batch_sampler
        split = sampler.split
        self._use_split(bytes.fromhex(facts["split"]))
        sampler.split = split

    patch.setattr(engine.PrivacyEngine, "_resume_split", redrawn)


def batches_out_of_turn_let_through(patch: Patch) -> None:
    """The turns shift against the noise: a record takes part again a step too early."""
    patch.setattr(optimizer.PrivateOptimizer, "_reject_out_of_turn", lambda self, draw: None)
    every_step_charged_as_a_new_draw(patch)


# ------------------------------------------------------------------ steps and draws


def batches_of_one_model_drawn_again_for_the_next(patch: Patch) -> None:
    """Every sampler numbers its draws from one, under a secret that the models of an engine share."""
    honest = sampling.PoissonBatchSampler.__init__

    def init(self, *rest, **options):
        honest(self, *rest, **options)
        self.asked = itertools.count(1)

    patch.setattr(sampling.PoissonBatchSampler, "__init__", init)
    patch.setattr(
        sampling.PoissonBatchSampler,
        "_uniform",
        lambda self, count: self.secret.uniform(count, "batches", next(self.asked)),
    )


def every_step_charged_as_a_new_draw(patch: Patch) -> None:
    patch.setattr(sampling.Draw, "used", property(lambda self: False, lambda self, used: None))


def a_target_that_nobody_keeps(patch: Patch) -> None:
    """Every step is charged honestly, and the run goes on past the end that it promised."""
    patch.setattr(ledger.Ledger, "ceiling", property(lambda self: None, lambda *_: None))


def private_losses_that_decide(patch: Patch) -> None:
    """One record changes when a run stops, which weights are kept and at what rate it learns."""

    class Everything(tuple[str, ...]):
        def __contains__(self, name: object) -> bool:
            return True

    patch.setattr(adapter_budget, "COUNTS", Everything())


def draws_added_up(patch: Patch) -> None:
    """A record may be in each of them, and is charged for one."""
    patch.setattr(optimizer.PrivateOptimizer, "_draw_in_parts", lambda self, records, inputs: None)


def rows_not_compared_with_records(patch: Patch) -> None:
    """A record may be any number of rows, each of them clipped by itself."""
    patch.setattr(sampling.HandedOut, "check", staticmethod(lambda inputs, drawn: None))


def draws_counted_as_they_are_drawn(patch: Patch) -> None:
    """Batches that workers fetched ahead pay for second steps on others."""

    def ahead(self, batches, queue, handed, begun):
        for batch in batches:
            while queue:
                handed.add(queue.popleft(), None)
            yield batch

    patch.setattr(sampling.PrivateLoader, "_hand_out", ahead)


def views_reordered_by_a_collate_function(patch: Patch) -> None:
    """Neighboring rows are folded into one record that they are not of."""
    patch.setattr(sampling.loader, "reject_own_collate", lambda loader: None)


def terms_that_cancel_not_counted(patch: Patch) -> None:
    """A record of huge opposite terms has no norm, and goes into the sum as it is."""
    patch.setattr(clip, "LEAST_LEFT", dict.fromkeys(clip.LEAST_LEFT, 0.0))


# ------------------------------------------------------------------ what a run tells


def any_delta_certified(patch: Patch) -> None:
    """With δ at one in the records, publishing one of them at random has ε = 0."""
    patch.setattr(accountant, "reject_large_delta", lambda *_: None)


def files_that_keep_their_times(patch: Patch) -> None:
    """From the first to the last file it is as long as the run took, which follows the batches it drew."""
    for module in (loop, record):
        patch.setattr(module, "undate", lambda folder, day: None)
