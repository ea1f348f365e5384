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
from longseq_bench.distributed.token_order import Shard, count_tokens, indexed_runs
from longseq_bench.patterns import Tokens

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
    of_queries = RankShard(shard.batch, shard.heads, fingerprint(shard.query_tokens))
    of_keys = RankShard(shard.batch, shard.kv_heads, fingerprint(shard.key_tokens))
    every = all_gather(group, (of_queries, of_keys))
    return [queries for queries, _ in every], [keys for _, keys in every]


def is_owner(shards: Sequence[RankShard], rank: int, b: int, head: int) -> bool:
    """Return True if a rank is the lowest that has its tokens of a batch row and head."""
    own = shards[rank]
    lower = (other.tokens == own.tokens and other.has(b, head) for other in shards[:rank])
    return own.has(b, head) and not any(lower)


def find_gap(w: Workload, queries: Sequence[RankShard], keys: Sequence[RankShard]) -> str | None:
    """Return a sentence about tokens that are on no rank, or in overlapping shards; else None."""
    of_queries = "q", queries, w.heads, fingerprint((w.queries,))
    of_keys = "k and v", keys, w.kv_heads, fingerprint((range(w.seq_len),))
    for name, shards, heads, complete in (of_queries, of_keys):
        for b, head in product(range(w.batch), range(heads)):
            token_sets = {shard.tokens for shard in shards if shard.has(b, head)}
            if tuple(sum(n) % 2**64 for n in zip((0,) * 3, *token_sets, strict=True)) != complete:
                where = f"row {b} of the batch, head {head}"
                return f"the shards of {name} do not cover every token once ({where})"
    return None


def fingerprint(tokens: Tokens) -> Fingerprint:
    """Return three numbers that identify a set of positions."""
    if isinstance(tokens, tuple):
        total = sum((run[0] + run[-1]) * len(run) // 2 for run in tokens if run)
        squares = sum(map(_sum_of_squares, tokens))
    else:
        total, squares = int(tokens.sum()), int(np.dot(tokens, tokens))
    return count_tokens(tokens), total % 2**64, squares % 2**64


def _sum_of_squares(run: range) -> int:
    """Return the sum of a² + 2 a s i + s² i², with the first number a and the step s."""
    n, a, s = len(run), run.start, run.step
    return n * a**2 + a * s * n * (n - 1) + s**2 * ((n - 1) * n * (2 * n - 1) // 6)


def find_rows(tokens: Tokens, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find those of `rows` (ascending positions) that are among some tokens.

    Returns their indices among the tokens, and their indices in `rows`. For example, of rows [2, 5]
    positions [4, 5, 6] have the second one at index 1: ([1], [1]).
    """
    if isinstance(tokens, tuple):
        found = [_find_in_run(start, run, rows) for start, run in indexed_runs(tokens)]
        empty = torch.arange(0)
        own, of_rows = zip((empty, empty), *found, strict=True)
        return torch.cat(own), torch.cat(of_rows)
    row_positions: NDArray[np.int64] = rows.numpy()
    own_index, row_index = [np.arange(0)], [np.arange(0)]
    for start in range(0, len(tokens) if len(rows) else 0, _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        at = np.minimum(np.searchsorted(row_positions, chunk), len(row_positions) - 1)
        hits = np.nonzero(row_positions[at] == chunk)[0]
        own_index.append(hits + start)
        row_index.append(at[hits])
    return torch.from_numpy(np.concatenate(own_index)), torch.from_numpy(np.concatenate(row_index))


def _find_in_run(start: int, run: range, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find rows in a run, whose first token has the index `start`."""
    steps = rows - run.start
    at = ((steps >= 0) & (rows < run.stop) & (steps % run.step == 0)).nonzero()[:, 0]
    return start + steps[at] // run.step, at


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
