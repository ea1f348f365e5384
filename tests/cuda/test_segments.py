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
    of_case = name, causal, 2**17
    (case,) = (c for c in launches.CASES if (c.name, c.causal, c.tokens) == of_case)
    attention = prepare(name, case.workload("train"), "cuda", **case.options)
    shape = 3, 1, 8, case.tokens, 64
    qkv = [t.requires_grad_() for t in torch.randn(shape, device="cuda", dtype=torch.bfloat16)]
    grad_out = torch.randn_like(qkv[0])

    def run() -> None:
        torch.autograd.grad(attention(*qkv), qkv, grad_out)
        torch.cuda.synchronize()

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    started = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    count = sum(not name.startswith(("Memcpy", "Memset")) for name in started)
    assert 0 < count <= case.goals["train"]
    assert not any("HtoD" in name or "DtoH" in name for name in started)
