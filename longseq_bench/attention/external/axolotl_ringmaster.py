"""axolotl's ringmaster: Ulysses, a ring, or both, around an attention of transformers.

On a CPU it runs Ulysses with torch's attention only; its ring calls flash-attn.
The ring has not run on a GPU by this project yet. Letters: B batch, H heads, N tokens, D head_dim.
"""

import importlib
from typing import Annotated, Any, Literal

from torch import Tensor
from typing_extensions import override

from longseq_bench.attention.base import implementation
from longseq_bench.attention.external._library import External, Library, split
from longseq_bench.attention.external.transformers import ModelLayer
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group

_BALANCE = {"contiguous": "none", "zigzag": "head_tail"}


@implementation("axolotl-ringmaster")
class AxolotlRingmaster(External):
    """The attention that `ringmaster.setup` registers in transformers."""

    summary = "axolotl's ringmaster: Ulysses and a ring around an attention of transformers"
    many_ranks = True
    on_one_rank = "transformers"
    library = Library(
        "axolotl-ringmaster",
        "ringmaster",
        "pip install 'axolotl-ringmaster[transformers]' flash-attn --no-build-isolation",
        oldest="0.2.7",
        before="0.3",
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
        if ulysses < 1 or group.size % ulysses or workload.kv_heads % ulysses:
            raise WorldError(
                f"ulysses={ulysses} must divide {group.size} ranks and {workload.kv_heads} KV heads"
            )
        if order == "zigzag" and (ulysses > 1 or not workload.causal):
            raise UnsupportedError("order=zigzag needs a ring alone (ulysses=1) and a causal mask")
        if attention == "sdpa" and ulysses < group.size:
            raise UnsupportedError(
                f"attention=sdpa has no ring; use ulysses={group.size}, or flash_attention_2"
            )
        if attention != "sdpa" and workload.dtype == "float32":
            raise UnsupportedError("flash_attention_2 computes bfloat16 and float16 only")
        self.order = split(order, workload.seq_len, group)
        super().__init__(workload, group)
        self.ulysses, self.tokens, self.attention = ulysses, order, attention

    def prepare(self, device: str) -> None:
        """Let the library make its groups of ranks, and register its attention."""
        super().prepare(device)
        if device == "cpu" and self.attention != "sdpa":
            raise UnsupportedError(
                f"flash_attention_2 needs cuda; use attention=sdpa ulysses={self.group.size}"
            )
        w, size, rm = self.workload, self.group.size, self.module
        config = rm.RingmasterConfig(
            size=size, ulysses_size=self.ulysses, ring_size=size // self.ulysses,
            load_balance=rm.LoadBalance(_BALANCE[self.tokens]),
        )  # fmt: skip
        runtime = rm.setup(
            config, num_kv_heads=w.kv_heads, device_type=device, inner_attn=self.attention
        )
        name = runtime.attn_implementation
        known = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        self._attend = known[name]
        self._module = ModelLayer(name, w.heads // w.kv_heads, w.causal)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out_BNHD = self._attend(
            self._module, q, k, v, None, dropout=0.0, scaling=q.shape[-1] ** -0.5,
            is_causal=self.workload.causal,
        )[0]  # fmt: skip
        return out_BNHD.transpose(1, 2)  # type: ignore[no-any-return]

    @override
    def facts(self) -> dict[str, Any]:
        return super().facts() | {"kernel": f"transformers {self.attention}"}
