"""Timed passes with cold caches and as CUDA graphs, and the profile of a pass."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.meters.clock import Clock
from longseq_bench.worker import timing
from longseq_bench.worker.passes import Pass, run_pass
from tests.make import trial
from tests.trials import complete, passed, run_trial
from tests.worker.test_ranks import run, trial_for

MIB = 2**20


def test_a_cold_pass_follows_a_write_of_twice_the_last_level_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing, "CACHES", tmp_path)
    assert timing.cache_bytes("cpu") == timing.USUAL_CACHE_BYTES
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
        (folder / "size").write_text("1024K\n")
    assert timing.cache_bytes("cpu") == 2 * MIB  # two processors
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    properties = {3: SimpleNamespace(L2_cache_size=50 * MIB)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.get)
    assert timing.cache_bytes("cuda") == 50 * MIB
    written: Any = timing.preparation_of(trial(timing="cold"))()
    assert (written.nbytes, int(written.min())) == (4 * MIB, 1)
    warm: Any = timing.preparation_of(trial())()
    assert not warm.nbytes


def test_caches_are_flushed_before_each_timed_pass_and_outside_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also before those of the dense baseline, with which it is compared."""
    events: list[str] = []
    monkeypatch.setattr(timing._Passes, "max_reading_s", 1.0)
    monkeypatch.setattr(timing, "preparation_of", lambda of: partial(events.append, "flush"))
    for name in ("start", "stop"):
        call = getattr(Clock, name)

        def noted(clock: Clock, call: Callable[..., None] = call, name: str = name) -> None:
            events.append(name)
            call(clock)

        monkeypatch.setattr(Clock, name, noted)
    sparse = {"pattern": "local-window", "sparsity": 0.5}
    outcome = run(Group.alone(), trial_for("block-sparse", 600, sparse, repeats=3, timing="cold"))
    passes = len(outcome.samples("time")) + len(outcome.samples("dense_time"))
    assert passes == 6
    assert events[: 3 * passes] == ["flush", "start", "stop"] * passes


# ---- CUDA graphs, on a CPU: a replay runs the recorded pass again, into the same results ---------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake of torch's graphs. error: raised by a pass that is recorded; replays: their number.

    is_stale: a replay does nothing.
    """
    state = SimpleNamespace(recording=False, replays=0, passes=0, error=None, is_stale=False)

    def noted_pass(attention: Any, pass_: Pass) -> None:
        if state.recording and state.error:
            raise state.error
        state.passes += 1
        run_pass(attention, pass_)
        if state.recording:
            state.attention, state.recorded, state.out = attention, pass_, pass_.out
            state.grads = pass_.grads

    class Graph:
        def replay(self) -> None:
            state.replays += 1
            if state.is_stale:
                return
            run_pass(state.attention, state.recorded)
            with torch.no_grad():
                state.out.copy_(state.recorded.out)
                for old, new in zip(state.grads, state.recorded.grads, strict=True):
                    old.copy_(new)
            state.recorded.out = state.recorded.grads = None

    @contextmanager
    def recording(graph: Graph) -> Iterator[None]:
        state.recording = True
        yield
        state.recording = False

    monkeypatch.setattr(timing, "run_pass", noted_pass)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return state


def run_graph() -> Outcome:
    return run(Group.alone(), trial_for(repeats=3, timing="graph", mode="train"))


def test_a_pass_is_recorded_once_and_each_timed_one_is_a_replay_with_its_own_results(
    graphs: SimpleNamespace,
) -> None:
    outcome = passed(run_graph())
    assert outcome.largest("checked_passes") == len(outcome.samples("time")) == graphs.replays == 3
    assert graphs.passes == timing.TIMED_WARM_UPS + 1


def test_the_results_of_a_replay_are_checked(graphs: SimpleNamespace) -> None:
    graphs.is_stale = True
    outcome = run_graph()
    assert outcome.status == "wrong"
    assert "timed pass" in (outcome.reason or "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing\nx"),
         "unsupported"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
    ],
)  # fmt: skip
def test_a_pass_that_synchronises_is_unsupported_in_one_sentence(
    graphs: SimpleNamespace, error: Exception, status: str
) -> None:
    graphs.error = error
    outcome = run_graph()
    assert outcome.status == status
    if status == "unsupported":
        assert outcome.reason == (
            "timing=graph: a pass that waits for the device can't be a CUDA graph (CUDA error: "
            "operation not permitted when stream is capturing)"
        )


# ---- the profile of a pass -----------------------------------------------------------------------


def test_the_first_trial_that_times_passes_writes_its_profile(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json.gz"
    monkeypatch.setattr(launcher, "profile", str(path))
    searched, odd, good, later = (
        run_trial(launcher, complete(launcher, name, tokens, repeats=repeats))
        for name, tokens, repeats in (
            ("ring", 256, 0), ("bad-refuses", 2049, 2), ("ring", 256, 2), ("ring", 256, 2),
        )
    )  # fmt: skip
    assert odd.status == "unsupported"
    assert good.status == later.status == "ok"
    written = [one.facts.get("profile") for one in (searched, odd, good, later)]
    assert written == [None, None, str(path), None]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("empty" in event["name"] or "view" in event["name"] for event in events)
