"""Optional packages of kernels: found, called as they expect, and the error if one does not fit.

Plain attention stands for the FlashAttention packages, behind the parameters that a kernel gives.
Those are the ones of github.com/Dao-AILab/flash-attention, versions 3 and 4 at 0251105.
"""

import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.decode import choose_kernel
from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.workload import Scores
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.exact import _packages, flash_attn
from longseq_bench.kernels.exact.base import KERNELS, ExactKernel, Use, select
from longseq_bench.kernels.exact.flash_attn import MAX_INDEX
from longseq_bench.meta_mode import standing_for
from tests import make
from tests.kernels import plain_attention
from tests.kernels.plain_attention import EXACT

pytestmark = pytest.mark.usefixtures("one_thread")

USE = Use("cuda", torch.bfloat16, 64, True)


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let only these packages be installed."""

    def version(name: str) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(_packages, "version", version)


def put_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Let this GPU be in the machine, with a torch that has cuDNN."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


# ---- calls -------------------------------------------------------------------------------------


def run_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Any:
    """Tensors (B, N, H, D); return the output, the log-sum-exp (B, H, N) and two None."""
    assert scale == q.shape[3] ** -0.5
    out, lse = EXACT.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), None, None


def run_backward(*tensors: Tensor, lse: Tensor, scale: float, causal: bool) -> list[Tensor]:
    """Return the gradients of q, k and v (B, N, H, D) from dout, q, k, v, out."""
    assert scale == tensors[1].shape[3] ** -0.5
    assert lse.is_contiguous()
    dout, q, k, v, out = (t.transpose(1, 2) for t in tensors)
    grads = EXACT.backward((dout, q, out, lse), (k, v), causal)
    return [grad.transpose(1, 2).contiguous() for grad in grads]


@torch.library.custom_op("longseq_test_fa3::_flash_attn_forward", mutates_args=())
def forward_3(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float = 0, causal: bool = False
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = run_forward(q, k, v, softmax_scale, causal)
    return out, lse


@torch.library.custom_op("longseq_test_fa3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float = 0, is_causal: bool = False,
) -> Tensor:  # fmt: skip
    grads = run_backward(dout, q, k, v, out, lse=softmax_lse, scale=softmax_scale, causal=is_causal)
    for grad, into in zip(grads, (dq, dk, dv), strict=True):
        into.copy_(grad)
    return dout.mul(out).sum(-1)


def forward_4(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, return_lse: bool
) -> Any:
    assert return_lse
    return run_forward(q, k, v, softmax_scale, causal)


def backward_4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float,
    causal: bool,
) -> list[Tensor]:  # fmt: skip
    return run_backward(dout, q, k, v, out, lse=lse, scale=softmax_scale, causal=causal)


FAKES: dict[str, tuple[str, SimpleNamespace]] = {
    "flash-attn-3": (
        "flash_attn_interface",
        SimpleNamespace(_flash_attn_forward=forward_3, _flash_attn_backward=backward_3),
    ),
    "flash-attn-4": (
        "flash_attn.cute.interface",
        SimpleNamespace(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4),
    ),
}
"""By kernel: the name of the module, and its replacement."""


@pytest.fixture(params=FAKES)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ExactKernel:
    module, package = FAKES[request.param]
    monkeypatch.setitem(sys.modules, module, package)
    return KERNELS.get(request.param)(Use("cuda", torch.bfloat16, 16, True))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_called_as_the_package_expects(kernel: ExactKernel, causal: bool) -> None:
    grad_out, q, k, v = plain_attention.draw_grouped(33, 33)
    out, lse = kernel.forward(q, k, v, causal)
    mask = torch.ones(33, 33).tril() if causal else None
    want, want_lse, want_grads = plain_attention.gradients((q, k, v), grad_out, mask)
    # a slice, as a merge makes it; the packages take contiguous ones
    sliced = torch.stack([lse] * 2, -1)[..., 0]
    grads = kernel.backward((grad_out, q, out, sliced), (k, v), causal)
    for one, other in zip((out, lse, *grads), (want, want_lse, *want_grads), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_a_soft_cap_is_given_to_the_packages_but_not_to_a_backward_that_ignores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def note(**arguments: Any) -> Any:
        given.append(arguments["softcap"])
        return (arguments["q"], arguments["q"][..., 0].transpose(1, 2))

    fake = SimpleNamespace(
        _flash_attn_forward=note, _flash_attn_backward=note, _flash_attn_fwd=note
    )
    monkeypatch.setattr(_packages, "_accepts", lambda *_: True)
    for module, _ in FAKES.values():
        monkeypatch.setitem(sys.modules, module, fake)
    use = Use("cuda", torch.bfloat16, 16, True, scores=Scores(soft_cap=50.0))
    grad_out, q, k, v = plain_attention.draw_grouped(33, 33)
    kernel = KERNELS.get("flash-attn-3")(use)
    out, lse = kernel.forward(q, k, v)
    kernel.backward((grad_out, q, out, lse), (k, v))
    KERNELS.get("flash-attn-4")(replace(use, train=False)).forward(q, k, v)
    assert given == [50.0] * 3
    install(monkeypatch, "flash-attn-4")
    put_gpu(monkeypatch, *H100)
    reasons = [
        KERNELS.get("flash-attn-4").unavailable_reason(replace(use, train=train))
        for train in (False, True)
    ]
    assert reasons == [None, "its backward leaves soft_cap out; flash-attn-3 and flex have it"]


@pytest.mark.parametrize("kernel", ["flash-attn-4"], indirect=True)
def test_a_length_that_its_index_can_not_address_is_a_limit(
    kernel: ExactKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MSLK#303: from 2M tokens of 8 heads of 128 an offset overflows 32 bits.

    flash-attention#2611: a view with a large stride overflows before its size does.
    """
    assert MAX_INDEX + 1 == 2**21 * 8 * 128
    grad_out, q, k, v = plain_attention.draw_grouped(40, 40)
    monkeypatch.setattr(flash_attn, "MAX_INDEX", q.numel())
    out, lse = kernel.forward(q, k, v)
    wide = torch.zeros(2, 4, 40, 160)[..., :16].copy_(q)
    message = "flash-attn-4: a tensor spans 51,056 elements; kernels .* index at most 5,120"
    with pytest.raises(KernelLimitError, match=message):
        kernel.forward(wide, k, v)
    # the sums of a backward round 40 tokens up to 128, and a head_dim of 16 up to 32
    with pytest.raises(KernelLimitError, match="a tensor spans 32,768 elements"):
        kernel.backward((grad_out, q, out, lse), (k, v))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "command"),
    [("flash-attn-3", "flash-attention#subdirectory=hopper"), ("flash-attn-4", "flash-attn-4")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    """A folder is not enough: flash-attn 2 makes one of flash-attn-4's name."""
    install(monkeypatch)
    put_gpu(monkeypatch, "NVIDIA H100 80GB HBM3", (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__spec__=object()))
    reason = KERNELS.get(name).unavailable_reason(USE) or ""
    assert re.fullmatch(f"the package .* is not installed: pip install .*{command}.*", reason)


@pytest.mark.parametrize(
    ("name", "found", "head_dim", "words"),
    [
        ("flash-attn-3", (8, 0), 64, "it needs compute capability 9.x; this GPU has 8.0"),
        ("flash-attn-3", (9, 0), 64, ""),
        ("flash-attn-4", (10, 0), 256, ""),
        ("flash-attn-4", (10, 0), 192, "it needs a head_dim of at most 128, or 256, on Blackwell"),
        ("flash-attn-4", (12, 0), 64, "it needs compute capability 9.x or 10.x; this GPU has 12.0"),
    ],
)
def test_the_generation_of_the_gpu_is_checked(
    monkeypatch: pytest.MonkeyPatch, name: str, found: Any, head_dim: int, words: str
) -> None:
    install(monkeypatch, name.replace("flash-attn-3", "flash_attn_3"))
    put_gpu(monkeypatch, "a GPU", found)
    use = Use("cuda", torch.bfloat16, head_dim, True)
    reason = KERNELS.get(name).unavailable_reason(use) or ""
    assert bool(reason) == bool(words)
    assert reason.startswith(words)


# ---- what auto takes ---------------------------------------------------------------------------

H100, GB200 = ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA GB200", (10, 0))


@pytest.mark.parametrize(
    ("gpu", "use", "chosen", "words"),
    [
        (H100, {"head_dim": 64}, "flash-attn-4", "head_dim 64, full: 545 TFLOP/s forward (H100"),
        (H100, {"causal": True, "train": True}, "flash-attn-4", "causal: 701 / 646 TFLOP/s"),
        # never run by us with more
        (H100, {"head_dim": 256}, "flash", "head_dim 256, full: 326"),
        (H100, {"elements": 2**31}, "cudnn", "cudnn, head_dim 128, full: 636"),
        (H100, {"packages": False}, "cudnn", "full: 636"),
        (GB200, {}, "cudnn", "head_dim 128, full: 1,558 TFLOP/s forward (GB200"),
        (GB200, {"train": True}, "flash-attn-4", "full: 1,510 / 1,257 TFLOP/s"),
        (("NVIDIA A100-SXM4-80GB", (8, 0)), {}, "flash", "flash, head_dim 128, full: 201"),
        # no figures: the order of the kernels themselves
        (("NVIDIA RTX PRO 6000", (12, 0)), {}, "cudnn", ""),
    ],
)
def test_auto_takes_the_kernel_with_the_highest_figure_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: Any, use: dict[str, Any], chosen: str, words: str
) -> None:
    install(monkeypatch, "flash-attn-4")
    put_gpu(monkeypatch, *gpu)
    monkeypatch.setitem(sys.modules, *FAKES["flash-attn-4"])
    found, facts = select("auto", replace(Use("cuda", torch.bfloat16, 128, False), **use))
    assert (found.name, "kernel_choice" in facts) == (chosen, bool(words))
    assert words in facts.get("kernel_choice", "")


