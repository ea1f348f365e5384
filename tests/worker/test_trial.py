"""Whole trials in their own processes: statuses, peaks, budgets and facts."""

from typing import Any

import pytest

from longseq_bench.core.cost import floor_bytes
from longseq_bench.launchers.local import LocalLauncher
from tests.make import trial
from tests.trials import MIB, exact, run


@pytest.mark.parametrize(
    ("name", "tokens", "fields"),
    [
        ("bad-over-heads", 300, {}), ("bad-block-softmax", 3000, {}),
        ("bad-leak", 3000, {"causal": True}), ("bad-nan", 3000, {}),
        ("bad-block-diagonal", 3000, {}), ("bad-gradient", 300, {"mode": "train"}),
        ("bad-far-key", 3000, {}),
    ],
)  # fmt: skip
def test_a_wrong_output_is_a_result_with_its_error(
    launcher: LocalLauncher, name: str, tokens: int, fields: dict[str, object]
) -> None:
    """Faults 1 to 4: of 300 tokens every row is compared, of 3,000 some."""
    outcome = run(launcher, name, tokens, **fields)
    assert (outcome.status, outcome.phase, outcome.fits) == ("wrong", "check", None)
    if name == "bad-nan":
        assert "not finite" in (outcome.reason or "")
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
        ("stale keys", {"repeats": 3}, "out of a timed pass is"),
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
    if "timed" in reason:
        assert "off that of the checked pass (allowed 2e-05)" in (outcome.reason or "")


@pytest.mark.parametrize(
    ("v_head_dim", "mode", "dtype"), [(24, "train", "bfloat16"), (48, "forward", "float32")]
)
def test_a_v_head_dim_of_its_own_passes_every_check(
    launcher: LocalLauncher, v_head_dim: int, mode: str, dtype: str
) -> None:
    """Equal and matching scores, constant values, sampled rows and sums of gradients."""
    tokens, shape = 700, {"head_dim": 32, "v_head_dim": v_head_dim, "mode": mode, "dtype": dtype}
    fields = {**shape, "repeats": 2}
    outcome = run(launcher, "dense", tokens, causal=True, **fields)
    assert outcome.status == "ok", outcome.reason
    assert outcome.facts["every_row_checked"]
    assert (outcome.largest("checked_rows") or tokens) < tokens
    pairs, elements = tokens * (tokens + 1) / 2, 32 + v_head_dim
    if mode == "train":
        elements += 3 * 32 + 2 * v_head_dim
    assert outcome.largest("flops") == pytest.approx(2 * pairs * elements * 2)
    wide = run(launcher, "ring", tokens, **fields)
    if v_head_dim > 32:
        assert wide.status == "unsupported"
        assert "it needs a v_head_dim of at most 32" in (wide.reason or "")
        return
    assert wide.status == "ok", wide.reason
    assert wide.facts["padded_v"] == "from 24 to 32 elements per head, in the kernel"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("sdpa", "bfloat16"), ("ring", "float16"), ("hilbert", "float32")],
)
def test_a_correct_implementation_passes_in_training(
    launcher: LocalLauncher, name: str, dtype: str
) -> None:
    outcome = run(launcher, name, 3000, dtype=dtype, causal=True, mode="train", kv_heads=1)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert set(outcome.facts["errors"]) == {"out", "dq", "dk", "dv"}
    assert 0 < (outcome.largest("max_error") or 0) < 0.1


def test_shares_of_the_pattern_are_measured(launcher: LocalLauncher) -> None:
    """Faults 7 and 9: both densities, and the rows left zero, are in the record."""
    sparse = run(launcher, "block-sparse", 8192)
    assert sparse.largest("density_asked") == pytest.approx(0.1)
    assert sparse.largest("density_achieved") == pytest.approx(0.1, abs=1 / 64)
    assert sparse.largest("zero_rows") == 0
    options = {"segments": (1024,), "dilation": (2,), "mix": "softmax"}
    half = run(launcher, "dilated", 2048, options)
    assert half.status == "ok"
    assert half.largest("uncovered") == half.largest("zero_rows") == 0.5


@exact
def test_the_peak_includes_temporary_memory(launcher: LocalLauncher) -> None:
    """Fault 10: 32 MiB are allocated and freed again; a thirtieth is left at the end."""
    without = run(launcher, "sdpa", 4096, heads=4).largest("peak") or 0
    spends = run(launcher, "bad-spends", 4096, heads=4).largest("peak") or 0
    floor = floor_bytes(trial("sdpa", 4096, heads=4).workload)
    assert without == pytest.approx(floor, rel=0.15)
    # q, k and v exist when the 32 MiB are allocated; the output does not yet
    assert spends == pytest.approx(32 * MIB + 0.75 * floor, rel=0.02)


@exact
def test_a_repeated_trial_has_the_same_peak(launcher: LocalLauncher) -> None:
    """Fault 10: a larger trial before it has no effect."""
    first = run(launcher, "sdpa", 4096).largest("peak") or 0
    assert (run(launcher, "sdpa", 8192).largest("peak") or 0) > 1.8 * first
    assert run(launcher, "sdpa", 4096).largest("peak") == pytest.approx(
        first, rel=0.02, abs=MIB / 2
    )


@exact
def test_the_peak_is_above_the_floor_and_below_its_budget(launcher: LocalLauncher) -> None:
    budget = 36 * MIB
    outcome = run(launcher, "ring", 8192, heads=4, memory_budget=budget)
    floor = outcome.largest("floor") or 0
    assert outcome.status == "ok"
    assert floor == 8192 * 4 * 4 * 64 * 4
    assert 0.97 * floor <= (outcome.largest("peak") or 0) <= budget


@exact
def test_a_need_just_over_the_budget_is_out_of_memory(launcher: LocalLauncher) -> None:
    """A temporary need counts: 32 MiB and the inputs."""
    inputs = 0.75 * floor_bytes(trial("sdpa", 4096, heads=4).workload)
    need = int(32 * MIB + inputs)
    over = run(launcher, "bad-spends", 4096, heads=4, memory_budget=need - MIB)
    assert (over.status, over.phase, over.fits) == ("oom", "forward", False)
    fits = run(launcher, "bad-spends", 4096, heads=4, memory_budget=need + MIB)
    assert fits.status == "ok"
    assert fits.largest("peak") == pytest.approx(need, abs=MIB)


def test_a_pass_over_its_time_budget_is_a_timeout_with_its_time(launcher: LocalLauncher) -> None:
    outcome = run(launcher, "sdpa", 4096, time_budget=1e-5)
    assert (outcome.status, outcome.fits) == ("timeout", None)
    assert "1e-05 s allowed" in (outcome.reason or "")
    assert (outcome.largest("pass_time") or 0) > 1e-5


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({"pattern": "global-local", "globals": 2048}, 1), ({"block": 2048}, 2)],
)
def test_the_warm_up_supports_the_options_of_the_trial(
    launcher: LocalLauncher, options: dict[str, object], ranks: int
) -> None:
    """The first warm-up length has fewer tokens than these options need."""
    outcome = run(launcher, "block-sparse", 6000, options, world_size=ranks)
    assert (outcome.status, outcome.reason) == ("ok", None)


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
