"""The auditor audited: every planted bug is caught by a named check, and no check speaks up without one."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from gredp.audit import examples
from planted import bugs, checks

DPSGD: dict[str, Any] = {"method": "dpsgd"}
GREDP: dict[str, Any] = {"method": "gredp"}
#: equal parts, drawn on the spectrum: on a kernel's own grid they are white, and nothing is transformed
SPECTRAL: dict[str, Any] = {"method": "gredp", "grid": "padded"}
SHAPED: dict[str, Any] = {"method": "gredp", "noise": "shaped"}
PERSONS: dict[str, Any] = {"method": "dpsgd", "records_per_person": 4}
FORWARDS: dict[str, Any] = {"method": "dpsgd", "forwards": 2}
ADAPTIVE: dict[str, Any] = {"method": "dpsgd", "clipping": "adaptive"}
WEIGHTED: dict[str, Any] = {"method": "dpsgd", "weights": [2.0, *[1.0] * 5]}
LAYERS: dict[str, Any] = {"method": "dpsgd", "clipping": "layer_wise"}


@dataclass(frozen=True)
class Planted:
    """A bug, the check that is to notice it, and that check's arguments."""

    bug: Callable[..., Any]
    check: Callable[..., examples.Verdict]
    arguments: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.bug.__name__.replace("_", " ")

    def run(self, effort: examples.Effort, with_bug: bool = True) -> examples.Verdict:
        if self.check is examples.step_game:
            step = self.bug if with_bug else examples.honest_step
            return self.check(effort, step, examples.SIGMA, *self.arguments)
        effort_first = (effort,) if self.check is checks.game else ()
        with bugs.planted(self.bug) if with_bug else nullcontext():
            return self.check(*effort_first, *self.arguments)


