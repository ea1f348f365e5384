"""Block-sparse patterns: the requested count in every row, the diagonal, no future block."""

import hashlib
import subprocess
import sys
import tracemalloc
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.patterns.blocks import PATTERNS, WITH_SPECIAL, WITH_WINDOW, make_layout

NAMES = sorted(PATTERNS)
each = pytest.mark.parametrize("pattern", NAMES)


def special_of(pattern: str, tokens: int) -> int:
    return tokens if pattern in WITH_SPECIAL else 0


@settings(max_examples=150, deadline=None)
@given(
    pattern=st.sampled_from(NAMES),
    tokens=st.integers(1, 900),
    block=st.sampled_from([1, 7, 16, 32]),
    sparsity=st.floats(0, 0.999),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
    special=st.integers(0, 100),
)
def test_every_row_keeps_the_requested_number_of_blocks(
    pattern: str, tokens: int, block: int, sparsity: float, causal: bool, seed: int, special: int
) -> None:
    """Fault 7. Rows of global tokens keep all visible blocks."""
    special = special_of(pattern, min(special, tokens))
    layout = make_layout(pattern, tokens, block, sparsity, causal, seed, special)
    full = -(-special // block) if pattern == "global-local" else 0
    for i in range(layout.rows):
        kept = layout.row(i).tolist()
        visible = i + 1 if causal else layout.rows
        expected = visible if i < full else max(1, round((1 - sparsity) * visible))
        assert len(kept) == expected
        assert kept == sorted(set(kept))
        assert i in kept
        assert kept[0] >= 0
        assert kept[-1] < visible


@pytest.mark.parametrize("pattern", ["random", "indices"])
def test_another_seed_draws_another_layout(pattern: str) -> None:
    seeds = (0, 0, 1, 2)
    layouts = {make_layout(pattern, 4096, 32, 0.8, True, seed).indices.tobytes() for seed in seeds}
    assert len(layouts) == 3


DIGEST = (
    "import hashlib; from longseq_bench.patterns.blocks import make_layout; "
    "print(hashlib.sha256(make_layout('random', 8192, 32, 0.9, True, 7).indices).hexdigest())"
)


def test_a_draw_is_the_same_in_another_process() -> None:
    """Fault 8: every rank draws the layout by itself; all must be equal."""
    own = hashlib.sha256(make_layout("random", 8192, 32, 0.9, True, 7).indices).hexdigest()
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == own


@pytest.mark.parametrize(
    ("pattern", "causal", "options", "rows"),
    [
        ("local-window", True, {}, {50: range(46, 51)}),
        ("local-window", False, {}, {50: range(45, 55), 0: range(10), 99: range(90, 100)}),
        ("sink-window", True, {"special": 32}, {50: [0, 1, 48, 49, 50]}),
        # global tokens are columns, and rows that see everything
        ("global-local", False, {"special": 20}, {1: range(100), 50: [0, 1, *range(46, 54)]}),
        # half on the multiples of 2 / 0.1, the rest in one run with the own block
        ("strided", True, {}, {99: [0, 20, 40, 60, 80, *range(95, 100)]}),
        ("strided", False, {}, {1: [*range(6), 20, 40, 60, 80]}),
        ("strided", False, {}, {50: [0, 20, 40, *range(48, 53), 60, 80]}),
        ("strided", False, {}, {59: [0, 20, 40, *range(57, 63), 80]}),
        # each level on the multiples of its stride, a power of two
        ("hierarchical", True, {}, {5: [5], 50: [32, 44, 48, 49, 50]}),
        ("hierarchical", True, {}, {99: [32, 64, 80, 88, 92, 94, *range(96, 100)]}),
        ("hierarchical", False, {}, {50: [32, 40, 44, 48, 49, 50, 51, 52, 56, 64]}),
        # a window replaces the sparsity: in tokens, rounded up to blocks, with the diagonal
        ("local-window", True, {"window": 33}, {50: [48, 49, 50]}),
        ("local-window", False, {"window": 48}, {50: [49, 50, 51], 0: [0, 1, 2]}),
        ("local-window", False, {"window": 9999}, {3: range(100)}),
        ("sink-window", True, {"special": 17, "window": 32}, {50: [0, 1, 49, 50], 2: [0, 1, 2]}),
        ("global-local", False, {"special": 16, "window": 48}, {50: [0, 49, 50, 51]}),
    ],
)
def test_rows_that_each_pattern_keeps(
    pattern: str, causal: bool, options: dict[str, int], rows: dict[int, Collection[int]]
) -> None:
    """Of 100 blocks at sparsity 0.9."""
    layout = make_layout(pattern, 1600, 16, 0.9, causal, **options)
    assert {i: layout.row(i).tolist() for i in rows} == {i: [*kept] for i, kept in rows.items()}


def test_random_keeps_a_window_and_reaches_everywhere() -> None:
    rows = [make_layout("random", 1600, 16, 0.9, True, seed).row(99).tolist() for seed in range(60)]
    assert all(row[-5:] == [95, 96, 97, 98, 99] for row in rows)
    assert len({block for row in rows for block in row[:-5]}) > 85


def test_indices_are_everywhere_equally_often() -> None:
    """But for the own block, which is always kept."""
    rows = [make_layout("indices", 800, 8, 0.8, True, seed).row(99) for seed in range(400)]
    times = np.bincount(np.concatenate(rows), minlength=100)
    assert times[99] == 400
    # of 400 draws of 19 blocks from 99: 77 times each, with a standard deviation of 8
    assert 77 - 40 < times[:99].min() <= times[:99].max() < 77 + 40


def sides(kept: np.ndarray, i: int) -> list[np.ndarray]:
    """Distances of the kept blocks before row i and after it, ascending, from 0."""
    return [np.concatenate(([0], i - kept[kept < i][::-1])), np.append(0, kept[kept > i] - i)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sparsity", [0.5, 0.992])
def test_dilated_sparse_strides_grow(sparsity: float, causal: bool) -> None:
    """Up to rounding to full blocks, and as far as the farthest visible block."""
    layout = make_layout("dilated-sparse", 16_000, 16, sparsity, causal)
    for i in (0, 300, 500, 997, 999):
        for room, distances in zip((i, 999 - i), sides(layout.row(i), i), strict=True):
            gaps = np.diff(distances)
            assert (np.diff(gaps) >= -1).all()
            if len(gaps) > 2:
                assert distances[-1] == room
                assert gaps[0] <= 2 + gaps[-1] / 4


WITHOUT_GLOBALS = "use global-local or sink-window"
WITHOUT_WINDOW = "use global-local, local-window, sink-window or strided"


@pytest.mark.parametrize(
    ("patterns", "options", "message"),
    [
        (["local-windows"], {}, "unknown pattern 'local-windows'; did you mean 'local-window'"),
        (["strided"], {"sparsity": 1.0}, r"outside \[0, 1\); 0.99 keeps one block in a hundred"),
        (WITH_SPECIAL, {"special": 101}, "globals=101 is more than the 100 tokens"),
        (PATTERNS.keys() - {*WITH_SPECIAL}, {"special": 5}, WITHOUT_GLOBALS),
        (PATTERNS.keys() - {*WITH_WINDOW}, {"window": 20}, WITHOUT_WINDOW),
        (WITH_WINDOW, {"window": 9}, "window of 9 tokens .* the minimum is 10"),
        (["strided"], {"window": 101}, r"10 blocks is more than the 5 .* 50 tokens"),
    ],
)
def test_options_that_a_pattern_does_not_support_are_refused(
    patterns: Collection[str], options: dict[str, Any], message: str
) -> None:
    given = {"seq_len": 100, "block": 10, "sparsity": 0.5, "causal": False, **options}
    for pattern in patterns:
        with pytest.raises((UserError, UnsupportedError), match=message):
            make_layout(pattern, **given)


@each
@pytest.mark.parametrize("causal", [False, True])
def test_millions_of_tokens_take_little_memory(pattern: str, causal: bool) -> None:
    """4M tokens in 32k rows of 16: a dense table of blocks would be 1 GiB of bytes, and one int64
    of each kept block 4 MiB."""
    special = special_of(pattern, 128)
    tracemalloc.start()
    try:
        layout = make_layout(pattern, 2**22, 128, 1 - 16 / 2**15, causal, 0, special)
        assert layout.visible_pairs > 0
        assert layout.block_density > 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if not causal:
        full = 2**15 - 16 if pattern == "global-local" else 0
        assert len(layout.indices) == 16 * 2**15 + full
    assert peak < 16 * 2**20
