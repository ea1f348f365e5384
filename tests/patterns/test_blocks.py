"""Block-sparse patterns: the asked count in every row, the diagonal kept, nothing of the future."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.errors import UnknownNameError, UserError
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from longseq_bench.patterns.layout import BlockLayout

NAMES = sorted(PATTERNS)
each = pytest.mark.parametrize("pattern", NAMES)


def rows_of(layout: BlockLayout) -> list[list[int]]:
    return [layout.row(i).tolist() for i in range(layout.rows)]


@settings(max_examples=250, deadline=None)
@given(
    pattern=st.sampled_from(NAMES),
    tokens=st.integers(1, 900),
    block=st.sampled_from([1, 7, 16, 32]),
    sparsity=st.floats(0, 0.999),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
    special=st.integers(0, 100),
)
def test_every_row_keeps_what_was_asked(
    pattern: str,
    tokens: int,
    block: int,
    sparsity: float,
    causal: bool,
    seed: int,
    special: int,
) -> None:
    """Fault 7. Rows of global tokens alone see everything they may."""
    special = min(special, tokens)
    layout = make_layout(pattern, tokens, block, sparsity, causal, seed, special)
    full = -(-special // block) if pattern == "global-local" else 0
    for i, kept in enumerate(rows_of(layout)):
        visible = i + 1 if causal else layout.rows
        wanted = visible if i < full else max(1, round((1 - sparsity) * visible))
        assert len(kept) == wanted
        assert kept == sorted(set(kept))
        assert i in kept
        assert kept[0] >= 0
        assert kept[-1] < visible
    assert layout.block_density == pytest.approx(
        sum(map(len, rows_of(layout))) / sum(i + 1 if causal else layout.rows
                                             for i in range(layout.rows))
    )  # fmt: skip


@each
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_skipped_is_everything(pattern: str, causal: bool) -> None:
    layout = make_layout(pattern, 300, 16, 0.0, causal, 0, 16)
    assert rows_of(layout) == [list(range(i + 1 if causal else 19)) for i in range(19)]
    assert layout.density == 1
    assert layout.block_density == 1


@each
def test_a_layout_is_the_same_again(pattern: str) -> None:
    one, two = (make_layout(pattern, 4096, 32, 0.8, False, 5, 64) for _ in range(2))
    assert np.array_equal(one.indices, two.indices)
    assert np.array_equal(one.indptr, two.indptr)


def test_another_seed_draws_another_layout() -> None:
    drawn = {
        make_layout("random", 4096, 32, 0.8, True, seed).indices.tobytes() for seed in (0, 1, 2)
    }
    assert len(drawn) == 3


DIGEST = (
    "import hashlib; from longseq_bench.patterns.blocks import make_layout; "
    "print(hashlib.sha256(make_layout('random', 8192, 32, 0.9, True, 7).indices).hexdigest())"
)


def test_a_draw_is_the_same_in_another_process() -> None:
    """Fault 8: ranks draw layouts apart; they must be one layout."""
    own = hashlib.sha256(make_layout("random", 8192, 32, 0.9, True, 7).indices).hexdigest()
    told = subprocess.run(
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == own


@each
def test_chunks_of_rows_do_not_show(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed a chunk at a time; a row does not depend on its chunk."""
    whole = make_layout(pattern, 3000, 16, 0.7, False, 3, 40)
    monkeypatch.setattr("longseq_bench.patterns.blocks.CHUNK", 500)
    cut = make_layout(pattern, 3000, 16, 0.7, False, 3, 40)
    assert np.array_equal(whole.indices, cut.indices)
    assert np.array_equal(whole.indptr, cut.indptr)


def test_local_window_keeps_the_nearest() -> None:
    causal = make_layout("local-window", 1600, 16, 0.9, True)
    assert causal.row(50).tolist() == [46, 47, 48, 49, 50]
    both = make_layout("local-window", 1600, 16, 0.95, False)
    assert both.row(50).tolist() == [48, 49, 50, 51, 52]
    assert both.row(0).tolist() == [0, 1, 2, 3, 4]
    assert both.row(99).tolist() == [95, 96, 97, 98, 99]


def test_sink_window_keeps_the_first_and_a_window() -> None:
    layout = make_layout("sink-window", 1600, 16, 0.9, True, special=32)
    assert layout.row(50).tolist() == [0, 1, 48, 49, 50]


def test_global_local_has_global_columns_and_rows() -> None:
    layout = make_layout("global-local", 1600, 16, 0.9, False, special=20)
    assert layout.row(0).tolist() == layout.row(1).tolist() == list(range(100))
    assert all(layout.row(i).tolist()[:2] == [0, 1] for i in range(100))
    assert layout.row(50).tolist()[2:] == list(range(46, 54))


def test_strided_reaches_evenly() -> None:
    kept = make_layout("strided", 1600, 16, 0.9, True).row(99)
    window, others = kept[kept > 94], kept[kept <= 94]
    assert window.tolist() == [95, 96, 97, 98, 99]
    assert others.tolist() == [0, 19, 38, 57, 76]


def test_random_keeps_a_window_and_reaches_everywhere() -> None:
    rows = [make_layout("random", 1600, 16, 0.9, True, seed).row(99).tolist() for seed in range(60)]
    assert all(row[-5:] == [95, 96, 97, 98, 99] for row in rows)
    assert len({block for row in rows for block in row[:-5]}) > 85


def test_dilated_sparse_strides_grow() -> None:
    for causal in (True, False):
        kept = make_layout("dilated-sparse", 16000, 16, 0.992, causal).row(999)
        gaps = np.diff(kept[kept <= 999])[::-1]
        assert (np.diff(gaps) >= 0).all()
        assert gaps[0] < 5
        assert gaps[-1] > 100


def test_hierarchical_is_fine_near_and_coarser_far() -> None:
    kept = make_layout("hierarchical", 16000, 16, 0.96, True).row(999)
    gaps = np.diff(kept)[::-1]
    assert set(gaps.tolist()) >= {1, 2, 4, 8, 16, 32, 64}
    levels = np.log2(gaps).astype(int)
    assert (np.diff(levels) >= 0).all()
    # as many blocks in each level
    assert set(np.bincount(levels).tolist()) <= {5, 6}


def test_unknown_patterns_have_a_neighbour() -> None:
    with pytest.raises(UnknownNameError) as caught:
        make_layout("local-windows", 100, 10, 0.5, False)
    assert caught.value.nearest == "local-window"
    assert "'local-windows'" in str(caught.value)


@pytest.mark.parametrize("sparsity", [1.0, -0.1, 1.5, float("nan")])
def test_a_sparsity_that_is_none_is_refused(sparsity: float) -> None:
    with pytest.raises(UserError, match=r"outside \[0, 1\)"):
        make_layout("strided", 100, 10, sparsity, False)


def test_blocks_and_globals_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match="block 0"):
        make_layout("strided", 100, 0, 0.5, False)
    with pytest.raises(UserError, match="101 global tokens are more than the sequence's 100"):
        make_layout("global-local", 100, 10, 0.5, False, 0, 101)


@pytest.mark.slow
@each
def test_millions_of_tokens_take_little_memory(pattern: str) -> None:
    """4M tokens in 32k rows of 16: a dense table of blocks would be 1 GiB of bytes."""
    tracemalloc.start()
    try:
        layout = make_layout(pattern, 2**22, 128, 1 - 16 / 2**15, False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(layout.indices) == 16 * 2**15
    assert peak < 256 * 2**20
