"""Dilated attention on a GPU: it computes what a CPU does, and starts as little as was counted."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from benchmarks import launches
from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.parametrize("name", ["dilated", "hilbert"]),
    pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"]),
]


def prepare(name: str, w: Workload, device: str, **options: object) -> Attention:
    attention = IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    attention.prepare(device)
    return attention


@pytest.mark.parametrize("fields", [{"kv_heads": 8}, {"kv_heads": 2, "batch": 2}])
def test_a_gpu_computes_what_a_cpu_does(name: str, causal: bool, fields: dict[str, Any]) -> None:
    fields = {"batch": 1, "causal": causal, "mode": "train", **fields}
    shapes = [(fields["batch"], heads, 1333, 64) for heads in (8, *[fields["kv_heads"]] * 2)]
    rounded, found = [torch.randn(shape).bfloat16() for shape in shapes], list[list[Tensor]]()
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        w = Workload(seq_len=1333, heads=8, head_dim=64, dtype=dtype, **fields)
        attention = prepare(name, w, device, segments=(96, 500), dilation=(1, 4))
        qkv = [t.to(device, getattr(torch, dtype)).requires_grad_() for t in rounded]
        out = attention(*qkv)
        found.append([out, *torch.autograd.grad(out, qkv, torch.ones_like(out))])
    for expected, got in zip(*found, strict=True):
        assert (got.float().cpu() - expected).norm() < 0.02 * expected.norm()


def test_a_pass_launches_as_little_as_was_counted(name: str, causal: bool) -> None:
    case = launches.Case(name, 24, 0, causal=causal, options=launches.PAIRS)
    attention = prepare(name, case.workload("forward"), "cuda", **case.options)
    qkv = torch.randn(3, 1, 8, case.tokens, 64, device="cuda", dtype=torch.bfloat16)
    attention(*qkv)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attention(*qkv)
        torch.cuda.synchronize()
    started = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    assert 0 < sum(not name.startswith(("Memcpy", "Memset")) for name in started) <= case.forward
    assert not any("HtoD" in name or "DtoH" in name for name in started)
