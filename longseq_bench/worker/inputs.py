"""What goes into a pass: the rows that will be checked, and a rank's share of random tensors.

Ranks that hold the same part draw the same numbers, others others, with nothing sent: a part's
numbers follow from the trial's seed and from what the part is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import Keep
from longseq_bench.distributed.shard import Positions
from longseq_bench.kernels import host_memory
from longseq_bench.worker.shard_coverage import all_gather, mark, rows_held

WHOLE_ROWS = 512
SAMPLED_ROWS = 16
EDGE_ROWS = 64
"""First and last rows of ranks' shards, both of each rank up to half as many ranks."""

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass
class Pass:
    """What one pass takes and leaves: q (B, Hq, N, D), k, v (B, Hk, M, D), out like q.

    keep: of Trial.  drawn_q: on the host, where a pass writes over q.  aside: an output that the
    pass itself would drop is put on the host, where it can be checked.
    """

    inputs: Triple
    grad_out: Tensor | None
    out: Tensor | None = None
    grads: Triple | None = None
    keep: Keep = "all"
    drawn_q: Tensor | None = None
    aside: bool = True

    @property
    def drawn(self) -> Triple:
        """The inputs as they were before any pass."""
        q, k, v = self.inputs
        return (q if self.drawn_q is None else self.drawn_q), k, v


def checked_rows(seq_len: int, seed: int, ends: Tensor | None = None) -> Tensor:
    """Query positions to check, ascending: all of a short sequence, else first, last and random
    ones and some of `ends`, the first and last position of each rank's queries (ranks, 2)."""
    if seq_len <= WHOLE_ROWS:
        return torch.arange(seq_len)
    draw = torch.Generator().manual_seed(seed)
    middle = torch.randint(1, seq_len - 1, (SAMPLED_ROWS - 2,), generator=draw)
    rows = [torch.tensor([0, seq_len - 1]), middle]
    if ends is not None:
        rows.append(_edges(ends))
    return torch.unique(torch.cat(rows))  # type: ignore[no-any-return]


def rows_of(attention: Attention, seed: int) -> Tensor:
    """Query positions to check, the same on all ranks, which have to call it together."""
    held = attention.shard.queries
    ends = torch.tensor([int(held[0]), int(held[-1])])
    return checked_rows(attention.workload.seq_len, seed, all_gather(attention.group, ends))


def _edges(ends: Tensor) -> Tensor:
    """Both ends of each rank; of very many ranks one end each, and of even more not every rank."""
    if ends.numel() <= EDGE_ROWS:
        return ends.flatten()
    turns = torch.arange(len(ends))
    return ends[turns, turns % 2][:: -(-len(ends) // (4 * EDGE_ROWS))]


def draw(attention: Attention, device: str, seed: int, rows: Tensor, keep: Keep = "all") -> Pass:
    """Seeded normal q, k, v of this rank; in train an output gradient that is zero outside those
    of `rows` that it holds."""
    w, shard = attention.workload, attention.shard
    dtype = getattr(torch, w.dtype)
    # what lies on the host is filled there
    place = "cpu" if attention.on_host and device != "meta" else device
    fill = _filler(attention, place, seed)

    def empty(shape: tuple[int, ...]) -> Tensor:
        if attention.on_host:
            return host_memory.zeros(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=device)

    def normal(name: str, heads: range, tokens: Positions) -> Tensor:
        shape = (len(shard.batch), len(heads), len(tokens), w.head_dim)
        made = empty(shape)
        fill(made, name, heads, tokens)
        return made.requires_grad_(w.train)

    inputs = (
        normal("q", shard.heads, shard.queries),
        normal("k", shard.kv_heads, shard.keys),
        normal("v", shard.kv_heads, shard.keys),
    )
    drawn = host_memory.copy(inputs[0], device) if keep == "nothing" else None
    if not w.train:
        return Pass(inputs, None, keep=keep, drawn_q=drawn)
    # laid out as (B, N, Hq, D), as a model's next layer gives it and fused kernels take it uncopied
    b, h, n, d = inputs[0].shape
    grad_out = empty((b, n, h, d)).zero_().transpose(1, 2)
    local, _ = rows_held(shard.queries, rows)
    own = torch.empty((b, h, len(local), d), dtype=dtype, device=place)
    fill(own, "grad_out", shard.heads, shard.queries)
    grad_out[:, :, local.to(place)] = own
    return Pass(inputs, grad_out, keep=keep, drawn_q=drawn)


Fill = Callable[[Tensor, str, range, Positions], None]


def _filler(attention: Attention, device: str, seed: int) -> Fill:
    """Fills a tensor (B, H, tokens, D) of that name and part. On one rank all numbers come from
    one generator, in turn; on several each row of the batch and head has its own."""
    if device == "meta":
        return lambda made, name, heads, tokens: None
    if attention.group.size == 1:
        one = torch.Generator(device).manual_seed(seed)

        def fill_in_turn(made: Tensor, name: str, heads: range, tokens: Positions) -> None:
            made.normal_(generator=one)

        return fill_in_turn

    def fill(made: Tensor, name: str, heads: range, tokens: Positions) -> None:
        held = mark(tokens)
        for i, b in enumerate(attention.shard.batch):
            for j, head in enumerate(heads):
                made[i, j].normal_(generator=_generator(device, seed, name, b, head, held))

    return fill


def _generator(device: str, *part: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(part).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest))
