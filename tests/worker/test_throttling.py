"""A GPU that slows a timed pass down: it runs again after a pause, or the round says so."""

from collections.abc import Callable, Iterator
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

STEADY = Clocks(1755.0, 1980.0, 61.0, 690.0, ("power limit",))
HOT = Clocks(1095.0, 1980.0, 91.0, 400.0, ("heat",))


@contextmanager
def watched(*clocks: Clocks | None) -> Iterator[list[str]]:
    """Read these clocks after the passes, then steady ones; note passes and pauses."""
    events: list[str] = []
    readings = chain(clocks, repeat(STEADY))

    def read() -> Clocks | None:
        events.append("read")
        return next(readings)

    with pytest.MonkeyPatch.context() as patch:
        make: Callable[..., Any] = lambda group, _: throttling.Throttling(group, True)  # noqa: E731
        patch.setattr(timing, "Throttling", make)
        handle = SimpleNamespace(read_clocks=read)
        patch.setattr(throttling, "own_gpu", SimpleNamespace(handle=handle))
        sleep = SimpleNamespace(sleep=lambda seconds: events.append(f"pause {seconds}"))
        patch.setattr(throttling, "time", sleep)
        yield events


class Silent:
    phase = "start"

    def start_phase(self, *_: Any) -> None: ...


def run(group: Group | None = None, **fields: Any) -> Outcome:
    options: dict[str, Any] = {"kernel": "auto"} if fields.get("world_size") else {}
    one = trial("ring" if options else "sdpa", 256, options, threads=1, **{"repeats": 4} | fields)
    return run_trial(one, Silent(), group)  # type: ignore[arg-type]


def test_a_throttled_pass_runs_again_after_a_pause() -> None:
    with watched(STEADY, HOT, HOT) as events:
        outcome = run()
    assert outcome.status == "ok", outcome.reason
    assert events == ["read"] * 2 + ["pause 1", "read", "pause 2"] + ["read"] * 3
    assert len(outcome.samples("time")) == len(outcome.samples("cpu_time")) == 4
    assert outcome.samples("sm_clock") == (1755e6,) * 4
    assert outcome.facts["clocks"] == {
        "highest_mhz": 1980, "celsius": 61, "watts": 690, "limited_by": ["power limit"],
        "repeated": 2,
    }  # fmt: skip
    assert "throttled" not in outcome.facts


def test_a_gpu_that_stays_hot_has_a_time_and_a_mark() -> None:
    """The pauses end after 30 s, and pauses don't count for the time cap."""
    with watched(*[HOT] * 7) as events:
        outcome = run(time_cap=60.0)
    assert [e for e in events if e != "read"] == [f"pause {s}" for s in (1, 2, 4, 8, 15)]
    assert (outcome.status, len(outcome.samples("time"))) == ("ok", 4)
    assert outcome.facts["throttled"] == (
        "2 of 4 passes throttled (heat): SM clock 1,095 of 1,980 MHz, 91 °C"
    )


def test_a_gpu_without_clocks_is_timed_as_before() -> None:
    with watched(*[None] * 4) as events:
        outcome = run()
    assert (events, len(outcome.samples("time"))) == (["read"] * 4, 4)
    assert not {"clocks", "throttled"} & outcome.facts.keys()
    assert not outcome.samples("sm_clock")


def run_on_rank(group: Group) -> tuple[list[str], str | None]:
    """Only the second rank is hot, and only in its first passes."""
    with watched(*[HOT] * (6 * group.rank)) as events:
        outcome = run(group, world_size=2)
    assert outcome.status == "ok", outcome.reason
    return events, outcome.facts.get("throttled")


def test_all_ranks_pause_for_one(ranks: Ranks) -> None:
    first, second = ranks(2, run_on_rank)
    assert first == second
    assert first[0].count("pause 1") == 1
    assert first[1]
    assert first[1].endswith("91 °C (on rank 1)")
