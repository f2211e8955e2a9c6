"""Each silent privacy breaker, planted once, must be caught by a named test: a test that cannot fail is none.

A row plants a fault into the running program and calls the test that is meant to notice. The test must
fail; if it passes with the fault in place, this suite fails.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

sys.path += [
    str(Path(__file__).parent / folder) for folder in ("laws", "training", "faults")
]  # the named tests

import test_layer_laws as layer_laws
import test_mechanism_laws as laws
import test_ranks
import test_runs

import gredp.distributed as distributed
import gredp.gradient.capture as capture
import gredp.gradient.clip as clip
import gredp.gradient.noise as noise
import gredp.gradient.per_sample as per_sample
import gredp.gradient.step as step
import gredp.gradient.summation as summation
import gredp.optimizer as optimizer
import gredp.privacy.calibrate as calibrate
import gredp.privacy.ledger as ledger
import gredp.privacy.ledger_file as ledger_file
import gredp.randomness as randomness
import gredp.sampling as sampling
import gredp.spectrum as spectrum
import gredp.training.checkpoint as checkpoint
import gredp.validation as validation
import test_distributed
import test_engine
import test_randomness
import test_sampling
import test_validation

Patch = pytest.MonkeyPatch


# ------------------------------------------------------------------ the faults


def fft_without_unitary_scaling(patch: Patch) -> None:
    """The library's default: the way there unscaled, the way back by 1/n; a round trip looks right."""

    def plain(transform):
        return lambda x, axes: transform(x, dim=tuple(range(-axes, 0)))

    patch.setattr(spectrum, "fft", plain(torch.fft.fftn))
    patch.setattr(spectrum, "ifft", plain(torch.fft.ifftn))


