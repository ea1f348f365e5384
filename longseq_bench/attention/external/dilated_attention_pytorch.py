"""fkodom's dilated-attention-pytorch: LongNet, one pair (segment, rate) for each group of heads.

The library divides every output by its sum over the sequence, per head and element, and by the
number of pairs. Both are constants of a column, so what it computes is attention up to a factor;
with the causal mask the factor depends on later tokens. No softmax over keys equals that, so
this row multiplies the factors back, in the measured time.

The library calls xformers. Without xformers, as on a CPU, the same call goes to torch's
scaled_dot_product_attention, and the record says so.

Letters: B batch, H heads, N tokens, D head_dim, S segment length, R rate.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from longseq_bench.attention.base import Booleans, Counts, implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.cost import visible_pairs
from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions
from longseq_bench.patterns.dilated import DilationRule, TokenSet


class GroupOffsets(DilationRule):
    """The library's rule: heads of a group share an offset, which counts groups."""

    @override
    def sets_of_head(self, head: int) -> tuple[TokenSet, ...]:
        return tuple((w, r, i % r) for i, (w, r, heads) in enumerate(self.pairs()) if head in heads)


@implementation("dilated-attention-pytorch")
class DilatedAttentionPytorch(External):
    """`DilatedAttention` of dilated-attention-pytorch."""

    summary = "fkodom's LongNet: each group of heads has one pair (segment, rate)"
    equal_heads = True
    # they do, but the check that relies on it has values that can add up to zero over the
    # sequence, and the library would divide zero by zero; rows are sampled instead
    sees_itself = False
    train_reason = "its division by a sum over the sequence would be part of the gradients"
    library = Library(
        "dilated-attention-pytorch",
        "dilated_attention_pytorch.dilated_attention",
        # its requirements name an xformers for an old torch
        "pip install --no-deps dilated-attention-pytorch==0.2.0 einops",
        versions=("0.2.0", "0.3"),
        devices=("cpu", "cuda"),
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        segments: Annotated[
            tuple[int, ...], "segment lengths in tokens; each divides the sequence"
        ] = (1024, 2048),
        dilation: Annotated[tuple[int, ...], "dilation rate of each segment length"] = (1, 2),
    ) -> None:
        super().__init__(workload, group)
        self.rule = GroupOffsets(tuple(segments), tuple(dilation), workload.heads, "groups")
        if workload.heads % len(segments):
            # it then takes some heads twice and others never
            raise UnsupportedError(
                f"{workload.heads} heads can't be split evenly into {len(segments)} groups"
            )
        for segment, rate in zip(segments, dilation, strict=True):
            if workload.seq_len % segment:
                raise UnsupportedError(f"segment {segment} does not divide {workload.seq_len}")
            if rate > segment:
                raise UserError(f"dilation {rate} is above its segment, {segment}")

    def prepare(self, device: str) -> None:
        """Import the library, with a stand-in for xformers if there is none."""
        self._calls_xformers = importlib.util.find_spec("xformers") is not None and device == "cuda"
        if self._calls_xformers or self.library.module in sys.modules:
            super().prepare(device)
        else:
            with _stand_in_for_xformers():
                super().prepare(device)
        self._sums: list[Tensor] = []
        self._attention = self.module.DilatedAttention(self.rule.segments, self.rule.dilation)
        ops = importlib.import_module("xformers.ops") if self._calls_xformers else _TORCH
        self._compute = ops.memory_efficient_attention
        self._ops = SimpleNamespace(
            memory_efficient_attention=self._keep_sums, LowerTriangularMask=ops.LowerTriangularMask
        )

    @override
    def attend_heads_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._sums.clear()
        self.module.xops = self._ops
        out: Tensor = self._attention(q, k, v, is_causal=self.workload.causal)
        factors = torch.cat(self._sums, dim=2).mul_(len(self.rule.segments))
        self._sums.clear()
        return out.mul_(factors)

    def _keep_sums(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        """Compute one group of heads, and keep the sums that the library divides by."""
        x: Tensor = self._compute(query=query, key=key, value=value, **more)
        # the same reduction as in the library, so that both results are equal bit for bit
        by_segment = x.reshape(self.workload.batch, -1, *x.shape[1:])
        self._sums.append(by_segment.sum(dim=(1, 2), keepdim=True)[:, :, 0])
        return x

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self.rule.multiplicity(q_positions, k_positions, head, self.workload.causal)

    @override
    def may_see(self, q_positions: Positions, k_positions: Positions, head: int) -> Booleans:
        return self.rule.may_see(q_positions, k_positions, head)

    @override
    def kept_pairs(self) -> float:
        w = self.workload
        return self.rule.visible_pairs(w.seq_len, w.causal) / w.heads

    @override
    def measures(self) -> dict[str, float]:
        w = self.workload
        return {
            "density_achieved": self.kept_pairs() / visible_pairs(w.seq_len, w.causal),
            "uncovered": self.rule.uncovered_share(w.seq_len),
        }

    @override
    def facts(self) -> dict[str, Any]:
        ran = "xformers" if self._calls_xformers else "torch's scaled_dot_product_attention"
        scaling = "the library's division by sums over the sequence is undone after its call"
        return super().facts() | {"kernel": ran, "scaling": scaling}


def _attend(
    query: Tensor, key: Tensor, value: Tensor, op: Any = None, attn_bias: Any = None
) -> Tensor:
    """Stand-in for memory_efficient_attention of xformers; (B, N, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=attn_bias is not None)
    return out.transpose(1, 2).contiguous()


_TORCH = SimpleNamespace(
    memory_efficient_attention=_attend, LowerTriangularMask=object, AttentionOp=object
)


@contextmanager
def _stand_in_for_xformers() -> Iterator[None]:
    """Let the library import what it needs of xformers, while xformers is not used."""
    ops, package = ModuleType("xformers.ops"), ModuleType("xformers")
    vars(ops).update(vars(_TORCH))
    vars(package)["ops"] = ops
    sys.modules |= {"xformers": package, "xformers.ops": ops}
    try:
        yield
    finally:
        del sys.modules["xformers"], sys.modules["xformers.ops"]
