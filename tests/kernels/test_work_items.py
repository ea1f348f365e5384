"""Lists of the Triton kernels: every block in exactly one item, masked blocks at the ends."""

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import make_layout

CPU = torch.device("cpu")


def lists_of(items: WorkItems, layout: int) -> dict[int, list[int]]:
    """Return the blocks of each row of one layout, joined over its items."""
    found: dict[int, list[int]] = {}
    pairs = zip(items.places[layout].tolist(), items.bounds[layout].tolist(), strict=True)
    for (block, _), (begin, _, _, end) in sorted(pairs, key=lambda pair: pair[1]):
        found.setdefault(block, []).extend(items.indices[begin:end].tolist())
    return found


def lengths(items: WorkItems) -> Tensor:
    return items.bounds[..., 3] - items.bounds[..., 0]


def sinks(tokens: int = 16_000, causal: bool = True) -> BlockLayout:
    """Blocks of 16; the first column is as long as the sequence."""
    return make_layout("sink-window", tokens, 16, 0.99, causal, special=16)


@pytest.mark.parametrize("causal", [False, True])
def test_every_block_is_in_one_item(causal: bool) -> None:
    layout = sinks(causal=causal)
    rows = WorkItems.of_rows([layout], CPU)
    assert lists_of(rows, 0) == {i: layout.row(i).tolist() for i in range(layout.rows)}
    columns = WorkItems.of_columns([layout], 1, CPU)
    indptr, indices = layout.transpose()
    expected = np.split(indices, indptr[1:-1])
    assert lists_of(columns, 0) == {i: own.tolist() for i, own in enumerate(expected)}


def test_the_column_of_a_sink_is_split_into_items_of_similar_length() -> None:
    layout = sinks()
    columns = WorkItems.of_columns([layout], 1, CPU)
    whole = int(np.bincount(layout.indices).max())
    assert whole > 800
    assert int(lengths(columns).max()) <= 64
    ((block, first, count),) = columns.splits[0].tolist()
    assert (block, first, count) == (0, 0, -(-whole // 64))
    slots = columns.places[0, :, 1]
    assert sorted(slots[slots >= 0].tolist()) == list(range(count)) == list(range(columns.slots))


@pytest.mark.parametrize("tokens", [16 * 40, 16 * 40 + 5])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_between_start_and_stop_need_no_mask(causal: bool, tokens: int) -> None:
    """A mask is needed by the causal diagonal, and by the short last block."""
    layout = make_layout("random", tokens, 16, 0.5, causal)
    is_short = tokens % 16 != 0
    for items, are_columns in (
        (WorkItems.of_rows([layout], CPU), False),
        (WorkItems.of_columns([layout], 1, CPU), True),
    ):
        pairs = zip(items.places[0].tolist(), items.bounds[0].tolist(), strict=True)
        for (block, _), (begin, start, stop, end) in pairs:
            for at in range(begin, end):
                own = int(items.indices[at])
                needs = (causal and own == block) or (is_short and own == layout.rows - 1)
                assert (not start <= at < stop) == needs, (are_columns, block, own)
