"""Whole trials in their own processes: statuses, peaks, budgets and facts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.own_source import find_file
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Keep, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.launchers.local import RATES, LocalLauncher
from longseq_bench.worker.known_scores import EQUAL, MIXED
from longseq_bench.worker.passes import draw_inputs, run_pass
from tests.make import record
from tests.trials import MIB, complete, exact, passed, run, run_trial

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "kind", "tokens", "fields"),
    [
        ("faulty", "one key of the future", 3000, {"causal": True}),
        ("faulty", "one NaN", 3000, {}), ("bad-block-diagonal", None, 3000, {}),
        ("faulty", "dk is half", 300, {"mode": "train"}),
    ],
)  # fmt: skip
def test_a_wrong_output_is_a_result_with_its_error(
    launcher: LocalLauncher, name: str, kind: str | None, tokens: int, fields: dict[str, object]
) -> None:
    """Faults 3 and 4: of 300 tokens every row is compared, of 3,000 some."""
    outcome = run(launcher, name, tokens, {"kind": kind} if kind else {}, **fields)
    assert (outcome.status, outcome.phase, outcome.fits) == ("wrong", "check", None)
    if kind == "one NaN":
        where = "row 1,503 of head 0 (batch row 0) is NaN; the reference is finite"
        assert outcome.reason == f"the output is not finite: {where}"
    else:
        assert (outcome.largest("max_error") or 0) > 2e-5
        assert max(outcome.facts["errors"].values()) == outcome.largest("max_error")
        assert "off the float64 reference" in (outcome.reason or "")
    assert outcome.samples("time") == ()


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("values overwritten by zeros", {}, "a pass changed its input v"),
        ("last row of each block is zero", {},
         "20 of 2,600 output rows are zero; the pattern leaves 0.00%"),
        ("a token too many", {},
         "the output is float32 (1, 2, 1301, 64); expected float32 (1, 2, 1300, 64)"),
        ("another dtype", {},
         "the output is float64 (1, 2, 1300, 64); expected float32 (1, 2, 1300, 64)"),
        ("remembered from the first pass", {"repeats": 3}, "out of a timed pass is"),
        ("added to earlier outputs", {"repeats": 3}, "out of a timed pass is"),
        ("dk of later passes", {"repeats": 3, "mode": "train"}, "dk of a timed pass is"),
        # a second try with more memory has timed passes too: the first pass is right in both
        ("dk of later passes", {"repeats": 3, "mode": "train", "memory_budget": 256 * MIB}, ""),
    ],
)  # fmt: skip
def test_a_pass_is_wrong_before_its_numbers_are_compared_or_when_it_is_timed(
    launcher: LocalLauncher, kind: str, fields: dict[str, Any], reason: str
) -> None:
    outcome = run(launcher, "faulty", 1300, {"kind": kind}, **fields)
    assert (outcome.status, outcome.phase) == ("wrong", "check")
    assert (outcome.reason or "").startswith(reason)
    assert "ended with" not in (outcome.reason or "")  # memory has no part in it
    if "timed" in reason:
        assert "off that of the checked pass (allowed 2e-05)" in (outcome.reason or "")


@pytest.mark.parametrize(
    ("v_head_dim", "mode", "dtype"), [(24, "train", "bfloat16"), (48, "forward", "float32")]
)
def test_a_v_head_dim_of_its_own_passes_every_check(
    launcher: LocalLauncher, v_head_dim: int, mode: str, dtype: str
) -> None:
    """Two-level and matching scores, sampled rows and sums of gradients."""
    tokens, shape = 700, {"head_dim": 32, "v_head_dim": v_head_dim, "mode": mode, "dtype": dtype}
    outcome = passed(run(launcher, "dense", tokens, causal=True, repeats=2, **shape))
    assert outcome.facts["every_row_checked"]
    assert (outcome.largest("checked_rows") or tokens) < tokens
    pairs, elements = tokens * (tokens + 1) / 2, 32 + v_head_dim
    if mode == "train":
        elements += 3 * 32 + 2 * v_head_dim
    assert outcome.largest("flops") == pytest.approx(2 * pairs * elements * 2)
    if v_head_dim <= 32:
        padded = passed(run(launcher, "ring", tokens, repeats=2, **shape))
        assert padded.facts["padded_v"] == "from 24 to 32 elements per head, in the kernel"


def test_shares_of_the_pattern_are_measured(launcher: LocalLauncher) -> None:
    """Faults 7 and 9: both densities, and the rows left zero, are in the record."""
    sparse = run(launcher, "block-sparse", 8192)
    assert sparse.largest("density_asked") == pytest.approx(0.1)
    assert sparse.largest("density_achieved") == pytest.approx(0.1, abs=1 / 64)
    assert sparse.largest("zero_rows") == 0
    options = {"segments": (1024,), "dilation": (2,), "mix": "softmax"}
    half = passed(run(launcher, "dilated", 2048, options))
    assert half.largest("uncovered") == half.largest("zero_rows") == 0.5


@pytest.mark.parametrize(
    ("options", "ranks"), [({"pattern": "global-local", "globals": 2048}, 1), ({"block": 2048}, 2)]
)
def test_the_warm_up_supports_the_options_of_the_trial(
    launcher: LocalLauncher, options: dict[str, object], ranks: int
) -> None:
    """The first warm-up length has fewer tokens than these options need."""
    passed(run(launcher, "block-sparse", 6000, options, world_size=ranks))


def test_samples_of_both_clocks_are_kept(launcher: LocalLauncher) -> None:
    """Fault 17: processor time and wall time, every sample of both."""
    outcome = run(launcher, "sdpa", 512, repeats=8)
    assert 2 <= len(outcome.samples("time")) <= 8
    assert len(outcome.samples("cpu_time")) == len(outcome.samples("time"))
    assert min(outcome.samples("time")) > 0


def test_facts_name_the_backend(launcher: LocalLauncher) -> None:
    """Fault 16: the facts name the backend or kernel, so a fall-back is visible."""
    assert run(launcher, "sdpa", 512).facts["backend"] == "flash"
    kernels = {"auto": "native", "aten-flash-cpu": "aten-flash-cpu"}
    for kernel, ran in kernels.items():
        assert run(launcher, "ring", 512, {"kernel": kernel}).facts["kernel"] == ran
    assert run(launcher, "sdpa", 512, {"backend": "math"}).facts["backend"] == "math"


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("ring", {"keep": "inputs"}, "keep=inputs needs mode=train"),
        ("ring", {"batch": 16_384, "heads": 4}, "more than 65,535 heads in all"),
        ("ring", {"keep": "nothing", "world_size": 2}, "inputs are read until the end"),
        ("ring", {"keep": "nothing", "mode": "decode"}, "keep=nothing has no meaning with mode"),
        ("ring", {"allocator": "expandable"}, "allocator=expandable needs device=cuda"),
        ("ring", {"timing": "graph"}, "timing=graph needs device=cuda and one rank"),
        ("ring", {"timing": "cold", "allocator": "fresh"}, "timing=cold has no meaning with"),
        ("ring", {"allocator": "fresh", "device": "cuda"}, "allocator=fresh needs device=cpu"),
        ("collective", {"fit_only": True}, "without loops to shorten"),
    ],
)
def test_impossible_settings_are_unsupported(
    launcher: LocalLauncher, name: str, fields: dict[str, Any], reason: str
) -> None:
    outcome = run(launcher, name, 512, **fields)
    assert outcome.status == "unsupported"
    assert reason in (outcome.reason or "")


# ---- memory and time ---------------------------------------------------------------------------


@exact
def test_the_peak_includes_temporary_memory(launcher: LocalLauncher) -> None:
    """Fault 10: 32 MiB are allocated and freed again. A need just over the budget is an oom."""
    floor = 4096 * 4 * 4 * 64 * 4
    without = run(launcher, "sdpa", 4096, heads=4)
    assert without.largest("floor") == floor
    assert without.largest("peak") == pytest.approx(floor, rel=0.15)
    # q, k and v exist when the 32 MiB are allocated; the output does not yet
    need = int(32 * MIB + 0.75 * floor)
    over = run(launcher, "bad-spends", 4096, heads=4, memory_budget=need - MIB)
    assert (over.status, over.phase, over.fits) == ("oom", "forward", False)
    fits = passed(run(launcher, "bad-spends", 4096, heads=4, memory_budget=need + MIB))
    assert fits.largest("peak") == pytest.approx(need, abs=MIB)


@exact
def test_a_repeated_trial_has_the_same_peak(launcher: LocalLauncher) -> None:
    """Fault 10: a larger trial before it has no effect."""
    first = run(launcher, "sdpa", 4096).largest("peak") or 0
    assert (run(launcher, "sdpa", 8192).largest("peak") or 0) > 1.8 * first
    again = run(launcher, "sdpa", 4096).largest("peak")
    assert again == pytest.approx(first, rel=0.02, abs=MIB / 2)


def test_a_pass_over_its_time_budget_is_a_timeout_with_its_time(launcher: LocalLauncher) -> None:
    outcome = run(launcher, "sdpa", 4096, time_budget=1e-5)
    assert (outcome.status, outcome.fits) == ("timeout", None)
    assert "1e-05 s allowed" in (outcome.reason or "")
    assert (outcome.largest("pass_time") or 0) > 1e-5


@exact
def test_pages_of_mapped_files_do_not_count_for_the_peak(launcher: LocalLauncher) -> None:
    shape = {"heads": 4, "kv_heads": 1, "mode": "train", "dtype": "bfloat16"}
    of = complete(launcher, "ring", 4096, {"offload": "host"}, memory_budget=64 * MIB, **shape)
    (predicted,) = launcher.dry_run([of])
    outcome = passed(run_trial(launcher, of))
    assert outcome.facts["memory_meter"] == "tensor peak (storages)"
    assert outcome.largest("peak") == pytest.approx(predicted.peak_bytes, rel=0.03)


# ---- keep: recomputation, and passes whose outputs overwrite their inputs (in place) -----------

needs_compiler = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason="no compiler here"
)
SEGMENTS: Any = {"segments": (64, 128), "dilation": (1, 2)}
IN_PLACE: list[Any] = [
    ("ring", {"chunk": 100}),
    ("collective", {"chunk": 64}),
    pytest.param("block-sparse", {"sparsity": 0.5, "block": 32}, marks=needs_compiler),
    pytest.param("dilated", SEGMENTS, marks=needs_compiler),
    pytest.param("hilbert", SEGMENTS, marks=needs_compiler),
]
"""Implementations that can overwrite their inputs."""


def run_once(name: str, options: dict[str, Any], keep: Keep, **shape: Any) -> tuple[Tensor, ...]:
    """Return the output and the gradients of one pass."""
    w = Workload(seq_len=330, heads=4, head_dim=16, **shape)
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    one = draw_inputs(attention, "cpu", 0, torch.arange(330), keep)
    before = one.inputs[0].detach().clone()
    attention.prepare("cpu")
    run_pass(attention, one)
    assert one.out is not None
    if keep == "nothing":
        result = one.grads[0] if one.grads else one.out
        assert result.data_ptr() == one.inputs[0].data_ptr()
        assert torch.equal(one.original_inputs[0], before)
    return one.out, *(one.grads or ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(("name", "options"), IN_PLACE)
def test_results_do_not_depend_on_keep_and_overwrite_q(
    name: str, options: dict[str, Any], mode: str, dtype: str
) -> None:
    shape = {"causal": dtype == "float32", "mode": mode, "dtype": dtype, "kv_heads": 2}
    plain = run_once(name, options, "all", **shape)
    for keep in ("inputs", "nothing") if mode == "train" else ("nothing",):
        found = run_once(name, options, keep, **shape)  # type: ignore[arg-type]
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        for got, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sdpa", "block-sparse-adaptive"])
def test_other_implementations_recompute_but_refuse_to_overwrite(name: str) -> None:
    plain = run_once(name, {}, "all", mode="train")
    for got, expected in zip(run_once(name, {}, "inputs", mode="train"), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mode in ("forward", "train"):
        with pytest.raises(UnsupportedError, match="inputs are read until the end"):
            run_once(name, {}, "nothing", mode=mode)


@exact
@pytest.mark.parametrize(
    ("keep", "mode", "tensors"), [("inputs", "train", 7), ("nothing", "forward", 3)]
)
def test_the_peak_is_a_known_number_of_tensors(
    launcher: LocalLauncher, keep: str, mode: str, tensors: int
) -> None:
    """The usual number is eight in training, four in forward. The trial is checked and timed."""
    shape = {"heads": 16, "mode": mode, "repeats": 1}
    of = complete(launcher, "ring", 1024, {"chunk": 64}, keep=keep, **shape)
    outcome = passed(run_trial(launcher, of))
    whole = 1024 * 16 * 64 * 4
    peak = outcome.largest("peak") or 0
    assert tensors * whole < peak < (tensors + 0.6) * whole
    assert len(outcome.samples("time")) == 1
    assert set(outcome.facts["errors"]) == {"out", *(("dq", "dk", "dv") if mode == "train" else ())}
    (predicted,) = launcher.dry_run([of])
    # free blocks in the heap of the fork server, not the same in every run, are up to half a MiB
    assert predicted.peak_bytes == pytest.approx(peak, rel=0.03, abs=whole / 5)


@exact
def test_a_pass_that_is_timed_again_is_checked_by_its_first_results(
    launcher: LocalLauncher,
) -> None:
    """The pass is timed again after the check, because it overwrites the checked results."""
    fields = {"keep": "nothing", "mode": "train", "memory_budget": 256 * MIB}
    once = run(launcher, "ring", 3000, **fields)
    budget = 0.97 * (once.largest("pass_time") or 0)
    outcome = run(launcher, "ring", 3000, time_budget=budget, **fields)
    assert outcome.status in ("ok", "timeout"), outcome.reason
    assert (outcome.largest("max_error") or 0) < 1e-4


# ---- decoding ----------------------------------------------------------------------------------

CACHE = 2 * 2 * 3000 * 64 * 4
"""Bytes of k and v: two heads of 64 in float32."""


def test_a_step_of_decoding_has_its_share_of_bandwidth(launcher: LocalLauncher) -> None:
    of = complete(launcher, "ring", 3000, mode="decode", new_tokens=2, causal=True, repeats=3)
    outcome = passed(run_trial(launcher, of))
    assert outcome.largest("checked_rows") == 2
    assert outcome.facts["every_row_checked"] == [MIXED]
    assert outcome.largest("floor") == outcome.largest("bytes_to_read") == CACHE
    (row,) = sweep_rows([record(of, outcome)])
    assert (row.mode, row.new_tokens, row.tokens) == ("decode", 2, 3000)
    assert row.time_s
    assert row.copy_bandwidth
    assert row.tokens_per_s == pytest.approx(2 / row.time_s)
    assert row.share_of_bandwidth == pytest.approx(CACHE / row.time_s / row.copy_bandwidth)


@exact
def test_a_quantised_cache_never_exists_in_another_dtype(launcher: LocalLauncher) -> None:
    """Two ranks; the error against the cache before quantisation is a figure of its own."""
    shape = {"mode": "decode", "world_size": 2, "dtype": "bfloat16", "head_dim": 80, "heads": 4}
    of = complete(launcher, "ring", 60_001, kv_dtype="int8", kv_heads=2, repeats=1, **shape)
    outcome = passed(run_trial(launcher, of))
    assert outcome.facts["every_row_checked"] == [MIXED, EQUAL]
    floor = 2 * (60_001 * 2 * 80 + 469 * 2 * 4)
    assert outcome.largest("floor") == outcome.largest("bytes_to_read") == floor
    assert (outcome.largest("peak") or 0) < 0.5 * floor + 1.5 * MIB
    (row,) = sweep_rows([record(of, outcome)])
    assert row.kv_dtype == "int8"
    assert 0.003 < (row.quantisation_error or 0) < 0.03


def test_the_rates_of_a_device_are_measured_once_a_run(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each dtype, number of ranks and of threads; decoding adds that of copies."""
    monkeypatch.setattr(launcher, "_rates", {})
    found, rates = [], RATES[:2]  # the third one is a GPU's clock
    for fields in ({}, {"mode": "decode"}, {"mode": "decode"}, {"dtype": "bfloat16"}):
        outcome = run(launcher, "sdpa", 300, repeats=1, **fields)
        facts = [name for name in rates if name in outcome.facts]
        phases = [name for name in rates if f"check {name}" in outcome.facts["phase_s"]]
        found.append((outcome.largest("matmul_rate"), outcome.largest("copy_bandwidth")))
        assert [*facts, *phases] in ([*rates], [*rates[:1]])
        assert facts == [*rates[: (0, 1, 2, 0)[len(found) - 1]]]
    first, second, third, other = found
    assert third == second == (first[0], third[1])
    assert third[1]
    assert other[0] not in (None, first[0])


def test_a_wrong_mask_of_the_new_tokens_is_seen(launcher: LocalLauncher, tmp_path: Path) -> None:
    """torch aligns its causal mask with the first key, not with the last one."""
    path = tmp_path / "own.py"
    path.write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def f(q, k, v, causal, new_tokens):\n    return sdpa(q, k, v, is_causal=causal)\n"
    )
    name = f"{path}:f"
    shape = {"mode": "decode", "new_tokens": 3, "source": find_file(name).source}
    assert run(launcher, name, 600, **shape).status == "ok"
    causal = run(launcher, name, 600, causal=True, **shape)
    assert (causal.status, causal.phase) == ("wrong", "check")
