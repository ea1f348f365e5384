"""Compilations inside a pass are noticed, and such a pass is timed again."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from longseq_bench.core.model import Outcome
from longseq_bench.distributed.group import Group
from longseq_bench.worker import passes as passes_module
from longseq_bench.worker.passes import CompileWatch
from tests.ranks import Ranks
from tests.worker.test_ranks import run, trial_for


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's settings, with a hook of somebody else."""
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace(runtime=runtime))  # type: ignore[arg-type]
    return runtime


def test_a_kernel_that_triton_compiles_is_noticed(knobs: SimpleNamespace) -> None:
    earlier = knobs.jit_post_compile_hook = MagicMock(return_value="its answer")
    with CompileWatch() as watch:
        assert knobs.jit_post_compile_hook(key="kernel") == "its answer"
    assert watch.compiled
    earlier.assert_called_once_with(key="kernel")
    assert knobs.jit_post_compile_hook is earlier


def test_the_first_import_of_triton_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "triton.knobs", "torch._dynamo.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with CompileWatch() as watch:
        torch.ones(3).sum()
    assert not watch.compiled
    assert not {"triton", "torch._dynamo.utils"} & sys.modules.keys()
    with CompileWatch() as watch:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert watch.compiled


def test_a_graph_of_torch_compile_is_noticed() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for size, compiles in ((3, True), (3, False), (4, True)):
        with CompileWatch() as watch:
            double(torch.ones(size))
        assert watch.compiled == compiles


# ---- in a trial --------------------------------------------------------------------------------


def run_compiling_rank(group: Group, repeats: int) -> tuple[Outcome, int]:
    """Run a trial whose first pass compiles on the last rank; return the watched passes too."""
    passes = []

    class Watch(CompileWatch):
        def __exit__(self, *raised: Any) -> None:
            self.compiled = not passes and group.rank == group.size - 1
            passes.append(1)

    with patch.object(passes_module, "CompileWatch", Watch):
        return run(group, trial_for(repeats=repeats)), len(passes)


@pytest.mark.parametrize(("repeats", "expected"), [(0, 2), (2, 1)])
def test_all_ranks_time_a_first_pass_again_if_one_compiled(
    ranks: Ranks, repeats: int, expected: int
) -> None:
    """With timed passes it gives no time, so it need not run again."""
    for outcome, passes in ranks(2, run_compiling_rank, repeats):
        assert (outcome.status, passes) == ("ok", expected)
        assert len(outcome.samples("pass_time")) == 1
        assert ("timed_again" in outcome.facts) == (expected == 2)
