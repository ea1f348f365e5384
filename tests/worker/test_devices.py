"""The description of CUDA in the catalogue, with a torch and a driver that are described here."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from longseq_bench.core.catalogue import DeviceInfo
from longseq_bench.worker import main
from tests.fake_nvml import FakeGpu, install


def describe(monkeypatch: pytest.MonkeyPatch, **cuda: Any) -> Any:
    """Return the description; cuda: what functions of torch.cuda return."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers = {
        "is_available": True, "device_count": 1, "get_device_name": "H100",
        "mem_get_info": (30, 80), "is_bf16_supported": True,
    } | cuda  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    return main._cuda()


def test_a_gpu_that_torch_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe(monkeypatch)
    assert (found.unavailable, found.name, found.count) == (None, "H100", 1)
    assert (found.free_bytes, found.total_bytes) == (30, 80)
    assert found.dtypes == ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (12020, "driver 535.54 is too old for this torch (CUDA 13.0)"),
        (13000, "torch finds no CUDA device, but driver 535.54 is there"),
    ],
)
def test_a_driver_is_named_if_torch_finds_no_gpu(
    cuda: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeGpu("H100", "GPU-a"), driver="535.54", cuda=cuda)
    assert describe(monkeypatch, is_available=False).unavailable == reason


def test_a_cpu_build_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main._cuda().unavailable == "this torch is a CPU build"


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_a_kernel_without_its_device_is_unavailable() -> None:
    """Triton's own reason is about head_dim and dtype only."""
    devices = {"cuda": DeviceInfo(unavailable="no driver"), "cpu": DeviceInfo()}
    assert main._kernel("triton", devices).unavailable == "no driver"
    assert main._kernel("aten-flash-cpu", devices).unavailable is None
