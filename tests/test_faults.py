"""The 17 faults of earlier benchmarks that this one must not repeat, and the tests that find each.

Code and documents refer to them by number ("Fault 12").

no  fault                                   why it matters
 1  attention over heads, not tokens        a fast result that is not attention
 2  one softmax for each block, summed      weights of a row sum to the number of blocks
 3  causal leak, NaN                        the output depends on later tokens, or is no number
 4  a ring that is block-diagonal           each rank sees its own keys only, and seems to scale
 5  one buffer for sending and receiving    keys are overwritten while they travel
 6  an index map that is no permutation     tokens are lost or counted twice
 7  an unused sparsity                      the density asked for is not the density computed
 8  layouts drawn unseeded on each rank     ranks disagree on the pattern
 9  uncovered tokens left zero              a density that no model could use, not reported
10  memory left in place of the peak        0.00 GB, or the peak of the trial before
11  any exception called out of memory      a crash is reported as a limit
12  a search that ends too low              unconfirmed lengths, steps of 8,192 tokens
13  batch 1 under DataParallel              a speed-up of one device that works alone
14  the whole q on every rank               memory does not fall with the ranks
15  a barrier timed as communication        waiting is reported as transfer
16  a silent fall-back                      the algorithm measured is not the one named
17  two threads on a busy machine           times of small tensors are times of the scheduler
"""

import importlib
from operator import attrgetter

import pytest

CAUGHT: dict[int, list[str]] = {
    1: [
        "attention.test_contract:TestBuiltIns.test_a_token_moves_the_rows_that_see_it_and_no_others",
        "worker.test_check:test_one_dropped_key_of_a_million_is_seen",
        "worker.test_check:test_wrong_implementations_fail",
    ],
    2: [
        "attention.test_contract:TestBuiltIns.test_constant_values_come_back",
        "worker.test_check:test_wrong_implementations_fail",
    ],
    3: [
        "attention.test_contract:TestBuiltIns.test_the_future_never_reaches_the_past",
        "attention.test_ranks:test_the_future_never_reaches_the_past",
        "worker.test_check:test_values_that_are_not_finite_are_infinite_errors",
        "worker.test_trial:test_a_wrong_output_is_a_result_with_its_error",
    ],
    4: [
        "attention.test_ranks:test_ranks_together_equal_the_reference",
        "attention.test_ranks:test_eight_ranks_equal_the_reference",
        "distributed.test_kv_exchange:test_every_block_of_every_other_rank_comes_once",
        "worker.test_trial:test_a_wrong_output_is_a_result_with_its_error",
    ],
    5: [
        "attention.test_ranks:test_delays_change_nothing",
        "distributed.test_kv_exchange:test_every_block_of_every_other_rank_comes_once",
    ],
    6: ["patterns.test_hilbert:test_the_map_is_a_permutation"],
    7: [
        "patterns.test_blocks:test_every_row_keeps_the_requested_number_of_blocks",
        "worker.test_trial:test_shares_of_the_pattern_are_measured",
    ],
    8: [
        "patterns.test_blocks:test_a_draw_is_the_same_in_another_process",
        "attention.test_ranks:test_ranks_together_equal_the_reference",
    ],
    9: [
        "patterns.test_dilated:test_groups_count_uncovered_tokens",
        "attention.test_contract:TestBuiltIns.test_shares_equal_enumeration",
        "worker.test_trial:test_shares_of_the_pattern_are_measured",
    ],
    10: [
        "worker.test_trial:test_the_peak_includes_temporary_memory",
        "worker.test_trial:test_a_repeated_trial_has_the_same_peak",
        "worker.test_limits:test_the_peak_is_the_largest_need",
        "core.test_units:test_formatting",
    ],
    11: ["launchers.test_local:test_each_failure_has_its_reason"],
    12: [
        "search.test_bracket:test_promises_are_kept_on_random_machines",
        "search.test_bracket:test_a_machine_without_noise_is_always_closed_and_confirmed",
    ],
    13: [
        "attention.test_refusals:test_a_batch_smaller_than_the_ranks_is_refused",
        "attention.test_contract:test_unavailable_implementations_have_a_reason",
    ],
    14: ["attention.test_ranks:test_partitioned_queries_save_work_and_full_queries_do_not"],
    15: ["worker.test_ranks:test_three_kinds_of_pass_alternate_and_barriers_are_not_timed"],
    16: ["worker.test_trial:test_facts_name_the_backend"],
    17: ["worker.test_trial:test_samples_of_both_clocks_are_kept"],
}


def test_every_fault_has_a_place() -> None:
    assert sorted(CAUGHT) == list(range(1, 18))
    table = [line.split()[0] for line in (__doc__ or "").splitlines() if line[:2].strip().isdigit()]
    assert table == [str(number) for number in range(1, 18)]


@pytest.mark.parametrize("place", sorted({p for places in CAUGHT.values() for p in places}))
def test_the_test_that_catches_it_exists(place: str) -> None:
    module, function = place.split(":")
    assert callable(attrgetter(function)(importlib.import_module(f"tests.{module}")))
