"""Each silent privacy breaker, planted once, must be caught by a named test: a test that cannot fail is none.

A row plants a fault into the running program and calls the test that is meant to notice. The test must
fail; if it passes with the fault in place, this suite fails.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# the named tests live there
sys.path += [
    str(Path(__file__).parent / folder)
    for folder in ("laws", "gradient", "app", "app/features", "privacy", "faults", "mechanisms", "adapters")
]

import children
import test_adaptive
import test_banded
import test_batch_dimension
import test_budget
import test_checkpoint
import test_clipped_sum
import test_forwards
import test_layer_laws as layer_laws
import test_loss_distribution
import test_mechanism_laws as laws
import test_normalize
import test_person_option
import test_plans
import test_ranks
import test_reduction
import test_rounding
import test_runs
import test_schedule
import test_shared
import test_times
import test_turns
import test_views

import test_cyclic
import test_distributed
import test_draws
import test_engine
import test_fixed_and_weighted
import test_persons
import test_randomness
import test_sampling
import test_validation
from gredp.mechanisms.dpsgd import DPSGD
from gredp.mechanisms.plan import Quantile
from planted import bugs


@dataclass(frozen=True)
class Mutant:
    plant: Callable[[bugs.Patch], None]
    caught_by: Callable[..., None]
    arguments: tuple = ()

    def __str__(self) -> str:
        return self.plant.__name__


def in_a_new_folder(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def called(*arguments):
        with TemporaryDirectory() as folder:
            test(Path(folder), *arguments)

    return called


def paid_before_given(folder: Path) -> None:
    children.small_data(folder)
    test_ranks.test_a_charge_is_on_the_disk_before_any_process_gets_the_release(folder)


stays_charged = in_a_new_folder(test_runs.test_steps_after_the_last_checkpoint_stay_charged)


MUTANTS = [
    Mutant(
        bugs.batches_of_one_model_drawn_again_for_the_next,
        test_draws.test_two_models_of_one_engine_draw_different_batches,
    ),
    Mutant(
        bugs.draws_counted_as_they_are_drawn,
        test_draws.test_batches_that_workers_fetched_ahead_do_not_pay_for_second_steps,
        (2,),
    ),
    Mutant(
        bugs.rows_not_compared_with_records, test_draws.test_more_inputs_than_records_are_refused, (False,)
    ),
    Mutant(
        bugs.views_reordered_by_a_collate_function,
        test_draws.test_views_and_a_collate_function_of_ones_own_are_refused,
    ),
    Mutant(
        bugs.every_step_charged_as_a_new_draw,
        test_draws.test_a_second_step_on_a_batch_is_charged_without_sampling_and_says_so,
    ),
    Mutant(
        bugs.a_target_that_nobody_keeps,
        test_budget.test_a_step_that_would_pass_the_target_is_refused_and_not_charged,
    ),
    Mutant(
        bugs.private_losses_that_decide,
        test_budget.test_a_metric_decides_only_if_no_record_changes_it_or_it_is_declared_public,
    ),
    Mutant(bugs.draws_added_up, test_draws.test_batches_of_the_loader_are_not_added_up),
    Mutant(
        bugs.any_delta_certified,
        test_engine.test_a_large_delta_is_refused_without_telling_a_confidential_number_of_records,
    ),
    Mutant(
        bugs.files_that_keep_their_times,
        in_a_new_folder(test_times.test_nothing_that_a_run_leaves_tells_how_long_it_took),
    ),
    Mutant(
        bugs.terms_that_cancel_not_counted,
        test_rounding.test_terms_that_cancel_take_nothing_from_other_records,
        ("circulant", 2.0**40),
    ),
    Mutant(
        bugs.fft_without_unitary_scaling,
        laws.test_noise_has_the_variance_of_the_certificate,
        ("circulant 8", "gredp padded"),
    ),
    Mutant(
        bugs.half_spectrum_without_root_two,
        laws.test_noise_has_the_variance_of_the_certificate,
        ("conv 3x3", "gredp shaped"),
    ),
    Mutant(bugs.real_noise_only, laws.test_no_direction_is_left_without_noise, ("gredp padded",)),
    Mutant(
        bugs.last_coefficient_without_noise, laws.test_no_direction_is_left_without_noise, ("gredp padded",)
    ),
    Mutant(
        bugs.clip_of_the_mean_loss, laws.test_one_record_moves_the_sum_by_at_most_the_clip_norm, ("dpsgd",)
    ),
    Mutant(
        bugs.views_clipped_one_by_one,
        test_views.test_one_record_with_all_its_views_moves_the_sum_by_at_most_the_clip_norm,
        ("dpsgd",),
    ),
    Mutant(
        bugs.records_of_a_person_clipped_one_by_one,
        test_persons.test_a_person_moves_the_sum_by_at_most_the_clip_norm,
    ),
    Mutant(
        bugs.forwards_clipped_one_by_one,
        test_forwards.test_a_record_moves_the_sum_by_at_most_the_clip_norm_over_all_its_forwards,
        ("dpsgd",),
    ),
    Mutant(
        bugs.forwards_on_two_draws_added_up,
        test_forwards.test_forwards_on_other_records_are_refused,
        (test_forwards.two_draws,),
    ),
    Mutant(bugs.units_mixed_in_a_ledger, in_a_new_folder(test_persons.test_a_ledger_has_one_unit)),
    Mutant(
        bugs.statistics_of_records_for_persons,
        test_person_option.test_means_and_energies_are_those_of_persons,
    ),
    Mutant(
        bugs.views_of_a_record_torn_apart,
        test_views.test_the_views_of_a_record_stay_together_in_physical_batches,
        (7,),
    ),
    Mutant(
        bugs.losses_composed_by_a_plain_transform,
        test_loss_distribution.test_the_rounding_of_ten_thousand_steps_takes_nothing_from_epsilon,
    ),
    Mutant(
        bugs.a_schedule_that_is_charged_and_not_drawn,
        test_schedule.test_what_is_drawn_is_what_is_charged,
        ("dpsgd",),
    ),
    Mutant(
        bugs.noise_divided_by_the_batch,
        laws.test_noise_has_the_variance_of_the_certificate,
        ("linear 45", "dpsgd"),
    ),
    Mutant(
        bugs.divisor_from_the_batch_that_was_drawn,
        laws.test_sums_are_divided_by_the_expected_batch_whatever_was_drawn,
    ),
    Mutant(
        bugs.steps_from_the_length_of_the_data, laws.test_every_constant_is_the_same_on_neighbors, ("dpsgd",)
    ),
    Mutant(bugs.shuffling_accounted_as_poisson, test_sampling.test_batch_sizes_vary_as_independent_draws_do),
    Mutant(bugs.shuffling_accounted_as_poisson, test_sampling.test_records_come_back_within_an_epoch),
    Mutant(bugs.empty_batches_skipped, test_sampling.test_empty_draws_are_executed_charged_and_noised),
    Mutant(bugs.not_finite_records_pass, laws.test_records_that_are_not_finite_contribute_nothing),
    Mutant(
        bugs.noise_for_each_micro_batch, test_sampling.test_result_does_not_depend_on_the_physical_batch, (3,)
    ),
    Mutant(
        bugs.micro_batches_clipped_as_one,
        test_sampling.test_result_does_not_depend_on_the_physical_batch,
        (3,),
    ),
    Mutant(
        bugs.a_norm_that_misses_a_factor,
        laws.test_one_record_moves_the_sum_by_at_most_the_clip_norm,
        ("dpsgd",),
    ),
    Mutant(
        bugs.weights_left_out_of_the_clip,
        laws.test_one_record_moves_the_sum_by_at_most_the_clip_norm,
        ("gredp shaped",),
    ),
    Mutant(
        bugs.layers_that_share_a_norm_counted_once,
        test_engine.test_claims_of_the_paper_stand_beside_the_proven_figure,
    ),
    Mutant(
        bugs.accountant_fed_another_sigma, test_engine.test_the_ledger_holds_what_was_executed, ("gredp",)
    ),
    Mutant(bugs.charged_after_the_update, test_engine.test_the_charge_comes_before_the_update),
    Mutant(bugs.calibration_from_the_wrong_side, test_engine.test_target_epsilon_is_met_and_never_passed),
    Mutant(bugs.noise_from_the_global_seed, laws.test_two_engines_never_share_noise),
    Mutant(bugs.the_same_draw_every_step, laws.test_noise_of_two_steps_is_independent),
    Mutant(bugs.spent_gradients_used_again, test_engine.test_gradients_are_spent_once),
    Mutant(bugs.batch_norm_let_through, test_validation.test_every_layer_that_must_go_is_listed),
    Mutant(
        bugs.buffers_not_watched,
        test_validation.test_a_buffer_that_follows_the_data_is_refused_by_name,
        ("assigned",),
    ),
    Mutant(
        bugs.buffers_watched_in_the_forward_only,
        test_validation.test_state_that_is_written_between_forward_and_release_is_refused,
        (test_validation.from_the_loop, 2),
    ),
    Mutant(
        bugs.coincidences_taken_for_records,
        test_batch_dimension.test_a_coincidence_of_sizes_is_refused_by_name_before_anything_is_charged,
        (test_batch_dimension.Scrambled, "places", {}),
    ),
    Mutant(
        bugs.every_shared_table_taken_for_positions,
        test_batch_dimension.test_a_coincidence_of_sizes_is_refused_by_name_before_anything_is_charged,
        (test_batch_dimension.Scrambled, "places", {}),
    ),
    Mutant(
        bugs.shared_tables_expanded_at_once,
        test_shared.test_gradients_equal_the_loop_over_records,
        ("[1, t], its only row", 3),
    ),
    Mutant(
        bugs.reductions_taken_at_their_word,
        test_reduction.test_one_record_moves_the_sum_by_at_most_the_clip_norm_whatever_the_loss_is_said_to_be,
    ),
    Mutant(
        bugs.only_plain_reductions_checked,
        test_reduction.test_any_loss_is_known_by_how_gradients_follow_the_size_of_batches,
        ("mean",),
    ),
    Mutant(
        bugs.gradients_outside_their_layer_let_through,
        test_validation.test_a_weight_used_outside_its_layer_is_refused_by_name,
    ),
    Mutant(
        bugs.tied_parameters_counted_once,
        layer_laws.test_a_parameter_shared_by_two_layers_counts_both,
        (layer_laws.CASES["linear"],),
    ),
    Mutant(
        bugs.a_linear_norm_that_misses_its_input,
        layer_laws.test_norm_energy_and_sum_equal_those_of_the_dense_gradient,
        (layer_laws.CASES["linear"],),
    ),
    Mutant(
        bugs.unfrozen_parameters_stepped,
        test_validation.test_a_parameter_unfrozen_after_make_private_is_refused_or_stays,
    ),
    Mutant(
        bugs.foreign_parameters_stepped,
        test_validation.test_a_foreign_parameter_in_the_optimizer_is_refused_and_does_not_move,
        ("appended",),
    ),
    Mutant(bugs.noise_repeated_after_a_restart, laws.test_two_engines_never_share_noise),
    Mutant(bugs.sampling_with_24_bits, test_sampling.test_small_rates_are_met_exactly),
    Mutant(
        bugs.norm_products_in_single_precision,
        test_clipped_sum.test_the_norm_holds_for_extreme_factors,
        ("linear", 1.8e19, 6e-20),
    ),
    Mutant(
        bugs.norms_without_their_allowance,
        test_rounding.test_what_a_record_adds_is_never_longer_than_the_clip_norm,
        ("many channels", "dpsgd"),
    ),
    Mutant(
        bugs.an_order_for_each_step,
        test_fixed_and_weighted.test_an_epoch_costs_one_mechanism_without_amplification,
    ),
    Mutant(
        bugs.weights_charged_at_their_mean,
        test_fixed_and_weighted.test_weights_are_charged_at_the_largest_probability,
    ),
    Mutant(bugs.noise_of_the_first_norm, test_adaptive.test_noise_follows_the_norm_and_counts_are_noised),
    Mutant(bugs.counts_without_noise, test_adaptive.test_noise_follows_the_norm_and_counts_are_noised),
    Mutant(
        bugs.counts_left_out_of_the_certificate,
        test_plans.test_adaptive_certificate_holds_for_any_norms,
        (DPSGD("adaptive", quantile=Quantile()), test_plans.WHOLE, 1.0, 1),
    ),
    Mutant(bugs.weights_learned_before_the_release, test_engine.test_shaped_noise_learns_from_releases_only),
    Mutant(
        bugs.the_start_left_out_of_the_key,
        test_randomness.test_digests_of_all_draws_are_unique_over_steps_blocks_and_incarnations,
    ),
    Mutant(bugs.a_step_noised_again, test_randomness.test_a_step_is_noised_once),
    Mutant(bugs.charges_forgotten_on_resume, stays_charged),
    Mutant(
        bugs.lines_cut_off_a_ledger_not_missed,
        in_a_new_folder(test_runs.test_a_ledger_that_was_shortened_is_not_loaded),
        (False,),
    ),
    Mutant(
        bugs.a_ledger_believed_whatever_else_is_there,
        in_a_new_folder(test_runs.test_a_checkpoint_shows_that_ledger_and_mark_were_shortened),
    ),
    Mutant(
        bugs.a_shape_that_is_believed,
        in_a_new_folder(test_checkpoint.test_weights_of_a_shape_are_computed_and_not_believed),
    ),
    Mutant(bugs.charges_written_late, stays_charged),
    Mutant(
        bugs.a_fork_that_forgets_its_parent,
        in_a_new_folder(test_runs.test_a_fork_begins_with_what_its_parent_spent),
    ),
    Mutant(
        bugs.contracts_not_compared,
        in_a_new_folder(test_runs.test_changed_settings_are_refused_with_both_values),
        ({"noise_multiplier": 1.1}, "another noise_multiplier"),
    ),
    *(
        Mutant(mistake, test_distributed.test_noise_of_the_certificate_is_added_once, (2, "dpsgd"))
        for mistake in (
            bugs.noise_of_every_process_added_up,
            bugs.noise_of_every_process_averaged,
            bugs.noise_divided_by_the_number_of_processes,
        )
    ),
    Mutant(
        bugs.every_process_keeps_its_own_noise,
        test_distributed.test_with_noise_processes_stay_bit_equal_at_every_step,
        ("dpsgd",),
    ),
    Mutant(bugs.one_seed_for_all_processes, test_distributed.test_secrets_of_processes_are_independent, (2,)),
    *(
        Mutant(
            mistake, test_distributed.test_without_noise_many_processes_release_what_one_does, (2, "dpsgd")
        )
        for mistake in (bugs.every_process_takes_the_whole_batch, bugs.sums_of_other_processes_left_out)
    ),
    Mutant(
        bugs.freshness_decided_by_each_process,
        test_distributed.test_the_worst_process_decides_whether_a_batch_is_new,
    ),
    Mutant(
        bugs.exchanges_without_a_tag,
        test_distributed.test_models_stepped_in_another_order_are_refused_by_all,
    ),
    Mutant(
        bugs.records_of_processes_not_compared,
        test_distributed.test_records_that_each_process_split_for_itself_are_refused,
    ),
    Mutant(bugs.charges_written_late, in_a_new_folder(paid_before_given)),
    Mutant(
        bugs.a_query_without_its_charge,
        in_a_new_folder(test_normalize.test_the_query_is_charged_and_the_target_remains_the_ceiling),
    ),
    Mutant(
        bugs.a_query_without_its_clip, test_normalize.test_one_record_moves_the_sum_by_at_most_the_clip_norm
    ),
    Mutant(
        bugs.parts_that_do_not_take_turns, test_cyclic.test_a_record_takes_part_in_steps_a_whole_cycle_apart
    ),
    Mutant(
        bugs.accountant_fed_the_rate_of_all_records,
        test_cyclic.test_the_ledger_holds_the_rate_at_which_a_part_is_drawn_from,
    ),
    Mutant(
        bugs.turns_rounded_down,
        test_turns.test_after_every_step_no_record_has_had_more_turns_than_are_charged,
        (4,),
    ),
    Mutant(
        bugs.kinds_of_steps_mixed_in_a_split,
        test_turns.test_the_rates_of_one_split_cannot_be_dealt_to_one_part,
    ),
    Mutant(bugs.splits_counted_as_one, in_a_new_folder(test_cyclic.test_a_fork_pays_for_its_own_turns)),
    *(
        Mutant(
            mistake,
            test_banded.test_released_noise_has_the_covariance_over_steps_that_is_certified,
            ("dpsgd",),
        )
        for mistake in (
            bugs.columns_longer_than_certified,
            bugs.noise_that_forgets,
            bugs.noise_taken_back_with_a_wrong_sign,
        )
    ),
    Mutant(
        bugs.noise_kept_with_the_checkpoint,
        in_a_new_folder(test_cyclic.test_noise_of_an_earlier_start_is_never_taken_back),
        (2,),
    ),
    Mutant(
        bugs.another_split_after_a_restart,
        in_a_new_folder(test_cyclic.test_the_parts_go_on_taking_turns_after_a_restart),
        (3,),
    ),
    Mutant(
        bugs.batches_out_of_turn_let_through,
        test_cyclic.test_a_batch_left_out_used_again_or_taken_too_early_is_refused,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_caught(mutant):
    try:
        with bugs.planted(mutant.plant):
            mutant.caught_by(*mutant.arguments)
    except (AssertionError, pytest.fail.Exception):
        return
    pytest.fail(f"{mutant.caught_by.__name__} did not notice {mutant}")


@pytest.mark.slow
def test_the_catching_tests_pass_without_a_fault():
    """Otherwise a mutant could be caught by a test that always fails."""
    for mutant in {m.caught_by: m for m in MUTANTS}.values():
        mutant.caught_by(*mutant.arguments)
