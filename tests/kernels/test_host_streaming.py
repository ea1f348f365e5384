"""Tensors in the host's memory: the same attention, with a budget smaller than the tensors."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import host_memory
from longseq_bench.kernels.base import attend
from longseq_bench.kernels.host_memory import StreamedKernel
from longseq_bench.kernels.tiling import ALL, Piece, RowBlock, TiledKernel
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.worker.verdicts import outcome_of_exception
from tests.kernels.plain_attention import EXACT
from tests.make import trial
from tests.trials import MIB, exact, run_trial

pytestmark = pytest.mark.usefixtures("one_thread")
N, TILE = 300, 64


def tiling(causal: bool, heads: int) -> Any:
    """Return a tiling: for each row block pieces of earlier keys, and the triangle."""

    def tiles() -> Any:
        for first in range(0, heads, 2):
            own = slice(first, first + 2)
            for start in range(0, N, TILE):
                rows = slice(start, min(start + TILE, N))
                stop = start if causal else N
                firsts = range(0, stop, 100)
                pieces = [Piece(ALL, slice(k, min(k + 100, stop)), own) for k in firsts]
                pieces += [Piece(ALL, rows, own, causal=True)] * causal
                yield RowBlock(rows, own, tuple(pieces))

    return tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_equals_the_tiled_kernel(causal: bool, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, h, N, 16).to(dtype) for h in (4, kv_heads, kv_heads)]
    grad = torch.randn(2, 4, N, 16).to(dtype)
    found = []
    for kernel in (StreamedKernel(tiling(causal, 4), EXACT), TiledKernel(tiling(causal, 4), EXACT)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = attend(*leaves, kernel, True)
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for streamed, tiled in zip(*found, strict=True):
        torch.testing.assert_close(streamed, tiled, **close)


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UnsupportedError, match=r"4,000 bytes are needed in .*: No space left on device"
    ):
        host_memory.zeros((1000,), torch.float32, "cpu")
    assert list(tmp_path.iterdir()) == []


@exact
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_keys_and_values_may_exceed_the_budget_three_times(
    launcher: LocalLauncher, mode: str
) -> None:
    options = launcher.catalogue().options("ring", {"offload": "host"})
    budget = 4 * MIB if mode == "forward" else 9 * MIB
    # many heads, so that few tokens are large: the work grows with their square
    tokens = 3 * budget // (2 * 16 * 128 * 4) + 1
    shape = {"heads": 16, "head_dim": 128, "mode": mode}
    one = trial("ring", tokens, options, memory_budget=budget, repeats=0, **shape)
    outcome = run_trial(launcher, one)
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert (outcome.largest("max_error") or 1) < 2e-5
    assert (outcome.largest("peak") or 0) <= budget
    on_device = one.replace(options={**options, "offload": "none"})
    assert run_trial(launcher, on_device).status == "oom"
    (estimate,) = launcher.dry_run([one])
    assert estimate.peak_bytes < budget


# ---- pinned memory -------------------------------------------------------------------------------


def pin(
    monkeypatch: pytest.MonkeyPatch, available: int = 2**40, error: Exception | None = None
) -> None:
    """Replace pinned memory by ordinary memory, or by an error of the driver."""
    real = torch.zeros

    def zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and error:
            raise error
        return real(*shape, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)


def test_pinned_memory_is_counted_as_torch_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds up to a power of two, almost twice as much as is asked for."""
    sizes = {0: 0, 1: 1, 4: 4, 5: 8, 2**20: 2**20, 2**20 + 1: 2**21, 3 * 2**33: 2**35}
    assert {size: host_memory.pinned_bytes(size) for size in sizes} == sizes
    pin(monkeypatch)
    before = host_memory.usage.current
    host_memory.usage.restart()
    tensor = host_memory.zeros((3, 5, 100), torch.float32, "cuda")
    view = tensor[0]
    assert host_memory.usage.current == before + 8192
    del tensor
    assert host_memory.usage.current == before + 8192  # the view holds it
    del view
    assert (host_memory.usage.current, host_memory.usage.peak) == (before, before + 8192)
    host_memory.usage.restart()
    assert host_memory.usage.peak == before


def test_memory_that_can_not_be_pinned_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the host has is not tried: here not what fits, but what torch would take."""
    pin(monkeypatch, error=torch.AcceleratorError("CUDA error: invalid argument\nSearch for"))
    with pytest.raises(MemoryError) as caught:
        host_memory.zeros((3, 2**19), torch.float32, "cuda")
    found = outcome_of_exception(caught.value, "inputs")
    assert (found.status, found.reason) == (
        "oom",
        "6 MiB of pinned host memory take 8 MiB, and the driver can't pin them "
        "(CUDA error: invalid argument)",
    )
    pin(monkeypatch, available=7 * MIB, error=AssertionError("it was tried"))
    with pytest.raises(MemoryError, match=r"6 MiB of .* take 8 MiB, and 7 MiB are available"):
        host_memory.zeros((3, 2**19), torch.float32, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("size", [3 * MIB, 4 * MIB, 5 * MIB])
def test_torch_pins_as_much_as_is_counted(size: int) -> None:
    torch.cuda.init()  # before it there are no figures
    torch._C._host_emptyCache()  # else a freed block of another test is used again
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    tensor = host_memory.zeros((size // 4,), torch.float32, "cuda")
    assert tensor.is_pinned()
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert taken == host_memory.pinned_bytes(size)