def needs_more(q: Tensor, *, window: int, **given: Any) -> Tensor:
    return q


OTHER = "_fwd of the installed flash-attn-4 takes other parameters than q k .*: pip install"


@pytest.mark.parametrize("forward", [EXACT.forward, needs_more, dict.update, "none", None])
def test_an_unknown_version_of_the_fastest_kernel_leaves_auto_the_next_one(
    monkeypatch: pytest.MonkeyPatch, forward: Any
) -> None:
    words = OTHER if forward else "flash-attn-4 is installed but can't be imported .*: pip install"
    install(monkeypatch, "flash-attn-4")
    put_gpu(monkeypatch, *H100)
    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward_4)
    monkeypatch.setitem(sys.modules, FAKES["flash-attn-4"][0], module if forward else None)
    kernel, facts = select("auto", USE)
    assert kernel.name == "cudnn"
    assert re.search(words, facts["not_flash-attn-4"])
    with pytest.raises(UnsupportedError, match=words):
        select("flash-attn-4", USE)


def test_without_cudnn_and_a_faster_one_flash_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    put_gpu(monkeypatch, *H100)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    kernel, facts = select("auto", USE)
    assert (kernel.name, facts["kernel_choice"][:6]) == ("flash", "flash,")
    assert facts["not_flash-attn-4"].endswith("is not installed: pip install flash-attn-4")
    words = "this torch has no cuDNN"
    assert words in facts["not_cudnn"]
    with pytest.raises(UnsupportedError, match=f"kernel=cudnn: {words}"):
        select("cudnn", USE)
    sdpa = IMPLEMENTATIONS.get("sdpa")(make.trial().workload, Group.alone(), backend="cudnn")
    with pytest.raises(UnsupportedError, match=f"backend=cudnn: {words}"):
        sdpa.prepare("cuda")
    w, use = sdpa.workload, sdpa.kernel_use
    assert (use.elements, use.packages) == (w.batch * w.heads * w.seq_len * w.head_dim, False)


@pytest.mark.parametrize(("installed", "chosen"), [(True, "flash-attn-4"), (False, "cudnn")])
def test_a_plan_takes_what_is_installed_without_an_import(
    monkeypatch: pytest.MonkeyPatch, installed: bool, chosen: str
) -> None:
    install(monkeypatch, *["flash-attn-4"] * installed)
    monkeypatch.setitem(sys.modules, FAKES["flash-attn-4"][0], None)
    with standing_for("cuda", (9, 0)):
        split = choose_kernel("auto", USE, make.trial(mode="decode").workload)[1]
        assert "results/h100/decode" in split["kernel_choice"]
        assert select("auto", USE)[0].name == chosen
        assert select("flash-attn-4", USE)[0].name == "flash-attn-4"
