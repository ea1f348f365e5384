"""The description of CUDA in the catalogue, with a GPU that is described here."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from longseq_bench.core.catalogue import DeviceInfo
from longseq_bench.worker import main


def describe(monkeypatch: pytest.MonkeyPatch, error: str = "") -> DeviceInfo:
    """Return the description of a torch with one H100; error: what its kernels raise."""

    def run_kernel(number: int) -> None:
        if error:
            raise torch.AcceleratorError(error)

    answers: dict[str, Any] = {
        "init": None, "device_count": 1, "get_device_name": "H100", "mem_get_info": (30, 80),
        "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(main, "run_kernel", run_kernel)
    return main._cuda()


def test_a_gpu_that_torch_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe(monkeypatch)
    assert (found.unavailable, found.name, found.count) == (None, "H100", 1)
    assert (found.free_bytes, found.total_bytes) == (30, 80)
    assert found.dtypes == ("float32", "bfloat16", "float16")


def test_a_gpu_without_kernels_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe(monkeypatch, "CUDA error: no kernel image is available for execution on the")
    assert "this GPU's architecture has no code in this torch" in (found.unavailable or "")
    assert found.remedy == "install a build for this GPU"


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_a_kernel_without_its_device_is_unavailable() -> None:
    """The kernel's own reason is about head_dim and dtype only."""
    devices = {"cuda": DeviceInfo(unavailable="no driver"), "cpu": DeviceInfo()}
    assert main._kernel("efficient", devices).unavailable == "no driver"
    assert main._kernel("aten-flash-cpu", devices).unavailable is None
