"""Launches of one pass on a GPU, counted without one, for launches.py.

A pass runs on tensors without data, which stand for an H100. Operations of torch that start a
kernel, copies between host and device, and launches of Triton are counted; views and allocations
are not. An operation counts as one launch, though some start several, and one that would wait
for the device fails, since there is no data to wait for.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from longseq_bench import meta_mode
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import merge, triton_tiles

CAPABILITY = (9, 0)
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "resize_", "set_",
}  # fmt: skip
"""Operations that start nothing on the device, besides those that return a view."""

SEVERAL = {"_scaled_dot_product_cudnn_attention_backward": 3}
"""Operations that start several kernels, by a profile of an H100 (torch 2.11, cuDNN 9.19)."""


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the launches of a pass by name, and its copies from or to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.copies = Counter[str](), 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        of_all = {t.device.type for t in leaves if isinstance(t, torch.Tensor)}
        name = func.overloadpacket.__name__
        if "meta" in of_all and not func.is_view and name not in FREE:
            if name in ("_to_copy", "copy_") and len(of_all) > 1:
                self.copies += 1
            else:
                self.launches[name] += SEVERAL.get(name, 1)
        return result


@contextmanager
def counted() -> Iterator[Counted]:
    """Count what a block starts on meta tensors, launches of Triton included."""
    found, launch = Counted(), triton_tiles.Launch.__call__

    def count(own: triton_tiles.Launch, *tensors: torch.Tensor) -> None:
        found.launches[own.name] += 1
        launch(own, *tensors)

    def count_move(t: torch.Tensor) -> str:
        # each call of merge.py asks for the device once; on meta tensors it starts nothing
        found.launches["_move"] += 1
        return meta_mode.device_kind(t)

    with (
        patch.object(triton_tiles.Launch, "__call__", count),
        patch.object(merge, "device_kind", count_move),
        found,
    ):
        yield found


def count_pass(name: str, w: Workload, ranks: int = 1, **options: Any) -> Counted:
    """Count the second pass of an implementation on the first rank, as on a GPU with Triton."""
    dtype = getattr(torch, w.dtype)
    with meta_mode.standing_for("cuda", CAPABILITY):
        attention = IMPLEMENTATIONS.get(name)(w, Group(0, ranks), **options)
        attention.prepare("cuda")
        own = attention.shard

        def draw(heads: range, head_dim: int, tokens: int) -> torch.Tensor:
            t = torch.empty(w.batch, len(heads), tokens, head_dim, dtype=dtype, device="meta")
            return t.requires_grad_(w.train)

        q, k, v = (
            draw(own.heads, w.head_dim, len(own.queries)),
            draw(own.kv_heads, w.head_dim, len(own.keys)),
            draw(own.kv_heads, w.v_head_dim, len(own.keys)),
        )
        grad = torch.empty(*q.shape[:3], w.v_head_dim, dtype=dtype, device="meta")

        def run() -> None:
            out = attention(q, k, v)
            if w.train:
                torch.autograd.grad(out, (q, k, v), grad)

        run()
        every_iteration = replace(meta_mode._mode, loops_limited=False)
        with patch.object(meta_mode, "_mode", every_iteration), counted() as found:
            run()
    return found
