"""An exact attention with one fault, which its option `kind` names.

Every rank gathers all keys and values and attends to them by a dense softmax, or by torch's where
no fault needs the scores. Without a fault it is right: `kind=none`.

Each table below has the faults of one stage of a pass. A row's position is that of its token in the
whole sequence. Shapes: q, out (B, Hq, n, D) of this rank; k, v (B, Hk, N, D) of all ranks.
"""

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from longseq_bench.attention.base import Attention
from longseq_bench.attention.sparse.block_sparse import BlockSparse, build_layout_kernel
from longseq_bench.attention.sparse.block_sparse_adaptive import AdaptiveBlockSparse
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Shard, even_span
from longseq_bench.kernels.quantised import Quantised, rows_of

BLOCK = 128
LATER = 4
"""The first pass that is wrong in faults of later passes: no fit pass and no warm-up."""


class Faulty(Attention):
    """Exact attention with one fault."""

    summary = "for tests"
    many_ranks = takes_masks = takes_sinks = takes_decode = takes_latent = takes_kv_dtype = True
    takes_scores = ("soft_cap",)

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        kind: Annotated[str, "the fault"] = "none",
        folder: Annotated[str, "of results that are looked up"] = "",
    ) -> None:
        if kind not in KINDS:
            raise UnsupportedError(f"there is no fault {kind!r}")
        super().__init__(workload, group)
        self.kind, self.passes = kind, 0
        self.kept: list[Tensor] = []
        self.folder = Path(folder)

    def build_shard(self) -> Shard:
        w, group = self.workload, self.group
        keys = np.arange(*even_span(w.seq_len, group.size, group.rank))
        return Shard.of_tokens(w, np.asarray(w.queries) if w.decode else keys, keys)

    @property
    def rows(self) -> Tensor:
        """Positions of this rank's queries, (n,)."""
        return torch.from_numpy(self.shard.queries).to(self.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.passes, self.device = self.passes + 1, q.device
        given = q, k, v
        if isinstance(k, Quantised):
            k, v = (_dequantised(self, name, t) for name, t in (("k", k), ("v", v)))
        if change := INPUTS.get(self.kind):
            q, k, v = change(self, q, k, v)
        if gradient := GRADIENTS.get(self.kind):
            name, spoil = gradient
            q, k, v = (
                _spoiled(t, self, spoil) if name == one else t
                for one, t in zip("qkv", (q, k, v), strict=True)
            )
        if compute := RESULTS.get(self.kind):
            return compute(self, q, k, v)
        out = self.attend(q, k, v)
        if change_output := OUTPUTS.get(self.kind):
            out = change_output(self, out)
        if overwrite := OVERWRITES.get(self.kind):
            with torch.no_grad():
                overwrite(*given)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w, group = self.workload, self.workload.heads // self.workload.kv_heads
        plain = w.mask is None and not w.decode and not w.sink and not w.soft_cap
        plain = plain and self.is_exact and not {self.kind} & {*MASKS, *WEIGHTS}
        if self.group.size == 1 and plain and self.kind != "kv heads in turn":
            return scaled_dot_product_attention(q, k, v, is_causal=w.causal, enable_gqa=True)
        if self.group.size > 1:
            k, v = _Gather.apply(k, self), _Gather.apply(v, self)
        uses = torch.arange(w.heads, device=q.device)
        uses = uses % w.kv_heads if self.kind == "kv heads in turn" else uses // group
        own, keys = self.rows[:, None], torch.arange(w.seq_len, device=q.device)
        seen = self.multiplicity(self.shard.queries, np.arange(w.seq_len), 0)
        visible = torch.from_numpy(seen).to(q.device)
        if change := MASKS.get(self.kind):
            visible = change(self, visible, own, keys)
        q, k = q.float(), k[:, uses].float()
        scores = CAPS.get(self.kind, _capped)(self, q @ k.transpose(-1, -2) * w.scale)
        self.bound = q.norm(dim=-1)[..., None] * k.norm(dim=-1).amax(-1)[..., None, None]
        weigh = WEIGHTS.get(self.kind, _with_sinks if w.sink else _scaled(1))
        out = weigh(self, scores.masked_fill(~visible, -math.inf)) @ v[:, uses].float()
        return out.to(self.torch_dtype)


class _Gather(torch.autograd.Function):
    """Rows of each rank (B, H, n, D) -> those of all (B, H, N, D); backward: sums over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, attention: Faulty) -> Tensor:
        ctx.attention = attention
        whole = own.new_zeros(*own.shape[:2], attention.workload.seq_len, own.shape[3])
        whole[:, :, torch.from_numpy(attention.shard.keys)] = own
        return attention.group.all_sum(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        attention = ctx.attention
        if attention.kind != "keys of other ranks have no gradient":
            grad = attention.group.all_sum(grad.contiguous())
        return grad[:, :, attention.rows].contiguous(), None


# ---- inputs -------------------------------------------------------------------------------------

Triple = tuple[Tensor, Tensor, Tensor]
InputFault = Callable[[Faulty, Tensor, Tensor, Tensor], Triple]


def _stale(index: int) -> InputFault:
    def change(attention: Faulty, *inputs: Tensor) -> Triple:
        if not attention.kept:
            attention.kept.append(inputs[index].detach().clone())
        q, k, v = (attention.kept[0] if i == index else t for i, t in enumerate(inputs))
        return q, k, v

    return change


def _rounded(attention: Faulty, *inputs: Tensor) -> Triple:
    low = torch.float8_e4m3fn if attention.workload.dtype != "float32" else torch.bfloat16
    q, k, v = (t.to(low).to(t) for t in inputs)
    return q, k, v


def _eight_bits(attention: Faulty, *inputs: Tensor) -> Triple:
    """Round q and k to eight bits, with one scale for each row."""
    q, k = (
        (t / scale).round().mul(scale).to(t)
        for t in inputs[:2]
        for scale in [t.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127]
    )
    return q, k, inputs[2]


INPUTS: dict[str, InputFault] = {
    "stale queries": _stale(0),
    "stale keys": _stale(1),
    "stale values": _stale(2),
    "inputs rounded to half as many bits": _rounded,
    "queries and keys in eight bits": _eight_bits,
    "keys and values exchanged": lambda a, q, k, v: (q, v, k),
    "batch row 0 for all": lambda a, q, k, v: (q, k[:1].expand_as(k), v[:1].expand_as(v)),
    "values are the last elements of a latent": lambda a, q, k, v: (q, k, k[..., -v.shape[3] :]),
    "values of head 0 for all": lambda a, q, k, v: (q, k, v[:, :1].expand_as(v)),
}

CACHES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "scale of the neighbouring head": lambda name, scale: scale.roll(1, 1),
    "scale of the neighbouring block": lambda name, scale: scale.roll(1, 2),
    "scale of values left out": lambda name, scale: scale if name == "k" else scale * 0 + 1,
}
"""Changes of the scales of a quantised cache, (B, Hk, blocks)."""


def _dequantised(attention: Faulty, name: str, cache: Tensor) -> Tensor:
    changed = cache.as_subclass(Quantised)
    changed.scale = CACHES.get(attention.kind, lambda name, scale: scale)(name, cache.scale)
    every = slice(None)
    return rows_of(changed, every, every, slice(0, cache.shape[2])).float()


OVERWRITES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "queries overwritten by zeros": lambda q, k, v: q.zero_(),
    "keys overwritten by zeros": lambda q, k, v: k.zero_(),
    "values overwritten by zeros": lambda q, k, v: v.zero_(),
    "values overwritten by a constant": lambda q, k, v: v.fill_(1),
    "one value overwritten": lambda q, k, v: v[:, :, -1, -1:].zero_(),
}

# ---- masks --------------------------------------------------------------------------------------

MaskFault = Callable[[Faulty, Tensor, Tensor, Tensor], Tensor]


MASKS: dict[str, MaskFault] = {
    "no causal mask": lambda a, seen, own, keys: torch.ones_like(seen),
    "one key of the future": lambda a, seen, own, keys: keys <= own + 1,
    "own key not seen": lambda a, seen, own, keys: keys < own.clamp_min(1),
    "first key not seen": lambda a, seen, own, keys: seen & ((keys > 0) | (own == 0)),
    "a key in the middle not seen": lambda a, seen, own, keys: seen & (
        (keys != a.workload.seq_len // 3) | (own == keys)
    ),
    "every 256th key dropped": lambda a, seen, own, keys: seen & (
        (keys % 256 != 7) | (own == keys)
    ),
    "last block of keys dropped": lambda a, seen, own, keys: seen & (
        (keys < a.workload.seq_len - BLOCK) | (keys == own)
    ),
    "last key of each block dropped": lambda a, seen, own, keys: seen & (
        (keys % BLOCK != BLOCK - 1) | (own == keys)
    ),
    "last row of each block misses a key": lambda a, seen, own, keys: seen & (
        (own % BLOCK != BLOCK - 1) | (keys != own - 1)
    ),
    "one row misses a key": lambda a, seen, own, keys: seen & (
        (own != a.workload.seq_len // 2) | (keys != own - 5)
    ),
    "window of half the length": lambda a, seen, own, keys: seen & (
        keys > own - a.workload.seq_len // 2
    ),
    "keys of other ranks not seen": lambda a, seen, own, keys: seen & torch.isin(keys, a.rows),
    "first token of a document sees the one before": lambda a, seen, own, keys: seen | (
        (keys == own - 1) & (seen.sum(1, keepdim=True) == 1)
    ),
    "chunks begin one token late": lambda a, seen, own, keys: (
        (keys <= own) & ((keys - 1) // 50 == (own - 1) // 50)
    ),
    "last token of a prefix sees one key too many": lambda a, seen, own, keys: seen | (
        (keys == own + 1) & (seen.sum(1, keepdim=True) == own + 1) & (own < 300)
    ),
}  # fmt: skip

# ---- weights ------------------------------------------------------------------------------------


def _capped(attention: Faulty, scores: Tensor) -> Tensor:
    cap = attention.workload.soft_cap
    return cap * (scores / cap).tanh() if cap else scores


CAPS: dict[str, Callable[[Faulty, Tensor], Tensor]] = {
    "soft cap left out": lambda a, scores: scores,
    "soft cap after the mask": lambda a, scores: scores,
    "gradient without the slope of the soft cap": lambda a, scores: (
        scores + (_capped(a, scores) - scores).detach()
    ),
}
"""What is done before the mask; a hidden score that is capped after it counts."""


def _scaled(factor: float) -> Callable[[Faulty, Tensor], Tensor]:
    return lambda a, scores: (scores * factor).softmax(-1)


def _without_maximum(attention: Faulty, scores: Tensor) -> Tensor:
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


def _below(maximum: Callable[[Faulty, Tensor], Tensor]) -> Callable[[Faulty, Tensor], Tensor]:
    """Subtract something else than the maximum of each row."""
    return lambda a, scores: _without_maximum(a, scores - maximum(a, scores))


def _one_row_scaled(attention: Faulty, scores: Tensor) -> Tensor:
    factor = torch.where(_one(attention, attention.rows), 1.5, 1.0)
    return (scores * factor[:, None]).softmax(-1)


def _softmax_of_each_block(attention: Faulty, scores: Tensor) -> Tensor:
    return torch.cat([b.softmax(-1).nan_to_num(0) for b in scores.split(BLOCK, -1)], -1)


def _detached_sum(attention: Faulty, scores: Tensor) -> Tensor:
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.detach().sum(-1, keepdim=True)


def _twice_at_borders(attention: Faulty, scores: Tensor) -> Tensor:
    """Blocks overlap by one key, which counts twice."""
    twice = torch.zeros_like(scores[0, 0, 0])
    twice[BLOCK::BLOCK] = math.log(2)
    return (scores + twice).softmax(-1)


def _largest(attention: Faulty, scores: Tensor) -> Tensor:
    """Leave out the tenth of the visible keys with the lowest scores."""
    visible = scores > -math.inf
    dropped = visible.sum(-1, keepdim=True) // 10 + (~visible).sum(-1, keepdim=True)
    rank = scores.argsort(-1).argsort(-1)
    return scores.masked_fill(rank < dropped, -math.inf).softmax(-1)


def _with_sinks(
    attention: Faulty, scores: Tensor, count: int = 1, learns: bool = True, value: int = 0
) -> Tensor:
    """count: how often a sink is added.  value: 1: it has the value of the first key."""
    sinks = attention.sinks if learns else attention.sinks.detach()
    column = (sinks + math.log(count))[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)
    return weights[..., :-1] + value * pad(weights[..., -1:], (0, scores.shape[-1] - 1))


WEIGHTS: dict[str, Callable[[Faulty, Tensor], Tensor]] = {
    "sink left out": _scaled(1),
    "sink counted as a value": lambda a, s: _with_sinks(a, s, value=1),
    "sink added on every rank": lambda a, s: _with_sinks(a, s, a.group.size),
    "sink without a gradient": lambda a, s: _with_sinks(a, s, learns=False),
    "scores scaled by 1.01": _scaled(1.01),
    "scores scaled by 1.05": _scaled(1.05),
    "scores not scaled": lambda a, scores: _scaled(a.workload.head_dim**0.5)(a, scores),
    "scores of a latent scaled by its size": lambda a, scores: _scaled(
        a.workload.head_dim**-0.5 / a.workload.scale
    )(a, scores),
    "exponent of base 2": _scaled(math.log(2)),
    "no maximum subtracted": _without_maximum,
    "one maximum for a whole head": _below(lambda a, s: s.amax((-2, -1), keepdim=True)),
    "‖q‖‖k‖ as the maximum": _below(lambda a, s: a.bound / math.sqrt(a.workload.head_dim)),
    "scores clipped at 20": lambda a, s: s.masked_fill(s > 20, 20).softmax(-1),
    "scores clipped at 9": lambda a, s: s.masked_fill(s > 9, 9).softmax(-1),
    "scores of one row scaled by 1.5": _one_row_scaled,
    "the top 90 % of keys by score": _largest,
    "a softmax for each block": _softmax_of_each_block,
    "weights rounded to bfloat16": lambda a, s: s.softmax(-1).bfloat16().float(),
    "key at the border of blocks counts twice": _twice_at_borders,
    "gradient without the sum of weights": _detached_sum,
    **dict.fromkeys(CAPS, _scaled(1)),
    "soft cap after the mask": lambda a, s: _capped(a, s).softmax(-1),
}

# ---- outputs ------------------------------------------------------------------------------------


OutputFault = Callable[[Faulty, Tensor], Tensor]
"""Changes an output, or a gradient."""


def _rows(choose: Callable[[Faulty, Tensor], Tensor]) -> OutputFault:
    """Give chosen rows the values of the row before."""
    return lambda a, out: torch.where(choose(a, a.rows)[:, None], out.roll(1, 2), out)


def _one(attention: Faulty, rows: Tensor) -> Tensor:
    return rows == attention.workload.seq_len // 2 + 3


def _times(factor: float, choose: Callable[[Faulty, Tensor], Tensor]) -> OutputFault:
    """Multiply chosen rows."""
    return lambda a, out: torch.where(choose(a, a.rows)[:, None], out * factor, out)


def _swapped(attention: Faulty, out: Tensor) -> Tensor:
    return out[:, [1, 0, *range(2, out.shape[1])]]


def _remembered(attention: Faulty, out: Tensor) -> Tensor:
    if not attention.kept:
        attention.kept.append(out.detach().clone())
    return attention.kept[0] + 0 * out


def _accumulated(attention: Faulty, out: Tensor) -> Tensor:
    attention.kept.append(out.detach().clone())
    return out + sum(attention.kept[:-1])


def _in_passes(choose: Callable[[int], bool]) -> OutputFault:
    return lambda a, out: out * 1.1 if choose(a.passes) else out


def _is_last(attention: Faulty) -> bool:
    return attention.group.rank == attention.group.size - 1


def _with(value: float) -> OutputFault:
    return lambda a, out: torch.where(_one(a, a.rows)[:, None], value, out)


OUTPUTS: dict[str, OutputFault] = {
    "output scaled by 1.02": _times(1.02, lambda a, rows: rows >= 0),
    "output scaled by 1.005": _times(1.005, lambda a, rows: rows >= 0),
    "one head scaled by 1.02": lambda a, out: torch.cat([out[:, :1] * 1.02, out[:, 1:]], 1),
    "0.01 added to one channel": lambda a, out: pad(out[..., 1:], (1, 0)) + pad(
        out[..., :1] + 0.01, (0, out.shape[-1] - 1)
    ),
    "one row of all": _rows(_one),
    "every 128th row": _rows(lambda a, rows: rows % BLOCK == BLOCK - 1),
    "every 1,000th row": _rows(lambda a, rows: rows % 1000 == 500),
    "every 1,000th row scaled by 1.02": _times(1.02, lambda a, rows: rows % 1000 == 500),
    "last row of each block is zero": _times(0, lambda a, rows: rows % BLOCK == BLOCK - 1),
    "one row is zero": _times(0, _one),
    "the tail is zero": _times(0, lambda a, r: r >= a.workload.seq_len // BLOCK * BLOCK),
    "all rows of the neighbour": _rows(lambda a, rows: rows >= 0),
    "two heads swapped": _swapped,
    "the last head is the first": lambda a, out: torch.cat([out[:, :-1], out[:, :1]], 1),
    "one NaN": _with(math.nan),
    "one infinity": _with(math.inf),
    "a token too many": lambda a, out: pad(out, (0, 0, 0, 1)),
    "a head too many": lambda a, out: torch.cat([out, out[:, :1]], 1),
    "heads and tokens exchanged": lambda a, out: out.transpose(1, 2),
    "another dtype": lambda a, out: out.double(),
    "one row on the last rank": _rows(lambda a, rows: (rows == rows[-1] - 9) & _is_last(a)),
    "every row on the last rank": _rows(lambda a, rows: (rows >= 0) & _is_last(a)),
    "remembered from the first pass": _remembered,
    "added to earlier outputs": _accumulated,
    "wrong in later passes": _in_passes(lambda n: n >= LATER),
    "wrong in every second pass": _in_passes(lambda n: n % 2 == 0),
    "beyond 65,536 tokens": _rows(lambda a, rows: rows >= 2**16),
}  # fmt: skip

# ---- gradients ----------------------------------------------------------------------------------


def _spoiled(tensor: Tensor, attention: Faulty, spoil: OutputFault) -> Tensor:
    """Return a copy whose gradient is wrong."""
    tensor = tensor.clone()
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: spoil(attention, gradient))
    return tensor


GRADIENTS: dict[str, tuple[str, OutputFault]] = {
    "dq is zero": ("q", lambda a, g: torch.zeros_like(g)),
    "dk is half": ("k", lambda a, g: g / 2),
    "dq scaled by 1.05": ("q", lambda a, g: g * 1.05),
    "dk scaled by 1.05": ("k", lambda a, g: g * 1.05),
    "dv scaled by 1.05": ("v", lambda a, g: g * 1.05),
    "dv scaled by 1.01": ("v", lambda a, g: g * 1.01),
    "dq of one row": ("q", _rows(_one)),
    "dk of one row": ("k", _rows(_one)),
    "dv of one row": ("v", _rows(_one)),
    "dq of every 128th row": ("q", _rows(lambda a, r: r % BLOCK == BLOCK - 1)),
    "dk of every 1,000th row": ("k", _rows(lambda a, r: r % 1000 == 500)),
    "dk of swapped heads": ("k", _swapped),
    "dv of one head": ("v", lambda a, g: torch.cat([g[:, :1] * 1.05, g[:, 1:]], 1)),
    "dv is not finite": ("v", lambda a, g: torch.where(_one(a, a.rows)[:, None], math.nan, g)),
    "dk of later passes": ("k", _in_passes(lambda n: n >= LATER)),
    "dv of the last rank": ("v", lambda a, g: g * 1.1 if _is_last(a) else g),
}

# ---- results that a pass does not compute -------------------------------------------------------

HITS = "hits"
"""A file of a folder of results: a byte for each result that was looked up."""
_known: dict[str, Tensor] = {}


def _looked_up(on_disk: bool) -> Callable[[Faulty, Tensor, Tensor, Tensor], Tensor]:
    """Remember results by the inputs' bytes, in this process or for all of them."""

    def compute(attention: Faulty, *inputs: Tensor) -> Tensor:
        as_bytes = b"".join(
            t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in inputs
        )
        key = hashlib.sha256(as_bytes).hexdigest()
        path = attention.folder / key
        if (found := _known.get(key)) is None and on_disk and path.exists():
            found = torch.load(path)
        if found is not None:
            with (attention.folder / HITS).open("ab") as file:
                file.write(b".")
            return found.clone()
        out = attention.attend(*inputs)
        _known[key] = out.clone()
        if on_disk:
            torch.save(out, path)
        return out

    return compute


class Lazy(Tensor):
    """The output of a call that is made when it is first read. like: has its shape and dtype."""

    @staticmethod
    def __new__(cls, like: Tensor, call: Callable[[], Tensor]) -> "Lazy":
        lazy = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        lazy.call, lazy.value = call, None
        return lazy

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Lazy, cls.compute, (args, kwargs or {}))
        return func(*args, **kwargs)

    def compute(self) -> Tensor:
        if self.value is None:
            self.value = self.call()
        return self.value


