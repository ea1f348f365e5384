"""The dense baseline: when it runs, its passes, how a part is scaled, and what it never changes."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from longseq_bench.analysis.sweeps import standard_bytes
from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.errors import KernelLimitError
from longseq_bench.core.masks import parse_mask
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.kernels.exact.base import select
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.meters.clock import Clock
from longseq_bench.testing.definition import build_attention, make_inputs
from longseq_bench.worker import dense_baseline
from longseq_bench.worker.dense_baseline import (
    NOT_RUN_ON_RANKS,
    DenseBaseline,
    choose_dense_kernel,
    dense_flops,
)
from longseq_bench.worker.messages import MeasurementLog, samples_of
from longseq_bench.worker.passes import Pass, draw_inputs
from tests.trials import complete, exact, passed, run, run_trial

pytestmark = pytest.mark.usefixtures("one_thread")
FROM_A_PART = "computed from 1,024 of 4,096 rows"


class Bench:
    """Clocks that show half a second for everything, and the kernel that dense passes call.

    calls: the arguments of the kernel.  error: what it raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None
        real = dense_baseline.scaled_dot_product_attention

        class FixedClock(Clock):
            def stop(self) -> None:
                self.wall.append(0.5)

        def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            self.calls.append({"q": q, "k": k, "v": v, **options})
            if self.error:
                raise self.error
            out: Tensor = real(q, k, v, **options)
            return out

        monkeypatch.setattr(dense_baseline, "scaled_dot_product_attention", kernel)
        monkeypatch.setattr(dense_baseline, "clock_for", lambda device: FixedClock())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def prepare(name: str = "dilated", n: int = 2048, **fields: Any) -> tuple[Attention, Pass]:
    options = fields.pop("options", {})
    workload = Workload(seq_len=n, **{"heads": 1, "head_dim": 8, **fields})
    attention = IMPLEMENTATIONS.get(name)(workload, Group.alone(), **options)
    attention.prepare("cpu")
    return attention, draw_inputs(attention, "cpu", 0, torch.zeros(1, dtype=torch.long))


def run_baseline(baseline: DenseBaseline, sparse_s: float, times: int = 3) -> MeasurementLog:
    for _ in range(times):
        baseline.run(MagicMock(), sparse_s)
    log = MeasurementLog()
    baseline.add_to(log)
    return log


# the kernel


@pytest.mark.parametrize(
    ("name", "options", "requested", "chosen"),
    [
        ("block-sparse", {"sparsity": 0.5}, "same", "native"),
        ("block-sparse", {"sparsity": 0.5, "kernel": "torch"}, "same", "aten-flash-cpu"),
        # FlexAttention computes a pattern on a CPU, but exact attention on CUDA only
        ("block-sparse", {"sparsity": 0.5, "kernel": "flex"}, "same", "native"),
        ("dilated", {}, "same", "native"),
        ("dilated", {}, "sdpa", None),
    ],
)
def test_the_baseline_has_the_kernel_of_the_sparse_attention_unless_asked_otherwise(
    name: str, options: dict[str, Any], requested: str, chosen: str | None
) -> None:
    if reason := native.unavailable_reason():
        pytest.skip(reason)
    attention, _ = prepare(name, 512, head_dim=16, options=options)
    kernel = choose_dense_kernel(attention, requested)
    assert (kernel and kernel.name) == chosen


# a complete pass or a part


@pytest.mark.parametrize(
    ("causal", "shape", "share"),
    [(False, (1024, 4096), 1 / 4), (True, (2897, 2897), 2897 * 2898 / (4096 * 4097))],
)
def test_a_part_is_scaled_by_the_visible_pairs(
    bench: Bench, causal: bool, shape: tuple[int, int], share: float
) -> None:
    """A causal part is causal: the rate of a kernel depends on its mask."""
    log = run_baseline(DenseBaseline(*prepare(n=4096, causal=causal), "cpu", 1, 0.0), sparse_s=1e-9)
    assert samples_of(log.measurements, "dense_time") == pytest.approx([0.5 / share] * 3)
    assert log.facts["dense"] == f"computed from {shape[0]:,} of 4,096 rows"
    # the calibration, a warm-up and three passes
    assert [c["is_causal"] for c in bench.calls] == [causal] * 6
    assert {(c["q"].shape[2], c["k"].shape[2], c["v"].shape[2]) for c in bench.calls} == {
        (*shape, shape[1])
    }


