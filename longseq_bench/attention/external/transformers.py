"""An attention of Hugging Face transformers, by the name that models are given.

Letters: B batch, H heads, N tokens, D head_dim.
"""

import importlib
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.attention.masked import visible_pairs_of
from longseq_bench.core.errors import UnknownNameError, UnsupportedError
from longseq_bench.core.masks import DOCUMENTS, FULL_DOCUMENTS, PREFIX, WINDOW
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

_DENSE = ("eager", "sdpa")
"""Attentions that take a mask as a matrix of pairs, as models give it."""


@implementation("transformers")
class Transformers(External):
    """`ALL_ATTENTION_FUNCTIONS` of transformers, and the eager attention of Llama."""

    summary = "attention of Hugging Face transformers: eager, sdpa, or any registered name"
    mask_kinds = frozenset({WINDOW, PREFIX, DOCUMENTS, FULL_DOCUMENTS})
    library = Library(
        "transformers",
        "transformers.modeling_utils",
        "pip install 'longseq-bench[transformers]'",
        oldest="4.53",
        before="6",
        devices=("cpu", "cuda"),
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        attention: Annotated[
            str, "name in transformers: eager, sdpa, flex_attention, flash_attention_2, ..."
        ] = "sdpa",
    ) -> None:
        super().__init__(workload, group)
        if workload.mask is not None and attention not in _DENSE:
            raise UnsupportedError(f"attention={attention}: masks are given to eager and sdpa only")
        self.attention = attention
        self._mask: Tensor | None = None

    def prepare(self, device: str) -> None:
        """Find the attention, and build the mask that a model would give it."""
        super().prepare(device)
        known = self.module.ALL_ATTENTION_FUNCTIONS
        names = ["eager", *known.valid_keys()]
        if self.attention not in names:
            raise UnknownNameError("attention of transformers", self.attention, names)
        if self.attention == "eager":
            llama = importlib.import_module("transformers.models.llama.modeling_llama")
            self._attend = llama.eager_attention_forward
        else:
            self._attend = known[self.attention]
        w = self.workload
        self._module = ModelLayer(self.attention, w.heads // w.kv_heads, w.causal)
        self._mask = self._build_mask(device)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out_BNHD = self._attend(
            self._module, q, k, v, self._mask, scaling=q.shape[-1] ** -0.5, dropout=0.0,
            is_causal=self.workload.causal and self._mask is None,
        )[0]  # fmt: skip
        return out_BNHD.transpose(1, 2)  # type: ignore[no-any-return]

    def _build_mask(self, device: str) -> Tensor | None:
        """Return (1, 1, N, N): added to the scores for eager, visible pairs for sdpa."""
        w = self.workload
        if w.mask is None and not (w.causal and self.attention in ("eager", "flex_attention")):
            return None
        visible = visible_pairs_of(w, device)[None, None]
        if self.attention == "sdpa":
            return visible
        hidden = torch.finfo(self.torch_dtype).min
        return torch.zeros_like(visible, dtype=self.torch_dtype).masked_fill_(~visible, hidden)

    @override
    def facts(self) -> dict[str, Any]:
        own = {"kernel": f"transformers {self.attention}"}
        if self._mask is not None:
            own["mask"] = "a matrix of pairs, built before the passes"
        return super().facts() | own


class ModelLayer(torch.nn.Module):
    """The parts of a model's layer that attention functions read."""

    def __init__(self, attention: str, groups: int, causal: bool) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal, self.layer_idx = groups, causal, 0
        self.config = SimpleNamespace(_attn_implementation=attention)
