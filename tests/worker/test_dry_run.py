"""Dry runs without data, against measurements."""

from dataclasses import replace
from typing import Any

import pytest

from longseq_bench import meta_mode
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.model import DryRunEstimate, OptionValue, Trial
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker import dry_run
from tests import make
from tests.trials import MIB, complete, exact, passed, run_trial
from tests.worker.test_limits import in_child


@exact
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "tolerance", "mode"),
    [
        ("sdpa", 1, 0.05, "train"), ("ring", 2, 0.03, "train"), ("ulysses", 2, 0.03, "forward"),
        ("block-sparse", 2, 0.03, "train"), ("hilbert", 1, 0.03, "train"),
    ],
)  # fmt: skip
def test_the_peak_of_a_dry_run_is_the_measured_one(
    launcher: LocalLauncher, name: str, ranks: int, tolerance: float, mode: str
) -> None:
    # more heads instead of more tokens: large tensors for little work
    shape: dict[str, Any] = {"heads": 16 * ranks, "world_size": ranks, "mode": mode}
    one = complete(launcher, name, 1024, sink=name == "ring", **shape)
    (estimate,) = launcher.dry_run([one])
    measured = run_trial(launcher, one).largest("peak")
    assert estimate.unsupported is None
    assert estimate.peak_bytes == pytest.approx(measured, rel=tolerance)


def test_work_and_bytes_are_those_of_one_rank(launcher: LocalLauncher) -> None:
    one, four = [complete(launcher, "ring", 4096, heads=8, world_size=n) for n in (1, 4)]
    alone, shared = launcher.dry_run([one, four])
    assert shared.flops == pytest.approx(alone.flops / 4)
    assert (alone.bytes_sent, alone.transfers) == (0, 0)
    # the keys and values of three others, in float32
    assert shared.bytes_sent == 3 * 1024 * 2 * 8 * 64 * 4
    assert shared.transfers > 3
    assert shared.peak_bytes < 0.4 * alone.peak_bytes


@pytest.mark.parametrize(
    ("name", "options", "peers"),
    [
        ("ring", {}, (1,)),
        ("ulysses", {}, (3,)),
        # the communicator of all ranks exists too; the others have two ranks each
        ("usp", {"ulysses": 2}, (0, 1, 1)),
    ],
)
def test_the_peers_of_each_communicator_are_counted(
    launcher: LocalLauncher, name: str, options: dict[str, OptionValue], peers: tuple[int, ...]
) -> None:
    one = complete(launcher, name, 4096, options, heads=8, world_size=4)
    alone = complete(launcher, "ring", 4096, heads=8)
    assert [e.peers for e in launcher.dry_run([one, alone])] == [peers, ()]


@pytest.mark.parametrize(
    ("name", "options", "kernel"),
    [
        ("ring", {}, "cudnn"),
        ("ring", {"kernel": "flash"}, "flash"),
        ("sdpa", {"backend": "efficient"}, "efficient"),
        ("block-sparse", {"sparsity": 0.9}, "sparse triton"),
        ("block-sparse", {"window": 1024}, "sparse triton"),
        ("dense", {}, ""),
    ],
)
def test_a_dry_run_names_the_kernel(
    launcher: LocalLauncher, name: str, options: dict[str, OptionValue], kernel: str
) -> None:
    one = complete(launcher, name, 4096, options, heads=8, dtype="bfloat16").replace(device="cuda")
    (estimate,) = launcher.dry_run([one])
    assert estimate.kernel == kernel


def test_a_dry_run_beyond_the_limit_of_a_kernel_is_too_long(launcher: LocalLauncher) -> None:
    """An unsupported shape is not: no other length would help."""
    fields: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "heads": 8}
    options = {"kernel": "flash-attn-4"}
    beyond = make.trial("fused", 2**22, options, head_dim=64, **fields)
    refused = make.trial("fused", 2**12, options, head_dim=30, **fields)
    estimates = launcher.dry_run([beyond, beyond.at(2**22 - 1), refused])
    assert [bool(one.unsupported) for one in estimates] == [True, False, True]
    assert [one.too_long for one in estimates] == [True, False, False]


