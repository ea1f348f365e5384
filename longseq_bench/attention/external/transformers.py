"""Attention of Hugging Face transformers.

Letters: B batch, H heads, N tokens, D head_dim.
"""

import importlib
import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.attention.one_rank import visible_pairs_of
from longseq_bench.core.errors import UnknownNameError, UnsupportedError
from longseq_bench.core.masks import CHUNKED, DOCUMENTS, FULL_DOCUMENTS, PREFIX, WINDOW
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

_DENSE = ("eager", "sdpa")
"""Attentions that take a mask as a matrix of pairs, as models give it."""


@implementation("transformers")
class Transformers(External):
    """A function of `ALL_ATTENTION_FUNCTIONS`, or the eager attention of Llama or gpt-oss (sinks).

    It is called as a layer of a model calls it.
    """

    takes_sinks = True
    summary = "attention of Hugging Face transformers: eager, sdpa, or any registered name"
    takes_scores = ("soft_cap",)  # or `prepare` refuses
    mask_kinds = frozenset({WINDOW, PREFIX, DOCUMENTS, FULL_DOCUMENTS, CHUNKED})
    library = Library(
        "transformers",
        "transformers.modeling_utils",
        "pip install 'longseq-bench[transformers]'",
        versions=("4.53", "6"),
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
        if workload.sink and attention != "eager":
            raise UnsupportedError(f"attention={attention}: sinks are given to eager only")
        self.attention = attention
        self.mask_pairs: Tensor | None = None
        """(1, 1, N, N) as models give it: added to the scores for eager, visible pairs for sdpa."""

    def prepare(self, device: str) -> None:
        """Find the attention, and build the mask that a model would give it."""
        super().prepare(device)
        known, w = self.module.ALL_ATTENTION_FUNCTIONS, self.workload
        names = ["eager", *known.valid_keys()]
        if self.attention not in names:
            raise UnknownNameError("attention of transformers", self.attention, names)
        self._function = known.get(self.attention)
        if self.attention == "eager":
            model = "gpt_oss" if w.sink else "gemma2" if w.soft_cap else "llama"
            if find_spec(f"transformers.models.{model}") is None:
                raise UnsupportedError(f"this version of transformers has no {model}; update it")
            own = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
            self._function = own.eager_attention_forward
        self._of_scores = {"softcap": w.soft_cap} if w.soft_cap else {}
        if not self._of_scores.keys() <= inspect.signature(self._function).parameters.keys():
            # it would take the argument, and leave it out
            raise UnsupportedError(f"attention={self.attention} computes no soft_cap; use eager")
        self._layer = torch.nn.Module()
        # the parts of a model's layer that attention functions read
        vars(self._layer).update(
            num_key_value_groups=w.heads // w.kv_heads,
            is_causal=w.causal,
            layer_idx=0,
            sinks=self.sinks,
            config=SimpleNamespace(_attn_implementation=self.attention),
        )
        if w.mask is not None or (w.causal and self.attention in ("eager", "flex_attention")):
            visible = visible_pairs_of(w, device)[None, None]
            zeros = torch.zeros_like(visible, dtype=self.torch_dtype)
            added = zeros.masked_fill_(~visible, torch.finfo(self.torch_dtype).min)
            self.mask_pairs = visible if self.attention == "sdpa" else added

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.workload.causal and self.mask_pairs is None
        given = {"scaling": q.shape[-1] ** -0.5, "dropout": 0.0, "is_causal": causal}
        given |= self._of_scores
        out_BNHD: Tensor = self._function(self._layer, q, k, v, self.mask_pairs, **given)[0]
        return out_BNHD.transpose(1, 2)

    @override
    def facts(self) -> dict[str, Any]:
        own = {"kernel": f"transformers {self.attention}"}
        if self.mask_pairs is not None:
            own["mask"] = "a matrix of pairs, built before the passes"
        return super().facts() | own
