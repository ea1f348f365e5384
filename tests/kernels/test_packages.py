"""Optional packages of kernels: how one is recognised, and the error if it does not fit."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels.exact import _cuda, _package_kernel, _packages, flash_attn_2
from longseq_bench.kernels.exact._flash_buffers import allocate_flash_3_and_4
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.kernels.exact.base import KERNELS, Use, select

PACKAGE = Package(
    "some-kernels", "some_kernels.interface", "pip install some-kernels", {"run": "q causal"}
)

INSTALL = {
    "flash-attn-2": "pip install flash-attn --no-build-isolation",
    "flash-attn-3": "pip install --no-build-isolation "
    '"git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
    "flash-attn-4": "pip install flash-attn-4",
}


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let only these packages be installed."""

    def version(name: str) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(_packages, "version", version)


@pytest.mark.parametrize("name", INSTALL)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch)
    kernel = KERNELS.get(name)
    assert kernel.optional
    use = Use("cuda", torch.bfloat16, 64, True)
    assert kernel.priority(use) is None
    reason = kernel.unavailable_reason(use)
    assert reason == f"the package {name_for_pip(name)} is not installed: {INSTALL[name]}"


def name_for_pip(kernel: str) -> str:
    return {"flash-attn-2": "flash-attn", "flash-attn-3": "flash_attn_3"}.get(kernel, kernel)


def test_a_folder_of_another_package_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 makes a folder flash_attn, in which flash-attn 2 would have its functions."""
    install(monkeypatch, "flash-attn-4")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__spec__=object()))
    reason = KERNELS.get("flash-attn-2").unavailable_reason(Use("cuda", torch.bfloat16, 64, True))
    assert "the package flash-attn is not installed" in (reason or "")


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("flash-attn-3", (8, 0), "it needs compute capability 9.0; this GPU has 8.0"),
        ("flash-attn-3", (9, 0), None),
        ("flash-attn-3", (10, 0), "it needs compute capability 9.x; this GPU has 10.0"),
        ("flash-attn-4", (8, 9), "it needs compute capability 9.0; this GPU has 8.9"),
        ("flash-attn-4", (9, 0), None),
        ("flash-attn-4", (10, 0), None),
        ("flash-attn-4", (12, 0), "it needs compute capability 9.x or 10.x; this GPU has 12.0"),
    ],
)
def test_the_generation_of_the_gpu_is_checked(
    monkeypatch: pytest.MonkeyPatch, name: str, found: tuple[int, int], words: str | None
) -> None:
    install(monkeypatch, name_for_pip(name))
    monkeypatch.setattr(_cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_cuda.torch.cuda, "get_device_capability", lambda: found)
    assert KERNELS.get(name).unavailable_reason(Use("cuda", torch.bfloat16, 64, True)) == words


def test_a_module_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_kernels.interface", None)
    with pytest.raises(UnsupportedError, match="some-kernels is installed but can't be imported"):
        PACKAGE.load()


def fits(q: Tensor, window: int = -1, causal: bool = False) -> Tensor:
    return q


def lacks_causal(q: Tensor) -> Tensor:
    return q


def needs_more(q: Tensor, scale: float, causal: bool = False) -> Tensor:
    return q


@torch.library.custom_op("longseq_test_packages::fits", mutates_args=())
def operator_that_fits(q: Tensor, window: int = -1, causal: bool = False) -> Tensor:
    return q.clone()


@torch.library.custom_op("longseq_test_packages::needs_more", mutates_args=())
def operator_that_needs_more(q: Tensor, scale: float, causal: bool = False) -> Tensor:
    return q.clone()


@pytest.mark.parametrize("function", [fits, operator_that_fits])
def test_functions_and_operators_that_fit_are_loaded(
    monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    module = SimpleNamespace(run=function)
    monkeypatch.setitem(sys.modules, "some_kernels.interface", module)
    assert PACKAGE.load() is module


@pytest.mark.parametrize("function", [lacks_causal, needs_more, operator_that_needs_more, None])
def test_functions_with_other_parameters_are_refused_before_a_call(
    monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    module = SimpleNamespace(**({"run": function} if function else {}))
    monkeypatch.setitem(sys.modules, "some_kernels.interface", module)
    with pytest.raises(
        UnsupportedError, match=r"run of the installed some-kernels takes other .*: pip"
    ):
        PACKAGE.load()


@pytest.mark.parametrize(("kv_heads", "sums"), [(4, 4), (2, 4 + 2 + 2)])
def test_buffers_of_a_backward_are_float32_sums(kv_heads: int, sums: int) -> None:
    q, k = (torch.empty(3, heads, 130, 80, dtype=torch.bfloat16) for heads in (4, kv_heads))
    buffers = allocate_flash_3_and_4(q, k)
    assert sum(t.nbytes for t in buffers) == 4 * 3 * (sums * 256 * 96 + 2 * 4 * 130)


@pytest.mark.parametrize("name", INSTALL)
def test_planning_needs_no_package_and_counts_the_buffers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch)
    for module in (_package_kernel, _cuda):
        monkeypatch.setattr(module, "is_meta", lambda: True)
    allocated = []
    owner, buffers = _package_kernel, "allocate_flash_3_and_4"
    if name == "flash-attn-2":
        owner, buffers = flash_attn_2, "allocate_flash_2"
    monkeypatch.setattr(owner, buffers, lambda *t: allocated.append(t))
    kernel = select(name, Use("cuda", torch.bfloat16, 64, True))[0]
    q = torch.empty(1, 4, 1000, 64, dtype=torch.bfloat16, device="meta")
    k = v = q[:, :2]
    out, lse = kernel.forward(q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = kernel.backward((q, q, out, lse), (k, v))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert len(allocated) == 1
