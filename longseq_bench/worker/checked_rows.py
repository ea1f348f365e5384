"""The rows that are compared with the float64 reference: all of a short sequence, else a sample."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import OptionValue
from longseq_bench.distributed.shard import all_gather

FULL_CHECK_TOKENS, SAMPLED_ROWS = 512, 256
"""Longest sequence of which all rows are checked, and checked rows of a longer one."""

RESIDUES = 128
"""A row of every remainder modulo this number is checked: blocks and tiles are powers of two."""

MAX_PAIRS = 2**24
"""Maximum number of keys times stretches of 128 tokens that have checked rows, of sparse attention.
Beyond 65,536 tokens rows share stretches: those of one stretch see mostly the same keys."""

MIN_STRETCHES = 32
"""Stretches with checked rows at any length."""

BLOCKS = 64, 128
"""Sizes of blocks at whose borders rows are checked, besides those that the options name."""

EDGE_ROWS = 256
"""First and last rows of ranks' shards that are checked; both of each rank up to 128 ranks."""

_SEED_STEP = 1_000_003  # between the seeds of two rounds


def checked_rows(
    seq_len: int,
    seed: int,
    ends: Tensor | None = None,
    blocks: Iterable[int] = (),
    share_stretches: bool = False,
) -> Tensor:
    """Return the query positions to check, ascending; others for another seed.

    All of a short sequence. Else half of them have every remainder modulo 128 once, a quarter are
    both sides of borders of blocks, and the rest are random; the first and the last are added.

    ends: the first and last position of each rank's queries, (ranks, 2); some are added.
    blocks: sizes of the implementation's blocks, tiles or segments.
    share_stretches: of a long sequence, choose rows from few stretches of 128 tokens.
    """
    if seq_len <= FULL_CHECK_TOKENS:
        return torch.arange(seq_len)
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator)

    stretches = max(MIN_STRETCHES, MAX_PAIRS // seq_len) if share_stretches else SAMPLED_ROWS
    is_shared = stretches < SAMPLED_ROWS
    # a quarter of the stretches have borders; a border may touch two
    starts = draw(seq_len // RESIDUES, stretches // 2 if is_shared else RESIDUES) * RESIDUES
    borders = min(stretches, SAMPLED_ROWS) // 8

    def draw_starts(count: int) -> Tensor:
        return starts[torch.arange(count) % len(starts)]

    residues = torch.randperm(RESIDUES, generator=generator)
    rows = [torch.tensor([0, seq_len - 1]), draw_starts(RESIDUES) + residues]
    sizes = sorted({size for size in (*BLOCKS, *blocks) if 1 < size < seq_len})
    for size in sizes:
        at = (1 + draw((seq_len - 1) // size, max(1, borders // len(sizes)))) * size
        rows += [at - 1, at.clamp(max=seq_len - 1)]
    known = torch.unique(torch.cat(rows))
    # more than are missing, since some are known already
    others = draw(seq_len, 4 * SAMPLED_ROWS)
    if is_shared:
        others = draw_starts(len(others)) + others % RESIDUES
    others = torch.unique(others)
    others = others[~torch.isin(others, known)]
    missing = max(0, SAMPLED_ROWS - len(known))
    others = others[torch.randperm(len(others), generator=generator)[:missing]]
    edges = torch.tensor([]) if ends is None else ends.flatten()
    # an odd step takes the first of one rank, the last of another
    edges = edges[:: -(-len(edges) // EDGE_ROWS) | 1]
    return torch.unique(torch.cat([known, others, edges.long()]))  # type: ignore[no-any-return]


def select_checked_rows(
    attention: Attention,
    seed: int,
    round_: int = 0,
    options: Mapping[str, OptionValue] | None = None,
) -> Tensor:
    """Return the query positions to check, the same on all ranks. All ranks must call it.

    Each round has others. Numbers among the options count as sizes of blocks.
    """
    queries = attention.shard.queries
    blocks = []
    for value in (options or {}).values():
        blocks += [n for n in (value if isinstance(value, tuple) else (value,)) if type(n) is int]
    first, count = attention.workload.queries.start, len(attention.workload.queries)
    ends = torch.tensor(all_gather(attention.group, [int(queries[0]), int(queries[-1])])) - first
    return first + checked_rows(
        count, seed + _SEED_STEP * round_, ends, blocks, share_stretches=not attention.is_exact
    )
