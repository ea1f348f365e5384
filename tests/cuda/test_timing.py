"""Times of CUDA events against Triton's own benchmark, and compiling only once."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch

from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.meters.clock import CudaClock, clock_for
from longseq_bench.patterns.blocks import make_layout
from tests.kernels.test_triton_blocks import inputs, run

pytestmark = pytest.mark.cuda

WARM_UPS, PASSES = 10, 30


def test_event_times_equal_those_of_triton() -> None:
    """Within 3 %: a copy of some milliseconds, so that the launch does not count.

    A product of matrices takes 9 % longer there on an H100: without a pause between passes the
    power limit lowers the clock.
    """
    triton = pytest.importorskip("triton")
    source = torch.ones(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    clock = clock_for("cuda")
    assert isinstance(clock, CudaClock)
    for _ in range(WARM_UPS + PASSES):
        with clock:
            work()
    own = median(clock.wall[WARM_UPS:])
    theirs = triton.testing.do_bench(work, warmup=100, rep=300, return_mode="median") / 1e3
    assert own == pytest.approx(theirs, rel=0.03)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or loads from its cache, during the test."""
    triton = pytest.importorskip("triton")
    names: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    triton.knobs.runtime.jit_cache_hook = note
    yield names
    triton.knobs.runtime.jit_cache_hook = before


@pytest.mark.parametrize("pattern", ["local-window", "global-local"])
@pytest.mark.parametrize(
    "lengths", [[32_768, 49_152, 65_536], [30_000, 32_001, 50_000]], ids=["whole", "tail"]
)
def test_a_second_length_compiles_nothing(
    compiled: list[str], lengths: list[int], pattern: str
) -> None:
    """Compiling would be timed as a part of the pass. Global tokens split long columns."""
    special = 128 if pattern == "global-local" else 0
    for tokens in lengths:
        layout = make_layout(pattern, tokens, 128, 0.9, True, special=special)
        assert bool(WorkItems.of_columns([layout], 2, torch.device("cpu")).slots) == bool(special)
        tensors, grad_out = inputs(tokens, torch.bfloat16, (4, 2), 64)
        run([layout], [t.cuda() for t in tensors], grad_out.cuda())
        if tokens == lengths[0]:
            assert compiled, "the hook saw nothing"
            compiled.clear()
    assert compiled == []
