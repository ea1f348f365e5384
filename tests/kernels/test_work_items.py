"""Lists of the Triton kernels: every block in exactly one item, masked blocks at the ends."""

import pytest
import torch

from longseq_bench.kernels.work_items import WorkItems
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import make_layout

CPU = torch.device("cpu")


def lists_of(items: WorkItems, layout: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    pairs = zip(items.bounds[layout].tolist(), items.places[layout].tolist(), strict=True)
    # an item that is repeated counts once
    for (begin, _, _, end), (block, _) in sorted({(*b,): (*p,) for b, p in pairs}.items()):
        found.setdefault(block, []).extend(items.indices[begin:end].tolist())
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_every_block_is_in_one_item(causal: bool) -> None:
    layout = make_layout("sink-window", 16_000, 16, 0.99, causal, special=16)
    rows = WorkItems.of_rows([layout], CPU)
    assert lists_of(rows, 0) == {i: layout.row(i).tolist() for i in range(layout.rows)}
    columns = WorkItems.of_columns([layout], 1, CPU)
    expected: list[list[int]] = [[] for _ in range(layout.rows)]
    for i in range(layout.rows):
        for key in layout.row(i):
            expected[key].append(i)
    assert lists_of(columns, 0) == dict(enumerate(expected))
    # the column of the sink, as long as the sequence, is split into items of similar length
    assert int((columns.bounds[..., 3] - columns.bounds[..., 0]).max()) <= 64
    assert columns.splits[0, 0].tolist() == [0, 0, -(-len(expected[0]) // 64)]
    assert not columns.splits[0, 1:, 2].any()


@pytest.mark.parametrize("tokens", [16 * 40, 16 * 40 + 5])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_between_start_and_stop_need_no_mask(causal: bool, tokens: int) -> None:
    """A mask is needed by the causal diagonal, and by the short last block."""
    layout = make_layout("random", tokens, 16, 0.5, causal)
    assert_masked_at_the_ends(WorkItems.of_rows([layout], CPU), layout, 1)
    both = causal and tokens % 16 != 0
    assert_masked_at_the_ends(WorkItems.of_columns([layout], 1, CPU), layout, 1 + both)


def assert_masked_at_the_ends(
    items: WorkItems, layout: BlockLayout, most: int, group: int = 1
) -> None:
    """At most so many entries of an item have a mask, and all that need one; group: of a list."""
    of_items = torch.cat([items.places[..., :1], items.bounds], 2).flatten(0, 1)
    for block, begin, start, stop, end in of_items.tolist():
        assert end - begin - (stop - start) <= most
        for own in (items.indices[start:stop] // group).tolist():
            is_last = own == layout.rows - 1 and layout.seq_len % layout.block != 0
            assert own != block or not layout.causal
            assert not is_last
