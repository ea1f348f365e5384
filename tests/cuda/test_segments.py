"""Dilated attention on a GPU: it computes what a CPU does, and starts as little as was counted."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from benchmarks import launches
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

pytestmark = pytest.mark.cuda

NAMED = pytest.mark.parametrize("name", ["dilated", "hilbert"])
MASKED = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def run(name: str, w: Workload, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of the same random inputs."""
    w = w.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    options: Any = {"segments": (96, 500), "dilation": (1, 4)}
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    attention.prepare(device)
    draw = torch.Generator().manual_seed(0)
    shapes = [(w.batch, heads, w.seq_len, w.head_dim) for heads in (w.heads, *[w.kv_heads] * 2)]
    rounded = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
    qkv = [t.to(device, dtype).requires_grad_() for t in rounded]
    out = attention(*qkv)
    grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
    return [t.detach().float().cpu() for t in (out, *grads)]


@MASKED
@NAMED
@pytest.mark.parametrize(("kv_heads", "batch"), [(8, 1), (2, 2)])
def test_a_gpu_computes_what_a_cpu_does(name: str, causal: bool, kv_heads: int, batch: int) -> None:
    w = Workload(
        seq_len=1333, batch=batch, heads=8, kv_heads=kv_heads, head_dim=64, causal=causal,
        mode="train",
    )  # fmt: skip
    expected = run(name, w, "cpu", torch.float32)
    for got, other in zip(run(name, w, "cuda", torch.bfloat16), expected, strict=True):
        assert (got - other).norm() < 0.02 * other.norm()


@MASKED
@NAMED
def test_a_pass_launches_as_little_as_was_counted(name: str, causal: bool) -> None:
    case = launches.Case(name, 24, causal=causal, options=launches.PAIRS)
    w = Workload(
        seq_len=case.tokens, heads=8, kv_heads=8, head_dim=64, dtype="bfloat16", causal=causal
    )
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **case.options)
    attention.prepare("cuda")
    q, k, v = torch.randn(3, 1, 8, w.seq_len, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, k, v)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attention(q, k, v)
        torch.cuda.synchronize()
    started = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    kernels = [name for name in started if not name.startswith(("Memcpy", "Memset"))]
    assert 0 < len(kernels) <= case.goal
    assert not any("HtoD" in name or "DtoH" in name for name in started)