@pytest.mark.parametrize("kernel", [None, "native", "aten-flash-cpu"])
def test_the_dense_pass_of_a_mask_has_the_mask(kernel: str | None) -> None:
    """Also a part of its first tokens, as if these were all."""
    w = Workload(seq_len=2048, heads=2, head_dim=16, mask="documents:300")
    attention = build_attention("block-sparse", {"sparsity": 0.5}, w)
    q, k, v = make_inputs(w)
    exact = kernel and select(kernel, attention.kernel_use)[0]
    baseline = DenseBaseline(attention, Pass((q, k, v), None), "cpu", 0, 1.0, kernel=exact or None)
    for rows in (2048, 1100):
        part = w.model_copy(update={"seq_len": rows})
        own = [t[:, :, :rows] for t in (q, k, v)]
        expected = build_attention("dense", {}, part)(*own)
        assert torch.allclose(baseline._attend(*own), expected, atol=1e-5)
        pairs = parse_mask("documents:300").visible_pairs(rows)
        assert dense_flops(attention, rows, rows) == 4 * pairs * 16 * 2


@pytest.mark.parametrize(
    ("causal", "sparse_s", "cap", "source"),
    [
        (False, 0.51, 0.0, "measured"),
        (False, 0.49, 0.0, FROM_A_PART),
        (True, 0.26, 0.0, "measured"),
        (True, 0.24, 0.0, "computed from 2,897 of 4,096 rows"),
        (False, 1e-9, 1e9, "measured"),
    ],
)
def test_a_complete_pass_may_take_four_sparse_passes_or_the_cap(
    bench: Bench, causal: bool, sparse_s: float, cap: float, source: str
) -> None:
    """The calibration takes 0.5 s for a quarter of the pairs, or for half of them if causal."""
    baseline = DenseBaseline(*prepare(n=4096, causal=causal), "cpu", 0, cap)
    assert run_baseline(baseline, sparse_s).facts["dense"] == source


# failures


def test_a_kernel_that_can_not_compute_it_is_a_fact_and_a_failing_gpu_an_error(
    bench: Bench,
) -> None:
    """Else the next sparse pass would be blamed."""
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried\nmuch"),
        torch.AcceleratorError("CUDA error: out of memory"),
        KernelLimitError("flash: the backward of one head has too many elements"),
    ):
        bench.error = error
        log = run_baseline(DenseBaseline(*prepare(), "cpu", 0, 1.0), 0.5)
        assert log.facts["dense"] == f"not run: {str(error).splitlines()[0]}"
    bench.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        run_baseline(DenseBaseline(*prepare(), "cpu", 0, 1.0), 0.5)


# whole trials


@pytest.mark.parametrize(("name", "mode"), [("block-sparse", "forward"), ("dilated", "train")])
def test_a_sparse_trial_has_a_dense_sample_a_repeat(
    launcher: LocalLauncher, name: str, mode: str
) -> None:
    shape = {"causal": True, "mode": mode, "kv_heads": 1, "dtype": "bfloat16"}
    outcome = passed(run(launcher, name, repeats=4, **shape))
    assert 2 <= len(outcome.samples("time")) <= 4
    assert len(outcome.samples("dense_time")) == len(outcome.samples("time"))
    assert min(outcome.samples("dense_time")) > 0
    assert outcome.facts["dense"] == "measured"
    products = 7 if mode == "train" else 2
    assert outcome.samples("dense_flops") == (2 * products * (2048 * 2049 // 2) * 64 * 2,)


def test_searches_exact_attention_several_ranks_and_a_cap_for_sdpa_have_no_baseline(
    launcher: LocalLauncher,
) -> None:
    searched = run(launcher, "dilated")
    assert (searched.samples("dense_time"), searched.facts.get("dense")) == ((), None)
    exactly = run(launcher, "sdpa", repeats=4)
    assert (exactly.samples("dense_time"), exactly.samples("dense_flops")) == ((), ())
    several = run(launcher, "dilated", world_size=2, repeats=4)
    assert (several.status, several.samples("dense_time")) == ("ok", ())
    assert several.facts["dense"] == NOT_RUN_ON_RANKS
    assert several.largest("dense_flops") == 2 * 2 * 2048**2 * 64 * 2
    capped = run(launcher, "dilated", dense_kernel="sdpa", repeats=4, soft_cap=50.0)
    assert (capped.status, capped.samples("dense_time")) == ("ok", ())
    assert "sdpa computes no soft_cap" in str(capped.facts["dense"])


@exact
def test_the_baseline_is_not_in_the_peak(launcher: LocalLauncher) -> None:
    def peak(repeats: int) -> float:
        fields = {"repeats": repeats, "mode": "train"}
        outcome = run(launcher, "block-sparse", 2048, {"sparsity": 0.95}, **fields)
        return outcome.largest("peak") or 0

    assert peak(2) == pytest.approx(peak(0), rel=0.01, abs=2**18)


@exact
@pytest.mark.parametrize(
    ("causal", "mode", "kv_heads"), [(True, "forward", 1), (False, "train", 2)]
)
def test_the_peak_of_standard_attention_is_that_of_the_formula(
    launcher: LocalLauncher, causal: bool, mode: str, kv_heads: int
) -> None:
    of = complete(launcher, "dense", causal=causal, mode=mode, kv_heads=kv_heads)
    expected = standard_bytes(of.workload)
    assert run_trial(launcher, of).largest("peak") == pytest.approx(expected, rel=0.01)
