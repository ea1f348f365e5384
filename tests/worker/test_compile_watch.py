"""Compilations inside a pass are measured; such a pass is timed again if that may matter."""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.worker import compile_watch
from longseq_bench.worker import passes as passes_module
from longseq_bench.worker.compile_watch import CompileWatch
from longseq_bench.worker.passes import run_pass
from tests.ranks import Ranks
from tests.worker.test_ranks import run, trial_for


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of a watch: a test sets `now`."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(compile_watch, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's settings, with a hook of somebody else."""
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace(runtime=runtime))  # type: ignore[arg-type]
    return runtime


def test_the_seconds_in_which_triton_compiles_are_measured(
    knobs: SimpleNamespace, clock: SimpleNamespace
) -> None:
    earlier = knobs.jit_post_compile_hook = MagicMock(return_value="its answer")
    with CompileWatch() as watch:
        for _ in range(2):
            assert not knobs.jit_cache_hook(key="kernel")  # another answer would stop Triton
            clock.now += 0.5
            assert knobs.jit_post_compile_hook(key="kernel") == "its answer"
            clock.now += 3.0
    assert watch.seconds == 1.0
    earlier.assert_called_with(key="kernel")
    assert (knobs.jit_cache_hook, knobs.jit_post_compile_hook) == (None, earlier)


def test_kernels_of_a_graph_count_once_and_a_failed_one_until_the_end(
    knobs: SimpleNamespace, clock: SimpleNamespace
) -> None:
    with CompileWatch() as watch:
        for hook in (watch._begin, knobs.jit_cache_hook, knobs.jit_post_compile_hook, watch._end):
            hook()
            clock.now += 0.5
        knobs.jit_cache_hook()
        clock.now += 2.0
    assert watch.seconds == 3.5


def test_a_watch_imports_no_compiler(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    for name in [n for n in sys.modules if n.startswith(("triton", "torch._dynamo"))]:
        monkeypatch.delitem(sys.modules, name)
    with CompileWatch() as watch:
        torch.ones(3).sum()
        clock.now += 1.0
    assert not watch.seconds
    assert not {"triton", "torch._dynamo"} & sys.modules.keys()


def test_a_graph_of_torch_compile_is_noticed() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for size, compiles in ((3, True), (3, False), (4, True)):
        with CompileWatch() as watch:
            start = time.perf_counter()
            double(torch.ones(size))
            took_s = time.perf_counter() - start
        assert bool(watch.seconds) == compiles
        assert watch.seconds <= took_s


# ---- in a trial --------------------------------------------------------------------------------

COMPILED_S = 2.0


def run_compiling_rank(group: Group, repeats: int, pass_s: float) -> tuple[Outcome, int]:
    """Run a trial whose first pass compiles on the last rank; return the watched passes too.

    pass_s: seconds that the first pass takes besides. The time budget is 4 s.
    """
    ran, now = [0], [0.0]

    class Watch(CompileWatch):
        def __enter__(self) -> "Watch":
            return self

        def __exit__(self, *raised: Any) -> None:
            self.seconds = COMPILED_S * (ran[0] == 2 and group.rank == group.size - 1)

    def pass_(*of: Any) -> None:
        run_pass(*of)
        ran[0] += 1
        now[0] += pass_s + COMPILED_S * (ran[0] == 2)  # the first one is the warm-up

    with (
        patch.object(passes_module, "CompileWatch", Watch),
        patch.object(passes_module, "run_pass", pass_),
        patch.object(passes_module, "time", SimpleNamespace(perf_counter=lambda: now[0])),
    ):
        return run(group, trial_for(repeats=repeats, time_budget=4.0)), ran[0] - 1


@pytest.mark.parametrize(
    ("repeats", "pass_s", "expected"),
    [(0, 0.5, 2), (0, 1.5, 1), (0, 3.5, 2), (2, 0.5, 1)],
    ids=["short", "long", "over the budget by its compilation", "timed"],
)
def test_all_ranks_time_a_first_pass_again_if_the_compilation_of_one_may_matter(
    ranks: Ranks, repeats: int, pass_s: float, expected: int
) -> None:
    """With timed passes it gives no time, so it need not run again."""
    for outcome, passes in ranks(2, run_compiling_rank, repeats, pass_s):
        assert (outcome.status, passes) == ("ok", expected)
        # a device works on while the host compiles, so what it took is not subtracted
        in_time_s = COMPILED_S * (expected == 1)
        assert outcome.samples("pass_time") == (pytest.approx(pass_s + in_time_s),)
        assert ("timed_again" in outcome.facts) == (expected == 2)
        assert ("compiled" in outcome.facts) == (pass_s == 1.5)
