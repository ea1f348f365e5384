"""The part of a trial's tensors on each rank, known to every rank.

A rank has some rows of the batch, some heads and some tokens. Ranks exchange a fingerprint of three
numbers for the tokens, never the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from longseq_bench.core.model import Workload
from longseq_bench.core.ranks import longseq_wait_for_peers
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions, Shard
from longseq_bench.patterns.visible_keys import as_run, every_position

Fingerprint = tuple[int, int, int]
"""Number, sum and sum of squares of some positions, modulo 2^64."""
_CHUNK = 65_536


@dataclass(frozen=True)
class RankShard:
    """The part of q, or of k and v, on one rank."""

    batch: range
    heads: range
    tokens: Fingerprint

    def has(self, b: int, head: int) -> bool:
        """Return True if the rank has tokens of batch row `b` and a head."""
        return b in self.batch and head in self.heads


def gather_shards(group: Group, shard: Shard) -> tuple[list[RankShard], list[RankShard]]:
    """Return the parts of q, and of k and v, on every rank. All ranks must call it."""
    of_queries = RankShard(shard.batch, shard.heads, fingerprint(shard.queries))
    of_keys = RankShard(shard.batch, shard.kv_heads, fingerprint(shard.keys))
    every = all_gather(group, (of_queries, of_keys))
    return [queries for queries, _ in every], [keys for _, keys in every]


def is_owner(shards: Sequence[RankShard], rank: int, b: int, head: int) -> bool:
    """Return True if a rank is the lowest that has its tokens of a batch row and head."""
    own = shards[rank]
    lower = (other.tokens == own.tokens and other.has(b, head) for other in shards[:rank])
    return own.has(b, head) and not any(lower)


def find_gap(w: Workload, queries: Sequence[RankShard], keys: Sequence[RankShard]) -> str | None:
    """Return a sentence about tokens that are on no rank, or in overlapping shards; else None."""
    every = every_position(w.seq_len)
    of_queries = "q", queries, w.heads, fingerprint(every[w.queries.start :])
    of_keys = "k and v", keys, w.kv_heads, fingerprint(every)
    for name, shards, heads, complete in (of_queries, of_keys):
        for b, head in product(range(w.batch), range(heads)):
            token_sets = {shard.tokens for shard in shards if shard.has(b, head)}
            if tuple(sum(n) % 2**64 for n in zip((0,) * 3, *token_sets, strict=True)) != complete:
                where = f"row {b} of the batch, head {head}"
                return f"the shards of {name} do not cover every token once ({where})"
    return None


def fingerprint(positions: Positions) -> Fingerprint:
    """Return three numbers that identify a set of positions."""
    if run := as_run(positions):
        total = (run[0] + run[-1]) * len(run) // 2
        squares = _sum_of_squares(run.stop) - _sum_of_squares(run.start)
    else:
        total, squares = int(positions.sum()), int(np.dot(positions, positions))
    return len(positions), total % 2**64, squares % 2**64


def _sum_of_squares(stop: int) -> int:
    """Return 0² + 1² + ... + (stop - 1)²."""
    return (stop - 1) * stop * (2 * stop - 1) // 6


def find_rows(positions: Positions, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find those of `rows` (ascending positions) that are in `positions`.

    Returns their indices in `positions`, and their indices in `rows`. For example, of rows [2, 5]
    positions [4, 5, 6] have the second one at index 1: ([1], [1]).
    """
    row_positions: NDArray[np.int64] = rows.numpy()
    if run := as_run(positions):
        first, last = np.searchsorted(row_positions, (run.start, run.stop))
        return rows[first:last] - run.start, torch.arange(first, last)
    own_index, row_index = [np.arange(0)], [np.arange(0)]
    for start in range(0, len(positions) if len(rows) else 0, _CHUNK):
        chunk = positions[start : start + _CHUNK]
        at = np.minimum(np.searchsorted(row_positions, chunk), len(row_positions) - 1)
        hits = np.nonzero(row_positions[at] == chunk)[0]
        own_index.append(hits + start)
        row_index.append(at[hits])
    return torch.from_numpy(np.concatenate(own_index)), torch.from_numpy(np.concatenate(row_index))


def all_gather(group: Group, own: Any) -> list[Any]:
    """Return every rank's `own`, something small that can be pickled."""
    if group.size == 1:
        return [own]
    every = [None] * group.size
    longseq_wait_for_peers(dist.all_gather_object, every, own, group=group.control)
    return every


def all_reduce_max(group: Group, own: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks of a small float64 tensor on the CPU."""
    if group.size == 1:
        return own
    agreed = group.all_max(*own.flatten().tolist())
    return torch.tensor(agreed, dtype=own.dtype).view(own.shape)