GAME, STEP = checks.game, examples.step_game
SELF_TEST = [
    Planted(bugs.fft_without_unitary_scaling, GAME, (SPECTRAL,)),
    Planted(bugs.half_spectrum_without_root_two, GAME, (SPECTRAL, ("sinusoid",))),
    Planted(bugs.real_noise_only, GAME, (SPECTRAL, ("odd pair",))),
    Planted(bugs.last_coefficient_without_noise, GAME, (SPECTRAL, ("quietest",))),
    Planted(bugs.clip_of_the_mean_loss, GAME, (DPSGD,)),
    Planted(bugs.records_of_a_person_clipped_one_by_one, GAME, (PERSONS,)),
    Planted(bugs.forwards_clipped_one_by_one, GAME, (FORWARDS,)),
    Planted(bugs.noise_divided_by_the_batch, GAME, (DPSGD,)),
    Planted(bugs.empty_batches_skipped, GAME, (DPSGD, ("random",), ((8,),), 0)),
    Planted(bugs.micro_batches_clipped_as_one, GAME, (DPSGD,)),
    Planted(bugs.a_norm_that_misses_a_factor, GAME, (DPSGD,)),
    Planted(bugs.a_linear_norm_that_misses_its_input, GAME, (DPSGD, ("random",), ((15,),))),
    Planted(bugs.weights_left_out_of_the_clip, GAME, (SHAPED, ("sinusoid",), ((15,), (8,)))),
    Planted(bugs.an_order_for_each_step, checks.fixed_batches),
    Planted(bugs.weights_charged_at_their_mean, GAME, (WEIGHTED,)),
    Planted(bugs.noise_of_the_first_norm, GAME, (ADAPTIVE,)),
    Planted(bugs.counts_without_noise, checks.counts),
    Planted(bugs.layers_that_share_a_norm_counted_once, GAME, (LAYERS, ("random",), ((15,), (8,)))),
    Planted(bugs.accountant_fed_another_sigma, GAME, (GREDP, ("random",), ((8,),), 3, 0.35)),
    Planted(bugs.the_same_draw_every_step, GAME, (DPSGD,)),
    Planted(bugs.not_finite_records_pass, checks.neighbors),
    Planted(bugs.norm_products_in_single_precision, checks.neighbors),
    Planted(bugs.divisor_from_the_batch_that_was_drawn, checks.constants),
    Planted(bugs.steps_from_the_length_of_the_data, checks.constants),
    Planted(bugs.shuffling_accounted_as_poisson, checks.sampler),
    Planted(bugs.sampling_with_24_bits, checks.sampler),
    Planted(bugs.noise_for_each_micro_batch, checks.physical_batches),
    Planted(bugs.charged_after_the_update, checks.charge_order),
    Planted(bugs.calibration_from_the_wrong_side, checks.calibration),
    Planted(bugs.losses_composed_by_a_plain_transform, checks.small_delta),
    Planted(bugs.noise_from_the_global_seed, checks.replay),
    Planted(bugs.noise_repeated_after_a_restart, checks.replay),
    Planted(bugs.weights_learned_before_the_release, checks.shape),
    Planted(bugs.batch_norm_let_through, checks.refusal, ("batch normalisation",)),
    Planted(bugs.buffers_not_watched, checks.refusal, ("a buffer that follows the data",)),
    Planted(bugs.buffers_watched_in_the_forward_only, checks.refusal, ("a buffer that the loop writes to",)),
    Planted(
        bugs.coincidences_taken_for_records,
        checks.refusal,
        ("time before records, as long as the batch",),
    ),
    Planted(
        bugs.reductions_taken_at_their_word, checks.refusal, ("a summed loss that is said to be a mean",)
    ),
    Planted(
        bugs.gradients_outside_their_layer_let_through,
        checks.refusal,
        ("a weight used outside of its layer",),
    ),
    Planted(bugs.spent_gradients_used_again, checks.refusal, ("a second step on the same gradients",)),
    Planted(bugs.unfrozen_parameters_stepped, checks.refusal, ("a parameter unfrozen after make_private",)),
    Planted(bugs.foreign_parameters_stepped, checks.refusal, ("a foreign parameter in the optimizer",)),
    Planted(bugs.parts_that_do_not_take_turns, checks.turns),
    Planted(bugs.accountant_fed_the_rate_of_all_records, checks.turns),
    Planted(bugs.turns_rounded_down, checks.turns),
    Planted(bugs.columns_longer_than_certified, checks.correlation),
    Planted(bugs.noise_that_forgets, checks.correlation),
    Planted(bugs.noise_taken_back_with_a_wrong_sign, checks.correlation),
    Planted(
        bugs.batches_out_of_turn_let_through, checks.refusal, ("a batch out of turn under correlated noise",)
    ),
    Planted(bugs.lines_cut_off_a_ledger_not_missed, checks.refusal, ("a ledger with a line cut off",)),
    Planted(bugs.kinds_of_steps_mixed_in_a_split, checks.refusal, ("two rates in one split",)),
    Planted(bugs.a_target_that_nobody_keeps, checks.refusal, ("a step past the target of an adapter",)),
    Planted(bugs.any_delta_certified, checks.refusal, ("a delta of one in the records",)),
    Planted(bugs.private_losses_that_decide, checks.refusal, ("a training loss that decides",)),
    Planted(bugs.rows_not_compared_with_records, checks.refusal, ("more inputs than records",)),
    Planted(bugs.forwards_on_two_draws_added_up, checks.refusal, ("forwards on two draws",)),
    Planted(
        bugs.views_reordered_by_a_collate_function,
        checks.refusal,
        ("views that a collate function may reorder",),
    ),
    *(Planted(step, STEP, (others,)) for step, others in examples.BROKEN.items()),
]


def self_test(effort: examples.Effort | None = None) -> Iterator[dict[str, Any]]:
    """One row for each bug: what the check says with it, and what it says without (it must be silent)."""
    effort = effort or examples.Effort()
    silent: dict[str, examples.Verdict] = {}
    for row in SELF_TEST:
        key = f"{row.check.__name__}{row.arguments}"
        if key not in silent:
            silent[key] = row.run(effort, with_bug=False)
        said = row.run(effort)
        yield {
            "bug": row.name,
            "check": row.check.__name__.replace("_", " "),
            "caught": said is not None and silent[key] is None,
            "says": said,
            "false_alarm": silent[key],
        }
