"""Where patterns end: inputs that none can have, seeds of any size, tables of a chunk at most."""

import numpy as np
import pytest

from longseq_bench.core.errors import UserError
from longseq_bench.patterns import blocks
from longseq_bench.patterns.block_layout import BlockLayout, Ints
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from longseq_bench.patterns.dilated import DilationRule


@pytest.mark.parametrize(
    ("indptr", "says"),
    [
        ([0, 2, 1, 3], "falls at row 1"),
        ([1, 2, 3, 3], "from 1 to 3; 3 kept"),
        ([0, 1, 2, 5], "from 0 to 5; 3 kept"),
    ],
)
def test_a_bad_indptr_is_named(indptr: list[int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        BlockLayout(24, 8, False, np.array(indptr), np.array([0, 1, 2], dtype=np.int32))


def test_no_tokens_have_no_layout() -> None:
    with pytest.raises(UserError, match="layout of 0 tokens"):
        BlockLayout(0, 8, False, np.array([0]), np.array([], dtype=np.int32))
    with pytest.raises(UserError, match="sequence of 0 tokens"):
        make_layout("random", 0, 8, 0.5, False)


@pytest.mark.parametrize("seed", [-5, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    one, two = (make_layout("random", 50, 1, 0.8, False, s) for s in (seed, seed % 2**64))
    assert np.array_equal(one.indices, two.indices)


def test_a_very_long_sequence_is_counted_by_its_period() -> None:
    assert DilationRule((1024, 2048), (2, 4), 8).uncovered_share(2**40) == 0.5
    assert DilationRule((1024,), (2,), 1).visible_pairs(2**40, False) == 2**30 * 512**2


def test_no_table_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[int] = []
    rule = PATTERNS["global-local"]

    def watched(rows: blocks.LayoutRows) -> Ints:
        cells.append(rows.i.size * rows.k.size)
        return rule(rows)

    monkeypatch.setitem(PATTERNS, "global-local", watched)
    monkeypatch.setattr(blocks, "CHUNK", 200)
    make_layout("global-local", 100, 1, 0.9, False, special=3)
    # rows that see all go two at a time and then one, the others twenty at a time
    assert cells == [200, 100, 200, 200, 200, 200, 170]