def half_spectrum_without_root_two(patch: Patch) -> None:
    """Interior bins of a half spectrum stand for two coefficients each; forgetting it loses their noise."""
    draw = noise.GeneratorSource.normal

    def normal(self, shape, like):
        bins = torch.fft.rfft(draw(self, shape, like), norm="ortho")
        interior = slice(1, (shape[-1] + 1) // 2)
        bins[..., interior] /= math.sqrt(2)
        return torch.fft.irfft(bins, n=shape[-1], norm="ortho")

    patch.setattr(noise.GeneratorSource, "normal", normal)


def real_noise_only(patch: Patch) -> None:
    patch.setattr(noise.torch, "complex", lambda x, y: (math.sqrt(2) * x).to(torch.complex64))


def last_coefficient_without_noise(patch: Patch) -> None:
    make = torch.complex

    def all_but_the_last(x, y):
        x, y = x.clone(), y.clone()
        x[..., -1] = y[..., -1] = 0
        return make(x, y)

    patch.setattr(noise.torch, "complex", all_but_the_last)


def clip_of_the_mean_loss(patch: Patch) -> None:
    """Norms taken of gradients of the mean loss, factors applied to those of the sum."""
    honest = clip.energies
    patch.setattr(clip, "energies", lambda gradient, view: honest(gradient, view) / gradient.batch**2)


def noise_divided_by_the_batch(patch: Patch) -> None:
    draw = noise.GeneratorSource.normal
    patch.setattr(
        noise.GeneratorSource, "normal", lambda self, shape, like: draw(self, shape, like) / math.sqrt(2)
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
        raising=False,
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
    patch.setattr(per_sample.PerSampleGradient, "keep", lambda self, mask: self)


def noise_for_each_micro_batch(patch: Patch) -> None:
    patch.setattr(optimizer.PrivateOptimizer, "signal_skip_step", lambda self, do_skip=True: None)


def micro_batches_clipped_as_one(patch: Patch) -> None:
    """One factor for the whole physical batch instead of one for each record."""
    honest = clip.clip

    def blunt(spectra, plan, views, weights):
        clipped = honest(spectra, plan, views, weights)
        mean = {name: f.mean().expand_as(f) for name, f in clipped.factors.items()}
        return replace(clipped, factors=mean)

    patch.setattr(step, "clip", blunt)


def a_norm_that_misses_a_factor(patch: Patch) -> None:
    patch.setattr(per_sample.Circulant, "squared_norm", lambda self: self.left.square().sum((1, 2, 3)) * 0.01)


def weights_left_out_of_the_clip(patch: Patch) -> None:
    honest = clip.clip

    def unweighted(spectra, plan, views, weights):
        return honest(spectra, plan, views, {n: torch.ones_like(w) for n, w in weights.items()})

    patch.setattr(step, "clip", unweighted)


def layers_that_share_a_norm_counted_once(patch: Patch) -> None:
    from gredp.privacy.certificate import Certificate

    patch.setattr(
        Certificate, "noise_multiplier", property(lambda self: 1 / max(r.sensitivity for r in self.releases))
    )


def accountant_fed_another_sigma(patch: Patch) -> None:
    honest = ledger.Ledger.charge

    def flattering(self, certificate, sample_rate, claimed=None):
        releases = tuple(replace(r, noise_std=r.noise_std * math.sqrt(2)) for r in certificate.releases)
        honest(self, replace(certificate, releases=releases), sample_rate, claimed)

    patch.setattr(ledger.Ledger, "charge", flattering)


def charged_after_the_update(patch: Patch) -> None:
    honest = ledger.Ledger.charge
    patch.setattr(
        ledger.Ledger, "charge", lambda self, *rest: self.__dict__.setdefault("late", []).append(rest)
    )
    stepped = optimizer.PrivateOptimizer.step

    def late(self, closure=None):
        result = stepped(self, closure)
        for rest in self.ledger.__dict__.pop("late", []):
            honest(self.ledger, *rest)
        return result

    patch.setattr(optimizer.PrivateOptimizer, "step", late)


def calibration_from_the_wrong_side(patch: Patch) -> None:
    import gredp.engine as engine

    patch.setattr(engine, "calibrate", lambda *rest: calibrate.calibrate(*rest) * 0.999)


def noise_from_the_global_seed(patch: Patch) -> None:
    patch.setattr(
        noise.SecretSource, "normal", lambda self, shape, like: torch.randn(shape, dtype=like.dtype)
    )


def the_same_draw_every_step(patch: Patch) -> None:
    def replayed(self, shape, like):
        return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype)

    patch.setattr(noise.GeneratorSource, "normal", replayed)


def spent_gradients_used_again(patch: Patch) -> None:
    honest = capture.Capture.take

    def keep(self):
        self.last = honest(self) or getattr(self, "last", None)
        return self.last

    patch.setattr(capture.Capture, "take", keep)
    patch.setattr(
        capture.Capture,
        "drop",
        lambda self: self.__dict__.update(_pending={}, _batch=None, _pending_pass=None),
    )


def weights_learned_before_the_release(patch: Patch) -> None:
    honest = step.PrivateStep.accumulate

    def peeking(self, spectra):
        honest(self, spectra)
        if self.shape is not None:
            self.shape.learn(self._bounded.shares, 0.0)

    patch.setattr(step.PrivateStep, "accumulate", peeking)


def batch_norm_let_through(patch: Patch) -> None:
    patch.setattr(validation, "problem", lambda layer: None)


def buffers_not_watched(patch: Patch) -> None:
    patch.setattr(capture.Capture, "_end_pass", lambda self: None)


def gradients_outside_their_layer_let_through(patch: Patch) -> None:
    patch.setattr(capture, "_refuse_raw_gradient", lambda name: lambda grad: None)


def tied_parameters_counted_once(patch: Patch) -> None:
    patch.setattr(capture, "add", lambda first, second, grid_axes: first)


def a_linear_norm_that_misses_its_input(patch: Patch) -> None:
    patch.setattr(per_sample.Outer, "squared_norm", lambda self: per_sample.squares(self.left))


def unfrozen_parameters_stepped(patch: Patch) -> None:
    honest = optimizer.PrivateOptimizer.__init__

    def init(self, *rest, **options):
        honest(self, *rest, **options)
        self._frozen = {}

    patch.setattr(optimizer.PrivateOptimizer, "__init__", init)


def the_start_left_out_of_the_key(patch: Patch) -> None:
    """Noise replayed after a resume, where nothing else tells two starts apart."""
    honest = randomness.Secret.keystream

    def replayed(self, *rest):
        self.incarnation = 0
        return honest(self, *rest)

    patch.setattr(randomness.Secret, "keystream", replayed)


def a_step_noised_again(patch: Patch) -> None:
    patch.setattr(noise.SecretSource, "begin", lambda self, step: None)


def charges_forgotten_on_resume(patch: Patch) -> None:
    patch.setattr(ledger.Ledger, "keep_in", lambda self, file: setattr(self, "file", file))


def charges_written_late(patch: Patch) -> None:
    """Each charge reaches the disk with the next one."""
    honest, held = ledger_file.LedgerFile.append, []

    def late(self, entry):
        for previous in held:
            honest(self, previous)
        held[:] = [entry]

    patch.setattr(ledger_file.LedgerFile, "append", late)


def a_fork_that_forgets_its_parent(patch: Patch) -> None:
    patch.setattr(ledger.Ledger, "begin_with", lambda self, entries: None)


def contracts_not_compared(patch: Patch) -> None:
    patch.setattr(checkpoint, "contract", lambda optimizer: {})


def noise_of_every_process_added_up(patch: Patch) -> None:
    patch.setattr(step, "rank", lambda: 0)
    patch.setattr(step, "pass_on", distributed.add_up)


def noise_of_every_process_averaged(patch: Patch) -> None:
    def mean(tensors):
        return {n: t / distributed.world_size() for n, t in distributed.add_up(tensors).items()}

    patch.setattr(step, "rank", lambda: 0)
    patch.setattr(step, "pass_on", mean)


def noise_divided_by_the_number_of_processes(patch: Patch) -> None:
    """1/N of the deviation in each, where 1/√N would add up to the certificate's."""
    draw = noise.SecretSource.normal

    def share(self, shape, like):
        return draw(self, shape, like) / distributed.world_size()

    patch.setattr(noise.SecretSource, "normal", share)
    noise_of_every_process_added_up(patch)


def every_process_keeps_its_own_noise(patch: Patch) -> None:
    patch.setattr(step, "rank", lambda: 0)
    patch.setattr(step, "pass_on", dict)


def one_seed_for_all_processes(patch: Patch) -> None:
    honest = randomness.Secret.__init__
    patch.setattr(randomness.Secret, "__init__", lambda self, insecure_seed=None: honest(self, 0))


def every_process_takes_the_whole_batch(patch: Patch) -> None:
    """Each record would count as often as there are processes: N times the clipping norm."""
    patch.setattr(sampling, "rank", lambda: 0)
    patch.setattr(sampling, "world_size", lambda: 1)


def sums_of_other_processes_left_out(patch: Patch) -> None:
    patch.setattr(summation, "add_up", dict)


# ------------------------------------------------------------------ who catches them


def in_a_new_folder(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def called(*arguments):
        with TemporaryDirectory() as folder:
            test(Path(folder), *arguments)

    return called


def paid_before_given(folder: Path) -> None:
    test_ranks.small_data(folder)
    test_ranks.test_a_charge_is_on_the_disk_before_any_process_gets_the_release(folder)


stays_charged = in_a_new_folder(test_runs.test_steps_after_the_last_checkpoint_stay_charged)


@dataclass(frozen=True)
class Mutant:
    plant: Callable[[Patch], None]
    caught_by: Callable[..., None]
    arguments: tuple = ()

    def __str__(self) -> str:
        return self.plant.__name__


MUTANTS = [
    Mutant(
        fft_without_unitary_scaling,
        laws.test_noise_has_the_variance_of_the_certificate,
        ("circulant 8", "gredp"),
    ),
    Mutant(
        half_spectrum_without_root_two,
        laws.test_noise_has_the_variance_of_the_certificate,
        ("conv 3x3", "gredp shaped"),
    ),
    Mutant(real_noise_only, laws.test_no_direction_is_left_without_noise, ("gredp",)),
    Mutant(last_coefficient_without_noise, laws.test_no_direction_is_left_without_noise, ("gredp",)),
    Mutant(clip_of_the_mean_loss, laws.test_one_record_moves_the_sum_by_at_most_the_clip_norm, ("dpsgd",)),
    Mutant(
        noise_divided_by_the_batch,
        laws.test_noise_has_the_variance_of_the_certificate,
        ("linear 45", "dpsgd"),
    ),
    Mutant(
        divisor_from_the_batch_that_was_drawn,
        laws.test_sums_are_divided_by_the_expected_batch_whatever_was_drawn,
    ),
    Mutant(steps_from_the_length_of_the_data, laws.test_every_constant_is_the_same_on_neighbours, ("dpsgd",)),
    Mutant(shuffling_accounted_as_poisson, test_sampling.test_batch_sizes_vary_as_independent_draws_do),
    Mutant(shuffling_accounted_as_poisson, test_sampling.test_records_come_back_within_an_epoch),
    Mutant(empty_batches_skipped, test_sampling.test_empty_draws_are_executed_charged_and_noised),
    Mutant(not_finite_records_pass, laws.test_records_that_are_not_finite_contribute_nothing),
    Mutant(noise_for_each_micro_batch, test_sampling.test_result_does_not_depend_on_the_physical_batch, (3,)),
    Mutant(
        micro_batches_clipped_as_one, test_sampling.test_result_does_not_depend_on_the_physical_batch, (3,)
    ),
    Mutant(
        a_norm_that_misses_a_factor,
        laws.test_one_record_moves_the_sum_by_at_most_the_clip_norm,
        ("dpsgd",),
    ),
    Mutant(
        weights_left_out_of_the_clip,
        laws.test_one_record_moves_the_sum_by_at_most_the_clip_norm,
        ("gredp shaped",),
    ),
    Mutant(
        layers_that_share_a_norm_counted_once,
        test_engine.test_claims_of_the_paper_stand_beside_the_proven_figure,
    ),
    Mutant(accountant_fed_another_sigma, test_engine.test_the_ledger_holds_what_was_executed, ("gredp",)),
    Mutant(charged_after_the_update, test_engine.test_the_charge_comes_before_the_update),
    Mutant(calibration_from_the_wrong_side, test_engine.test_target_epsilon_is_met_and_never_passed),
    Mutant(noise_from_the_global_seed, laws.test_two_engines_never_share_noise),
    Mutant(the_same_draw_every_step, laws.test_noise_of_two_steps_is_independent),
    Mutant(spent_gradients_used_again, test_engine.test_gradients_are_spent_once),
    Mutant(batch_norm_let_through, test_validation.test_every_layer_that_must_go_is_listed),
    Mutant(
        buffers_not_watched,
        test_validation.test_a_buffer_that_follows_the_data_is_refused_by_name,
        ("assigned",),
    ),
    Mutant(
        gradients_outside_their_layer_let_through,
        test_validation.test_a_weight_used_outside_its_layer_is_refused_by_name,
    ),
    Mutant(
        tied_parameters_counted_once,
        layer_laws.test_a_parameter_shared_by_two_layers_counts_both,
        (layer_laws.CASES["linear"],),
    ),
    Mutant(
        a_linear_norm_that_misses_its_input,
        layer_laws.test_norm_energy_and_sum_equal_those_of_the_dense_gradient,
        (layer_laws.CASES["linear"],),
    ),
    Mutant(
        unfrozen_parameters_stepped,
        test_validation.test_a_parameter_unfrozen_after_make_private_is_refused_or_stays,
    ),
    Mutant(
        the_start_left_out_of_the_key,
        test_randomness.test_digests_of_all_draws_are_unique_over_steps_blocks_and_incarnations,
    ),
    Mutant(a_step_noised_again, test_randomness.test_a_step_is_noised_once),
    Mutant(charges_forgotten_on_resume, stays_charged),
    Mutant(charges_written_late, stays_charged),
    Mutant(
        a_fork_that_forgets_its_parent,
        in_a_new_folder(test_runs.test_a_fork_begins_with_what_its_parent_spent),
    ),
    Mutant(
        contracts_not_compared,
        in_a_new_folder(test_runs.test_changed_settings_are_refused_with_both_values),
        ({"noise_multiplier": 1.1}, "another noise_multiplier"),
    ),
    *(
        Mutant(mistake, test_distributed.test_noise_of_the_certificate_is_added_once, (2, "dpsgd"))
        for mistake in (
            noise_of_every_process_added_up,
            noise_of_every_process_averaged,
            noise_divided_by_the_number_of_processes,
        )
    ),
    Mutant(
        every_process_keeps_its_own_noise,
        test_distributed.test_with_noise_processes_stay_bit_equal_at_every_step,
        ("dpsgd",),
    ),
    Mutant(one_seed_for_all_processes, test_distributed.test_secrets_of_processes_are_independent, (2,)),
    *(
        Mutant(
            mistake, test_distributed.test_without_noise_many_processes_release_what_one_does, (2, "dpsgd")
        )
        for mistake in (every_process_takes_the_whole_batch, sums_of_other_processes_left_out)
    ),
    Mutant(charges_written_late, in_a_new_folder(paid_before_given)),
    Mutant(weights_learned_before_the_release, test_engine.test_shaped_noise_learns_from_releases_only),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_caught(mutant, monkeypatch):
    mutant.plant(monkeypatch)
    try:
        mutant.caught_by(*mutant.arguments)
    except (AssertionError, pytest.fail.Exception):
        return
    pytest.fail(f"{mutant.caught_by.__name__} did not notice {mutant}")


def test_the_catching_tests_pass_without_a_fault():
    """Otherwise a mutant could be caught by a test that always fails."""
    for mutant in {m.caught_by: m for m in MUTANTS}.values():
        mutant.caught_by(*mutant.arguments)