def extrapolated_and_real(trial: Trial) -> tuple[DryRunEstimate, DryRunEstimate]:
    """Return the estimate of a large layout from smaller ones, and that of the layout itself."""
    (extrapolated,) = dry_run.dry_run([trial])
    assert not meta_mode.is_meta()
    with meta_mode.standing_for(trial.device):
        return extrapolated, dry_run._predict(trial, 1)


def test_a_large_layout_is_extrapolated_from_two_smaller_ones(launcher: LocalLauncher) -> None:
    options: dict[str, OptionValue] = {"pattern": "hierarchical"}
    one = complete(
        launcher, "block-sparse", 1_300_007, options, heads=8, world_size=8, causal=True,
        mode="train", dtype="bfloat16",
    ).replace(device="cuda")  # fmt: skip
    found, real = in_child(launcher, extrapolated_and_real, one)
    assert (len(found.smaller_layouts), real.smaller_layouts) == (2, ())
    for field in ("peak_bytes", "peak_at_most_index", "flops", "bytes_sent", "transfers"):
        assert getattr(found, field) == pytest.approx(getattr(real, field), rel=0.01), field
    assert found.most_index_bytes == pytest.approx(real.most_index_bytes, rel=0.05)


# ---- memory alone ------------------------------------------------------------------------------


# of 64 chunks of keys 24 are computed; of 16 gathered ones 6
@exact
@pytest.mark.parametrize(("name", "chunk", "ranks"), [("ring", 64, 1), ("collective", 256, 2)])
def test_a_fit_only_pass_has_the_peak_of_a_whole_one(
    launcher: LocalLauncher, name: str, chunk: int, ranks: int
) -> None:
    whole = complete(
        launcher, name, 4096, {"chunk": chunk}, heads=8, world_size=ranks,
        memory_budget=400 * MIB,
    )  # fmt: skip
    measured = run_trial(launcher, whole).largest("peak")
    outcome = passed(run_trial(launcher, whole.replace(fit_only=True, time_budget=60)))
    assert outcome.largest("peak") == pytest.approx(measured, rel=0.03)
    assert outcome.facts["fit_only"] == "loops capped; nothing was checked"
    assert [outcome.samples(name) for name in ("pass_time", "time", "max_error")] == [()] * 3
    assert whole.key != whole.replace(fit_only=True).key


@exact
def test_a_fit_only_pass_is_limited_by_the_budget(launcher: LocalLauncher) -> None:
    one = complete(launcher, "ring", 8192, heads=8, fit_only=True)
    (estimate,) = launcher.dry_run([one])
    for share, status in ((0.95, "oom"), (1.1, "ok")):
        budget = int(share * estimate.peak_bytes)
        outcome = run_trial(launcher, one.replace(memory_budget=budget))
        assert outcome.status == status


@pytest.mark.parametrize(
    ("name", "heads", "mode", "of_floor"),
    [
        ("ring", 8, "train", 1.08), ("ring", 8, "forward", 1.01), ("ring", 1, "train", 1.38),
        ("dilated", 8, "train", 1.04), ("hilbert", 8, "train", 1.08),
    ],
)  # fmt: skip
def test_the_peak_on_a_gpu_is_near_the_floor(
    launcher: LocalLauncher, name: str, heads: int, mode: str, of_floor: float
) -> None:
    """Some heads are a call of the kernel, whose gradients need no sums of 32 bits."""
    one = complete(launcher, name, 2**20, heads=heads, mode=mode, dtype="bfloat16")
    whole, short = in_child(launcher, peaks_without_and_with_limits, one.replace(device="cuda"))
    assert short == pytest.approx(whole, rel=1e-3)
    assert whole < of_floor * floor_bytes(one.workload)


def peaks_without_and_with_limits(trial: Trial) -> list[int]:
    """Return the peaks of a dry run with every iteration of each loop, and with the first ones."""
    found = []
    for loops_limited in (False, True):
        with meta_mode.standing_for(trial.device, (9, 0)):
            meta_mode._mode = replace(meta_mode._mode, loops_limited=loops_limited)
            found.append(dry_run._predict(trial, 1).peak_bytes)
    return found
