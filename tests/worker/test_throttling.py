"""A GPU that slows a timed pass down: it runs again after a pause, or the round says so."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from longseq_bench.core.gpus import Clocks
from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.worker import throttling, timing
from longseq_bench.worker.trial import run_trial
from tests.make import trial
from tests.ranks import Ranks
from tests.trials import passed

STEADY = Clocks(1755.0, 1980.0, 61.0, 690.0, ("power limit",))
HOT = Clocks(1095.0, 1980.0, 91.0, 400.0, ("heat",))


@contextmanager
def watched(*clocks: Clocks | None) -> Iterator[list[float]]:
    """Read these clocks after the passes, then steady ones; note a pass as 0, and pauses."""
    events: list[float] = []
    readings = chain(clocks, repeat(STEADY))
    handle = SimpleNamespace(read_clocks=lambda: (events.append(0), next(readings))[1])
    host = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(events), sleep=time.sleep)
    watch = throttling.Throttling
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "Throttling", lambda group, _: watch(group, is_watched=True))
        patch.setattr(throttling, "own_gpu", SimpleNamespace(handle=handle))
        patch.setattr(throttling, "time", SimpleNamespace(sleep=events.append))
        patch.setattr(timing, "time", host)
        yield events


def run(
    name: str = "ring", options: Any = None, group: Group | None = None, **fields: Any
) -> Outcome:
    one = trial(name, 256, options, threads=1, **{"repeats": 4} | fields)
    sender: Any = SimpleNamespace(phase="start", start_phase=lambda *_: None)
    outcome = passed(run_trial(one, sender, group))
    assert len(outcome.samples("time")) == len(outcome.samples("cpu_time")) == 4
    return outcome


def test_a_throttled_pass_runs_again_after_a_pause() -> None:
    with watched(STEADY, HOT, HOT) as events:
        outcome = run()
    assert events == [0, 0, 1, 0, 2, 0, 0, 0]
    assert outcome.samples("sm_clock") == (1755e6,) * 4
    clocks = {"highest_mhz": 1980, "celsius": 61, "watts": 690, "limited_by": ["power limit"]}
    assert outcome.facts["clocks"] == {**clocks, "repeated": 2}
    assert "throttled" not in outcome.facts


def test_a_gpu_that_stays_hot_has_a_time_and_a_mark() -> None:
    """The pauses are 30 s in all, and don't count for the time cap."""
    with watched(*[HOT] * 7) as events:
        outcome = run(time_cap=20.0)
    assert list(filter(None, events)) == [1, 2, 4, 8, 15]
    assert outcome.facts["throttled"] == (
        "2 of 4 passes throttled (heat): SM clock 1,095 of 1,980 MHz, 91 °C"
    )


def test_dense_attention_that_was_throttled_is_marked_too() -> None:
    """It would make a sparse attention look fast."""
    with watched(STEADY, HOT):
        outcome = run("block-sparse", {"sparsity": 0.5, "block": 64})
    assert outcome.facts["throttled"].startswith("1 of 8 passes throttled")


def test_a_gpu_without_clocks_is_timed_as_before() -> None:
    with watched(*[None] * 4) as events:
        outcome = run()
    assert events == [0] * 4
    assert not {"clocks", "throttled"} & outcome.facts.keys()
    assert not outcome.samples("sm_clock")


def run_on_rank(group: Group) -> tuple[list[float], str | None]:
    """Only the second rank is hot, and only in its first passes."""
    with watched(*[HOT] * (6 * group.rank)) as events:
        outcome = run(group=group, world_size=2)
    return events, outcome.facts.get("throttled")


def test_all_ranks_pause_for_one(ranks: Ranks) -> None:
    first, second = ranks(2, run_on_rank)
    assert first == second
    assert first[0].count(1) == 1
    assert (first[1] or "").endswith("91 °C (on rank 1)")
