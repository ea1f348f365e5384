"""What is foreseen without data, against what a process of its own then measures."""

from typing import Any

import pytest
import torch

from longseq_bench.core.model import Trial
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.meters.base import MeterContext
from longseq_bench.meters.storage_peak import StoragePeak
from longseq_bench.worker.kernel_workspace import KernelWorkspace
from tests.trials import MIB, complete, exact, run_trial


def asked(launcher: LocalLauncher, name: str, tokens: int, ranks: int = 1, **fields: Any) -> Trial:
    return complete(launcher, name, tokens, heads=8, world_size=ranks, **fields)


@exact
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [
        ("dense", 1, 0.03), ("sdpa", 1, 0.05), ("ring", 1, 0.03), ("ring", 2, 0.03),
        ("collective", 2, 0.03), ("ulysses", 2, 0.03), ("block-sparse", 1, 0.03),
        ("block-sparse", 2, 0.03), ("hilbert", 1, 0.03), ("dilated", 2, 0.03),
    ],
)  # fmt: skip
def test_the_peak_is_foreseen(
    launcher: LocalLauncher, name: str, ranks: int, most: float, mode: str
) -> None:
    one = asked(launcher, name, 2048 if name == "dense" else 4096, ranks, mode=mode)
    (seen,) = launcher.dry_run([one])
    measured = run_trial(launcher, one).largest("peak")
    assert seen.unsupported is None
    assert seen.peak_bytes == pytest.approx(measured, rel=most)


def test_work_and_bytes_are_a_ranks_own(launcher: LocalLauncher) -> None:
    alone, shared = launcher.dry_run(
        [asked(launcher, "ring", 4096), asked(launcher, "ring", 4096, 4)]
    )
    assert shared.flops == pytest.approx(alone.flops / 4)
    assert (alone.bytes_sent, alone.transfers) == (0, 0)
    # the keys and values of three others, in float32
    assert shared.bytes_sent == 3 * 1024 * 2 * 8 * 64 * 4
    assert shared.transfers > 3
    assert shared.peak_bytes < 0.4 * alone.peak_bytes


def test_a_thousand_ranks_are_walked_in_a_moment(launcher: LocalLauncher) -> None:
    one = asked(launcher, "ring", 2**20 * 1024, 1024, mode="train", dtype="bfloat16")
    (seen,) = launcher.dry_run([one.replace(device="cuda")])
    floor = 2**20 * (2 * 4 * 8 * 64 * 2 + 4 * 8)
    assert seen.unsupported is None
    assert floor < seen.peak_bytes < 2 * floor
    assert seen.bytes_sent > 1000 * 2**20 * 2 * 8 * 64 * 2


def test_what_cannot_be_foreseen_says_why(launcher: LocalLauncher) -> None:
    seen = launcher.dry_run(
        [
            asked(launcher, "sdpa", 1024, 2),
            asked(launcher, "ulysses", 1024, 3),
            asked(launcher, "sdpa", 1024),
        ]
    )
    assert "runs on one rank" in (seen[0].unsupported or "")
    assert "can't be split over 3 ranks" in (seen[1].unsupported or "")
    assert seen[2].unsupported is None


def test_nothing_is_held_that_is_let_go() -> None:
    meter = StoragePeak()
    with meter:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1
        del a
        c = b * 2
        del b, c
        d = torch.zeros(500)
    assert (meter.peak, meter.current) == (8000, 2000)
    del d
    assert meter.current == 0


def test_a_backward_is_seen_too() -> None:
    meter, a = StoragePeak(), torch.zeros(1000, requires_grad=True)
    with meter:
        total = (a * 2).sum()
        before = meter.current
        total.backward()
    assert before < 4000 <= meter.current


def test_what_a_kernel_holds_inside_counts_while_it_runs() -> None:
    meter = StoragePeak(
        MeterContext(workspace=lambda op, args, kwargs: 5000 if "mul" in str(op) else 0)
    )
    with meter:
        a = torch.zeros(1000)
        b = a * 2
        del b
        c = torch.zeros(1500)
    assert (meter.peak, meter.peak_workspace) == (13000, 5000)
    assert meter.current == 10000
    del a, c


def test_the_table_is_by_threads_rows_and_elements_and_says_what_it_lacks() -> None:
    row = {
        "thread": 100,
        "thread_short": 10,
        "thread_dim": 1,
        "query": 2,
        "kv": 3,
        "key": 5,
        "row": 7,
    }
    table = {"_scaled_dot_product_flash_attention_for_cpu": {"float32": row}}
    q, k = torch.empty(2, 4, 1000, 8, device="meta"), torch.empty(2, 2, 50, 8, device="meta")
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    workspace = KernelWorkspace(3, table)
    expected = 3 * (100 + 8) + 2 * 4 * 8 * (2 * 1000 + 5 * 50) + 3 * k.numel() + 7 * 2 * 4 * 1000
    assert workspace(op, (q, k, k), {}) == expected
    assert workspace(op, (q[:, :, :700], k, k), {}) == (
        3 * (10 + 8) + 2 * 4 * 8 * (2 * 700 + 5 * 50) + 3 * k.numel() + 7 * 2 * 4 * 700
    )
    assert (workspace.unknown, workspace(torch.ops.aten.mul.Tensor, (q, q), {})) == (set(), 0)
    assert workspace(op, (q.bfloat16(), k.bfloat16(), k.bfloat16()), {}) == 0
    assert workspace.unknown == {"_scaled_dot_product_flash_attention_for_cpu bfloat16"}


# ---- memory alone ------------------------------------------------------------------------------


@exact
def test_a_capped_pass_is_as_large_as_a_whole_one_and_says_what_it_is(
    launcher: LocalLauncher,
) -> None:
    whole = asked(launcher, "ring", 8192, memory_budget=400 * MIB)
    measured = run_trial(launcher, whole).largest("peak")
    outcome = run_trial(launcher, whole.replace(fit_only=True))
    assert outcome.status == "ok"
    assert outcome.largest("peak") == pytest.approx(measured, rel=0.03)
    assert outcome.facts["fit_only"] == "loops capped; nothing was checked"
    assert [outcome.samples(name) for name in ("pass_time", "time", "max_error")] == [()] * 3
    assert whole.key != whole.replace(fit_only=True).key


@exact
def test_a_capped_pass_meets_the_budget_as_a_whole_one_does(launcher: LocalLauncher) -> None:
    one = asked(launcher, "ring", 8192, fit_only=True)
    (seen,) = launcher.dry_run([one])
    for share, status in ((0.95, "oom"), (1.1, "ok")):
        budget = int(share * seen.peak_bytes)
        outcome = run_trial(launcher, one.replace(memory_budget=budget))
        assert outcome.status == status
