"""Attention of Hugging Face transformers, alone and inside axolotl's ringmaster.

Letters: B batch, H heads, N tokens, D head_dim.
"""

import importlib
from types import SimpleNamespace
from typing import Annotated, Any, Literal

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


class ModelAttention(External):
    """A function of `ALL_ATTENTION_FUNCTIONS`, called as a layer of a model calls it."""

    attention: str
    mask_pairs: Tensor | None = None
    """(1, 1, N, N) as models give it: added to the scores for eager, visible pairs for sdpa."""

    def use(self, function: Any, name: str) -> None:
        """Call this function from now on; name: of the attention in the model's configuration."""
        w = self.workload
        self._function, self._layer = function, torch.nn.Module()
        # the parts of a model's layer that attention functions read
        vars(self._layer).update(
            num_key_value_groups=w.heads // w.kv_heads,
            is_causal=w.causal,
            layer_idx=0,
            config=SimpleNamespace(_attn_implementation=name),
        )

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.workload.causal and self.mask_pairs is None
        scale = q.shape[-1] ** -0.5
        out_BNHD: Tensor = self._function(
            self._layer, q, k, v, self.mask_pairs, scaling=scale, dropout=0.0, is_causal=causal
        )[0]
        return out_BNHD.transpose(1, 2)

    @override
    def facts(self) -> dict[str, Any]:
        own = {"kernel": f"transformers {self.attention}"}
        if self.mask_pairs is not None:
            own["mask"] = "a matrix of pairs, built before the passes"
        return super().facts() | own


@implementation("transformers")
class Transformers(ModelAttention):
    """`ALL_ATTENTION_FUNCTIONS` of transformers, and the eager attention of Llama."""

    summary = "attention of Hugging Face transformers: eager, sdpa, or any registered name"
    mask_kinds = frozenset({WINDOW, PREFIX, DOCUMENTS, FULL_DOCUMENTS})
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
        self.attention = attention

    def prepare(self, device: str) -> None:
        """Find the attention, and build the mask that a model would give it."""
        super().prepare(device)
        known, w = self.module.ALL_ATTENTION_FUNCTIONS, self.workload
        names = ["eager", *known.valid_keys()]
        if self.attention not in names:
            raise UnknownNameError("attention of transformers", self.attention, names)
        if self.attention == "eager":
            llama = importlib.import_module("transformers.models.llama.modeling_llama")
            self.use(llama.eager_attention_forward, self.attention)
        else:
            self.use(known[self.attention], self.attention)
        self.mask_pairs = None
        if w.mask is not None or (w.causal and self.attention in ("eager", "flex_attention")):
            visible = visible_pairs_of(w, device)[None, None]
            zeros = torch.zeros_like(visible, dtype=self.torch_dtype)
            added = zeros.masked_fill_(~visible, torch.finfo(self.torch_dtype).min)
            self.mask_pairs = visible if self.attention == "sdpa" else added


@implementation("axolotl-ringmaster")
class AxolotlRingmaster(ModelAttention):
    """The attention that `ringmaster.setup` registers in transformers: Ulysses, a ring, or both.

    On a CPU it runs Ulysses with torch's attention only; its ring calls flash-attn. The ring has
    not run on a GPU by this project yet.
    """

    summary = "axolotl's ringmaster: Ulysses and a ring around an attention of transformers"
    many_ranks = True
    on_one_rank = "transformers"
    library = Library(
        "axolotl-ringmaster",
        "ringmaster",
        "pip install 'axolotl-ringmaster[transformers]' flash-attn --no-build-isolation",
        versions=("0.2.7", "0.3"),
        devices=("cpu", "cuda"),
        parameters={
            "setup": "config num_kv_heads device_type inner_attn",
            "RingmasterConfig": "size ulysses_size ring_size load_balance",
        },
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        ulysses: Annotated[int, "ranks of a Ulysses group; the ring has the rest"] = 1,
        order: Annotated[
            Literal["contiguous", "zigzag"],
            "tokens of a rank; zigzag balances the causal mask, in a ring alone",
        ] = "contiguous",
        attention: Annotated[
            Literal["flash_attention_2", "sdpa"],
            "attention of transformers; a ring needs the first",
        ] = "flash_attention_2",
    ) -> None:
        super().__init__(workload, group, order, ulysses)
        if order == "zigzag" and (ulysses > 1 or not workload.causal):
            raise UnsupportedError("order=zigzag needs a ring alone (ulysses=1) and a causal mask")
        if attention == "sdpa" and ulysses < group.size:
            raise UnsupportedError(
                f"attention=sdpa has no ring; use ulysses={group.size}, or flash_attention_2"
            )
        if attention != "sdpa" and workload.dtype == "float32":
            raise UnsupportedError("flash_attention_2 computes bfloat16 and float16 only")
        self.ulysses, self.attention = ulysses, attention

    def prepare(self, device: str) -> None:
        """Let the library make its groups of ranks, and register its attention."""
        super().prepare(device)
        size, rm = self.group.size, self.module
        if device == "cpu" and self.attention != "sdpa":
            raise UnsupportedError(
                f"flash_attention_2 needs cuda; use attention=sdpa ulysses={size}"
            )
        config = rm.RingmasterConfig(
            size=size,
            ulysses_size=self.ulysses,
            ring_size=size // self.ulysses,
            load_balance=rm.LoadBalance("head_tail" if self.order.name == "zigzag" else "none"),
        )
        kv_heads = self.workload.kv_heads
        runtime = rm.setup(
            config, num_kv_heads=kv_heads, device_type=device, inner_attn=self.attention
        )
        known = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        self.use(known[runtime.attn_implementation], runtime.attn_implementation)
