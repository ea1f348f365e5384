"""FlexAttention by FlashAttention-4: where it can run, and what torch is asked for.

test_flex_blocks.py tests its output, on a GPU with the package flash-attn-4.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.sparse.block_sparse import BlockSparse, build_layout_kernel
from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import flex_blocks
from longseq_bench.kernels.exact import _packages, flash_attn
from longseq_bench.kernels.exact.base import Use
from longseq_bench.kernels.flex_blocks import causal_mask_mod
from longseq_bench.kernels.flex_flash import FlexFlashBlocks, always_true, unavailable_reason
from longseq_bench.kernels.sparse_selection import Blocks, choose
from longseq_bench.patterns.blocks import make_layout


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts the package and a GPU of a capability in place."""

    def put(major: int) -> None:
        monkeypatch.setattr(_packages, "version", lambda name: "4.0.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))

    return put


@pytest.mark.parametrize(
    ("major", "block", "words"),
    [
        (9, 128, None),
        (9, 256, "it needs blocks of 128 tokens on this GPU, not 256"),
        (10, 512, None),
        (10, 128, "it needs blocks of 256 tokens or a multiple of it on this GPU, not 128"),
        (8, 128, "it needs compute capability 9.x or 10.x; this GPU has 8.0"),
    ],
)
def test_the_block_has_the_tile_of_the_gpu(
    gpu: Any, major: int, block: int, words: str | None
) -> None:
    gpu(major)
    assert unavailable_reason(Use("cuda", torch.bfloat16, 64, True), block) == words
    wide = str(unavailable_reason(Use("cuda", torch.bfloat16, 256, True), block))
    assert ("at most 128" in wide) == (major > 8)


def test_it_is_taken_on_request_only(gpu: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"kernel=flex-flash: it runs on cuda only"):
        choose("flex-flash", "cpu", "bfloat16", 64, Blocks(128, True))
    gpu(9)
    name, facts = choose("flex-flash", "cuda", "bfloat16", 64, Blocks(128, True))
    assert (name, facts) == ("flex-flash", {"kernel": "flex-flash"})
    name, facts = choose("auto", "cuda", "bfloat16", 64, Blocks(128, True))
    assert name != "flex-flash"
    assert ("flex-flash 1.63" in facts.get("kernel_choice", "")) == (name == "triton")
    with pytest.raises(UnsupportedError, match="kernel=flex-flash: it needs a block layout"):
        choose("flex-flash", "cuda", "bfloat16", 64)


def test_its_dense_baseline_is_flash_attention_4() -> None:
    w = Workload(seq_len=512, heads=2, head_dim=64, dtype="bfloat16")
    attention = BlockSparse(w, Group.alone(), sparsity=0.5, kernel="flex-flash")
    attention.kernel_name = "flex-flash"
    assert attention.comparable_kernel == "flash-attn-4"


@pytest.mark.parametrize("causal", [False, True])
def test_torch_is_asked_for_the_flash_backend(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    asked = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, **options: Any) -> Tensor:
        asked.update(options, mask_mod=block_mask.mask_mod)
        return q

    monkeypatch.setattr(flex_blocks, "attend", attend)
    q = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
    kernel = build_layout_kernel(
        "flex-flash", (make_layout("random", 512, 128, 0.5, causal),), heads=4
    )
    kernel.forward(q, q, q, False)
    mask_mod = causal_mask_mod if causal else always_true
    assert asked == {"kernel_options": {"BACKEND": "FLASH"}, "mask_mod": mask_mod}


def test_torch_does_not_drop_the_tables() -> None:
    """torch lets the kernel see all pairs if it finds that a mask_mod is always True."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.kernel.flex.flex_flash_attention import is_trivial_mask_graph
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import noop_mask

    positions = [torch.zeros((), dtype=torch.int32)] * 4

    def is_dropped(mask_mod: Any) -> bool:
        graph = make_fx(mask_mod, decomposition_table=select_decomp_table())(*positions)
        return bool(is_trivial_mask_graph(graph))

    assert is_dropped(noop_mask)
    assert not is_dropped(always_true)
    assert not is_dropped(causal_mask_mod)


def test_a_length_beyond_its_index_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(flash_attn, "MAX_INDEX", q.numel() - 1)
    kernel = FlexFlashBlocks([make_layout("random", 512, 128, 0.5, False)])
    with pytest.raises(KernelLimitError, match="flex-flash: a tensor spans 131,072 elements"):
        kernel.forward(q, q, q, False)
