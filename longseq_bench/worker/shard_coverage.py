"""Which rank holds which part of a trial's tensors, known to every rank.

A part is some rows of the batch, some heads and some tokens. Tokens are told apart by three
numbers, so that positions themselves never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Positions, Shard

Mark = tuple[int, int, int]
"""Of some positions: how many, their sum, the sum of their squares, modulo 2^64."""

_MODULO = 2**64
_CHUNK = 65_536


@dataclass(frozen=True)
class Part:
    """What one rank holds of q, or of k and v."""

    batch: range
    heads: range
    tokens: Mark

    def holds(self, b: int, head: int) -> bool:
        """Whether that row of the batch and that head are in it."""
        return b in self.batch and head in self.heads


Parts = Sequence[Part]
"""One a rank."""


def parts_of(group: Group, shard: Shard) -> tuple[Parts, Parts]:
    """Every rank's part of q, and of k and v. All ranks have to call it."""
    told = [
        *_numbers(shard.batch), *_numbers(shard.heads), *_numbers(shard.kv_heads),
        *mark(shard.queries), *mark(shard.keys),
    ]  # fmt: skip
    signed = [n - _MODULO if n >= _MODULO // 2 else n for n in told]
    queries, keys = [], []
    for row in all_gather(group, torch.tensor(signed)).tolist():
        batch, heads, kv_heads = (range(*row[at : at + 3]) for at in (0, 3, 6))
        queries.append(Part(batch, heads, _marked(row[9:12])))
        keys.append(Part(batch, kv_heads, _marked(row[12:])))
    return queries, keys


def owns(parts: Parts, rank: int, b: int, head: int) -> bool:
    """Whether a rank is the lowest of those that hold these very tokens of a batch row and head."""
    mine = parts[rank]
    others = (p.tokens == mine.tokens and p.holds(b, head) for p in parts[:rank])
    return mine.holds(b, head) and not any(others)


def gap(w: Workload, queries: Parts, keys: Parts) -> str | None:
    """Where tokens of a row of the batch and a head are held by nobody, or by ranks that share a
    part of what they hold, in a sentence; None where nothing is."""
    whole = mark(np.arange(w.seq_len))
    for name, parts, heads in (("q", queries, w.heads), ("k and v", keys, w.kv_heads)):
        for b in range(w.batch):
            for head in range(heads):
                held = {p.tokens for p in parts if p.holds(b, head)}
                if _marked([sum(n) for n in zip(*held, strict=True)] or [0, 0, 0]) != whole:
                    where = f"row {b} of the batch, head {head}"
                    return f"the ranks' parts of {name} don't make up all tokens ({where})"
    return None


def mark(positions: Positions) -> Mark:
    """What tells these positions from others."""
    total, squares = int(positions.sum()), int(np.dot(positions, positions))
    return _marked([len(positions), total, squares])


def rows_held(held: Positions, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `rows` (ascending positions) are among `held`: where in held, and where in rows."""
    asked: NDArray[np.int64] = rows.numpy()
    local, which = [], []
    for start in range(0, len(held), _CHUNK):
        part = held[start : start + _CHUNK]
        at = np.minimum(np.searchsorted(asked, part), len(asked) - 1)
        hits = np.nonzero(asked[at] == part)[0]
        local.append(hits + start)
        which.append(at[hits])
    none = [np.arange(0)]
    return torch.from_numpy(np.concatenate(local or none)), torch.from_numpy(
        np.concatenate(which or none)
    )


def all_gather(group: Group, own: Tensor) -> Tensor:
    """Every rank's `own`, (ranks, *own.shape), on every rank; small tensors on the CPU."""
    every = torch.zeros(group.size, *own.shape, dtype=own.dtype)
    every[group.rank] = own
    return group.all_sum(every)


def all_reduce_max(group: Group, own: Tensor) -> Tensor:
    """The largest of each element over ranks; small tensors of float64 on the CPU."""
    if group.size == 1:
        return own
    agreed = group.all_max(*own.flatten().tolist())
    return torch.tensor(agreed, dtype=own.dtype).view(own.shape)


def _numbers(span: range) -> tuple[int, int, int]:
    return span.start, span.stop, span.step


def _marked(numbers: Sequence[int]) -> Mark:
    count, total, squares = (n % _MODULO for n in numbers)
    return count, total, squares
