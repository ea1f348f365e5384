"""Where each of the 17 faults of an ancestor is caught.

no  fault                                                      caught in
 1  attention over heads instead of tokens                     attention, probe
 2  one softmax a block, summed                                attention, probe
 3  causal leak, NaN                                           attention, ranks, probe
 4  a "simulated ring" that is block-diagonal                  probe, ranks
 5  the same buffer sends and receives                         couriers, ranks
 6  an index map that is no permutation                        patterns
 7  a sparsity that nothing uses, density taken for sparsity   patterns, attention, probe
 8  layouts drawn unseeded on each rank                        patterns, ranks
 9  uncovered tokens left zero                                 patterns, attention, probe
10  memory left instead of the peak, a peak carried, 0.00 GB   probe, launchers, units
11  any exception called out of memory                         launchers, plan
12  a search that ends too low, unconfirmed, or in 8,192s      search
13  batch 1 under DataParallel called a speed-up               ranks, attention
14  full q on every rank                                       ranks
15  a barrier timed and called communication                   probe
16  a silent fall-back to another algorithm                    probe
17  two threads on a busy machine                              probe
"""

from __future__ import annotations

import importlib
from operator import attrgetter

import pytest

CAUGHT: dict[int, list[str]] = {
    1: [
        "attention.test_contract:TestBuiltIns.test_a_token_moves_the_rows_that_see_it_and_no_others",
        "probe.test_check:test_a_far_key_that_is_missed_is_caught",
        "probe.test_check:test_wrong_ones_are_caught",
    ],
    2: [
        "attention.test_contract:TestBuiltIns.test_constant_values_come_back",
        "probe.test_check:test_wrong_ones_are_caught",
    ],
    3: [
        "attention.test_contract:TestBuiltIns.test_the_future_never_reaches_the_past",
        "attention.test_ranks:test_the_future_never_reaches_the_past",
        "probe.test_check:test_what_is_not_finite_is_infinitely_wrong",
        "probe.test_probe:test_a_wrong_output_is_a_result_with_its_error",
    ],
    4: [
        "attention.test_ranks:test_ranks_together_equal_the_reference",
        "attention.test_ranks:test_eight_ranks_equal_the_reference",
        "comm.test_couriers:test_every_piece_of_every_other_rank_is_shown_once",
        "probe.test_probe:test_a_wrong_output_is_a_result_with_its_error",
    ],
    5: [
        "attention.test_ranks:test_late_ranks_change_nothing",
        "comm.test_couriers:test_every_piece_of_every_other_rank_is_shown_once",
        "comm.test_couriers:test_late_ranks_see_and_get_the_same",
    ],
    6: ["patterns.test_hilbert:test_the_map_is_a_permutation"],
    7: [
        "patterns.test_blocks:test_every_row_keeps_what_was_asked",
        "attention.test_contract:test_asked_density_is_met_within_a_block_a_row",
        "probe.test_probe:test_shares_of_the_pattern_are_measured",
    ],
    8: [
        "patterns.test_blocks:test_a_draw_is_the_same_in_another_process",
        "attention.test_ranks:test_a_single_process_sees_the_same",
        "attention.test_ranks:test_ranks_together_equal_a_single_process",
    ],
    9: [
        "patterns.test_dilated:test_groups_leave_tokens_uncovered_and_say_so",
        "attention.test_contract:TestBuiltIns.test_shares_equal_enumeration",
        "probe.test_probe:test_shares_of_the_pattern_are_measured",
    ],
    10: [
        "probe.test_probe:test_the_peak_is_a_need_of_a_moment",
        "probe.test_probe:test_a_repeated_trial_has_the_same_peak",
        "probe.test_limits:test_the_peak_is_what_was_needed_at_most",
        "launchers.test_forked:test_trials_do_not_share_a_process",
        "test_units:test_bytes_never_fall_below_the_digits",
    ],
    11: [
        "launchers.test_forked:test_a_shape_error_is_no_lack_of_memory",
        "test_plan:test_what_ended_a_search_is_what_its_record_says",
    ],
    12: [
        "test_search:test_promises_hold_on_drawn_machines",
        "test_search:test_a_calm_machine_is_always_closed_and_confirmed",
        "test_search:test_steps_are_finer_than_8192_tokens",
    ],
    13: [
        "attention.test_ranks:test_a_batch_smaller_than_the_ranks_is_refused",
        "attention.test_contract:test_what_cannot_run_here_says_why",
    ],
    14: ["attention.test_ranks:test_partitioned_queries_save_work_and_full_ones_do_not"],
    15: ["probe.test_ranks:test_three_kinds_take_turns_and_ranks_meet_outside_the_clock"],
    16: ["probe.test_probe:test_what_ran_is_said"],
    17: ["probe.test_probe:test_samples_of_both_clocks_are_kept"],
}


def test_every_fault_has_a_place() -> None:
    assert sorted(CAUGHT) == list(range(1, 18))
    table = [line.split()[0] for line in (__doc__ or "").splitlines() if line[:2].strip().isdigit()]
    assert table == [str(number) for number in range(1, 18)]


@pytest.mark.parametrize("place", sorted({p for places in CAUGHT.values() for p in places}))
def test_the_test_that_catches_it_exists(place: str) -> None:
    module, function = place.split(":")
    assert callable(attrgetter(function)(importlib.import_module(f"tests.{module}")))
