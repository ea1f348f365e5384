"""What each rank holds of a trial's tensors, known to every rank.

A rank holds some rows of the batch, some heads and some tokens. Ranks exchange a fingerprint of
three numbers for the tokens, never the positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Positions, Shard

Fingerprint = tuple[int, int, int]
"""Number, sum and sum of squares of some positions, modulo 2^64."""

_MODULO = 2**64
_CHUNK = 65_536


@dataclass(frozen=True)
class Holding:
    """What one rank holds of q, or of k and v."""

    batch: range
    heads: range
    tokens: Fingerprint

    def holds(self, b: int, head: int) -> bool:
        """Return whether the rank holds batch row `b` of a head."""
        return b in self.batch and head in self.heads


def gather_holdings(group: Group, shard: Shard) -> tuple[list[Holding], list[Holding]]:
    """Return what every rank holds of q, and of k and v. All ranks must call it."""
    spans = (shard.batch, shard.heads, shard.kv_heads)
    numbers = [n for span in spans for n in (span.start, span.stop, span.step)]
    numbers += [*fingerprint(shard.queries), *fingerprint(shard.keys)]
    signed = [n - _MODULO if n >= _MODULO // 2 else n for n in numbers]
    queries, keys = [], []
    for row in all_gather(group, torch.tensor(signed)).tolist():
        batch, heads, kv_heads = (range(*row[at : at + 3]) for at in (0, 3, 6))
        queries.append(Holding(batch, heads, _modulo(row[9:12])))
        keys.append(Holding(batch, kv_heads, _modulo(row[12:])))
    return queries, keys


def is_owner(holdings: Sequence[Holding], rank: int, b: int, head: int) -> bool:
    """Return whether a rank is the lowest that holds its tokens of a batch row and head."""
    mine = holdings[rank]
    others = (other.tokens == mine.tokens and other.holds(b, head) for other in holdings[:rank])
    return mine.holds(b, head) and not any(others)


def find_gap(w: Workload, queries: Sequence[Holding], keys: Sequence[Holding]) -> str | None:
    """Return a sentence about tokens that no rank holds, or that holdings overlap in; else None."""
    complete = fingerprint(np.arange(w.seq_len))
    for name, holdings, heads in (("q", queries, w.heads), ("k and v", keys, w.kv_heads)):
        for b, head in product(range(w.batch), range(heads)):
            held = {one.tokens for one in holdings if one.holds(b, head)}
            if _modulo([sum(n) for n in zip(*held, strict=True)] or [0, 0, 0]) != complete:
                where = f"row {b} of the batch, head {head}"
                return f"the shards of {name} do not cover every token once ({where})"
    return None


def fingerprint(positions: Positions) -> Fingerprint:
    """Return three numbers that identify a set of positions."""
    total, squares = int(positions.sum()), int(np.dot(positions, positions))
    return _modulo([len(positions), total, squares])


def find_rows(held: Positions, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find those of `rows` (ascending positions) that are in `held`.

    Returns their indices in `held`, and their indices in `rows`.
    """
    wanted: NDArray[np.int64] = rows.numpy()
    local, which = [np.arange(0)], [np.arange(0)]
    for start in range(0, len(held), _CHUNK):
        some = held[start : start + _CHUNK]
        at = np.minimum(np.searchsorted(wanted, some), len(wanted) - 1)
        hits = np.nonzero(wanted[at] == some)[0]
        local.append(hits + start)
        which.append(at[hits])
    return torch.from_numpy(np.concatenate(local)), torch.from_numpy(np.concatenate(which))


def all_gather(group: Group, own: Tensor) -> Tensor:
    """Return every rank's `own`, (ranks, *own.shape), a small tensor on the CPU."""
    every = torch.zeros(group.size, *own.shape, dtype=own.dtype)
    every[group.rank] = own
    return group.all_sum(every)


def all_reduce_max(group: Group, own: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks of a small float64 tensor on the CPU."""
    if group.size == 1:
        return own
    agreed = group.all_max(*own.flatten().tolist())
    return torch.tensor(agreed, dtype=own.dtype).view(own.shape)


def _modulo(numbers: Sequence[int]) -> Fingerprint:
    count, total, squares = (n % _MODULO for n in numbers)
    return count, total, squares