class OneLayout(AdaptiveBlockSparse):
    """Chooses its layout in the first call only."""

    def _choose(self, queries: Tensor, keys: Tensor) -> Any:
        return self._chosen or super()._choose(queries, keys)


class NextList(BlockSparse):
    """Attends by the list of the next KV head."""

    def prepare(self, device: str) -> None:
        super().prepare(device)
        first, *others = self.layouts
        heads = self.workload.heads
        self._kernel = build_layout_kernel(self.kernel_name, (*others, first), heads)


def _slow_clock(attention: Faulty, *inputs: Tensor) -> Tensor:
    """Make the process's clock run at a tenth of its rate."""
    if attention.passes == 1:
        start, clock = time.perf_counter(), time.perf_counter
        time.perf_counter = lambda: start + (clock() - start) / 10
    return attention.attend(*inputs)


LOOKED_UP = {"looked up by the inputs' bytes": False, "looked up on disk": True}
RESULTS: dict[str, Callable[[Faulty, Tensor, Tensor, Tensor], Tensor]] = {
    **{kind: _looked_up(on_disk) for kind, on_disk in LOOKED_UP.items()},
    "a clock that runs slowly": _slow_clock,
    "computed when it is read": lambda a, q, k, v: Lazy(q, lambda: a.attend(q, k, v)),
}

PLAIN = ("none", "kv heads in turn", "keys of other ranks have no gradient")
KINDS = {*PLAIN, *INPUTS, *CACHES, *OVERWRITES, *MASKS, *WEIGHTS, *OUTPUTS, *GRADIENTS, *RESULTS}
