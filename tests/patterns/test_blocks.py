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
from longseq_bench.patterns import blocks
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import PATTERNS, WITH_SPECIAL, WITH_WINDOW, make_layout

NAMES = sorted(PATTERNS)
each = pytest.mark.parametrize("pattern", NAMES)


def special_of(pattern: str, tokens: int) -> int:
    return tokens if pattern in WITH_SPECIAL else 0


def rows_of(layout: BlockLayout) -> list[list[int]]:
    return [layout.row(i).tolist() for i in range(layout.rows)]


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
    for i, kept in enumerate(rows_of(layout)):
        visible = i + 1 if causal else layout.rows
        expected = visible if i < full else max(1, round((1 - sparsity) * visible))
        assert len(kept) == expected
        assert kept == sorted(set(kept))
        assert i in kept
        assert kept[0] >= 0
        assert kept[-1] < visible
    assert layout.block_density == pytest.approx(
        sum(map(len, rows_of(layout))) / sum(i + 1 if causal else layout.rows
                                             for i in range(layout.rows))
    )  # fmt: skip


def test_another_seed_draws_another_layout() -> None:
    seeds = (0, 0, 1, -5, 2**70)
    layouts = {make_layout("random", 4096, 32, 0.8, True, seed).indices.tobytes() for seed in seeds}
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


@each
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_does_not_depend_on_its_chunk(
    pattern: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = special_of(pattern, 40)
    whole = make_layout(pattern, 3000, 16, 0.7, causal, 3, special)
    monkeypatch.setattr(blocks, "CHUNK", 500)
    cut = make_layout(pattern, 3000, 16, 0.7, causal, 3, special)
    assert np.array_equal(whole.indices, cut.indices)
    assert np.array_equal(whole.indptr, cut.indptr)


def test_windows_keep_the_nearest_and_the_first_blocks() -> None:
    causal = make_layout("local-window", 1600, 16, 0.9, True)
    assert causal.row(50).tolist() == [46, 47, 48, 49, 50]
    both = make_layout("local-window", 1600, 16, 0.95, False)
    assert both.row(50).tolist() == [48, 49, 50, 51, 52]
    assert both.row(0).tolist() == [0, 1, 2, 3, 4]
    assert both.row(99).tolist() == [95, 96, 97, 98, 99]
    sinks = make_layout("sink-window", 1600, 16, 0.9, True, special=32)
    assert sinks.row(50).tolist() == [0, 1, 48, 49, 50]
    # global tokens are columns, and rows that see everything
    layout = make_layout("global-local", 1600, 16, 0.9, False, special=20)
    assert layout.row(0).tolist() == layout.row(1).tolist() == list(range(100))
    assert all(layout.row(i).tolist()[:2] == [0, 1] for i in range(100))
    assert layout.row(50).tolist()[2:] == list(range(46, 54))


@pytest.mark.parametrize("causal", [False, True])
def test_strided_is_a_window_and_columns_that_all_rows_share(causal: bool) -> None:
    """Ten of a hundred: half on the multiples of 2 / 0.1, the rest in one run with the own block.
    A short row has the first multiples only."""
    layout = make_layout("strided", 1600, 16, 0.9, causal)
    for i, kept in enumerate(rows_of(layout)):
        multiples = range(0, i + 1 if causal else 100, 20)
        on = [b for b in kept if b % 20 == 0]
        runs = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
        run = next(run.tolist() for run in runs if i in run)
        columns = min(len(multiples), len(kept) - 1)
        assert on == [*multiples[:columns]] or (on == [*multiples[:columns], i] and i % 20 == 0)
        assert set(kept) == set(multiples[:columns]) | set(run)
    assert layout.row(99).tolist() == [0, 20, 40, 60, 80, 95, 96, 97, 98, 99]
    if not causal:
        assert layout.row(50).tolist() == [0, 20, 40, 48, 49, 50, 51, 52, 60, 80]
        assert layout.row(59).tolist() == [0, 20, 40, 57, 58, 59, 60, 61, 62, 80]
        assert layout.row(1).tolist() == [0, 1, 2, 3, 4, 5, 20, 40, 60, 80]


def test_random_keeps_a_window_and_reaches_everywhere() -> None:
    rows = [make_layout("random", 1600, 16, 0.9, True, seed).row(99).tolist() for seed in range(60)]
    assert all(row[-5:] == [95, 96, 97, 98, 99] for row in rows)
    assert len({block for row in rows for block in row[:-5]}) > 85


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


def hierarchy(room: int, count: int, i: int, ahead: int) -> list[int]:
    """Level by level from the definition: the most levels of evenly many blocks that stay in the
    room, each the next multiples of its stride; ahead is 1 to the right of i, -1 to the left."""
    sizes = [count]
    while len(sizes) < count:
        levels = len(sizes) + 1
        more = [count // levels + (level < count % levels) for level in range(levels)]
        if sum(n << level for level, n in enumerate(more)) > room:
            break
        sizes = more
    strides = [2**level for level in range(len(sizes))]
    if len(sizes) == count > 1:
        top = max((room + 1).bit_length() - 2, 0)
        strides = [2 ** (level * top // (count - 1)) for level in range(count)]
    blocks, at = [], i
    for size, stride in zip(sizes, strides, strict=True):
        for _ in range(size):
            at += ahead
            while at % stride:
                at += ahead
            blocks.append(at)
    return blocks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.floats(0, 0.99), st.booleans(), st.data())
def test_hierarchical_is_its_definition(
    rows: int, sparsity: float, causal: bool, data: st.DataObject
) -> None:
    layout = make_layout("hierarchical", rows, 1, sparsity, causal)
    i = data.draw(st.integers(0, rows - 1))
    kept = layout.row(i).tolist()
    before = hierarchy(i, sum(b < i for b in kept), i, -1) if kept[0] < i else []
    after = hierarchy(rows - 1 - i, sum(b > i for b in kept), i, 1) if kept[-1] > i else []
    assert kept == [*before[::-1], i, *after]
    if not causal:
        # as many to both sides, or all that the shorter side has
        assert abs(len(before) - len(after)) <= 1 or min(len(before), len(after)) in (
            i,
            rows - 1 - i,
        )


WITHOUT_GLOBALS = "use global-local or sink-window"
WITHOUT_WINDOW = "use global-local, local-window, sink-window or strided"


@pytest.mark.parametrize(
    ("patterns", "options", "message"),
    [
        (["strided"], {"block": -3}, "block -3 is too small; the minimum is 1"),
        (["random"], {"seq_len": 0}, "sequence of 0 tokens"),
        (["local-windows"], {}, "unknown pattern 'local-windows'; did you mean 'local-window'"),
        (["strided"], {"sparsity": 1.0}, r"outside \[0, 1\); 0.99 keeps one block in a hundred"),
        (["strided"], {"sparsity": -0.1}, r"outside \[0, 1\); 0 skips nothing"),
        (["strided"], {"sparsity": 90}, r"outside \[0, 1\); 90 % would be 0.9"),
        (["strided"], {"sparsity": float("nan")}, "sparsity nan"),
        (WITH_SPECIAL, {"special": 101}, "globals=101 is more than the 100 tokens"),
        (PATTERNS.keys() - {*WITH_SPECIAL}, {"special": 5}, WITHOUT_GLOBALS),
        (PATTERNS.keys() - {*WITH_WINDOW}, {"window": 20}, WITHOUT_WINDOW),
        (WITH_WINDOW, {"window": 9}, "window of 9 tokens .* the minimum is 10"),
        (WITH_WINDOW, {"window": -20}, "window of -20 tokens .* the minimum is 10"),
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


@pytest.mark.parametrize("sparsity", [0.0, 0.999])
def test_a_window_replaces_sparsity(sparsity: float) -> None:
    """In tokens, rounded up to blocks, the diagonal block included."""
    make = make_layout
    causal = make("local-window", 1600, 16, sparsity, True, window=33)
    assert causal.row(50).tolist() == [48, 49, 50]
    both = make("local-window", 1600, 16, sparsity, False, window=48)
    assert both.row(50).tolist() == [49, 50, 51]
    assert both.row(0).tolist() == [0, 1, 2]
    assert both.block_density == 0.03
    sink = make("sink-window", 1600, 16, sparsity, True, special=17, window=32)
    assert sink.row(50).tolist() == [0, 1, 49, 50]
    assert sink.row(2).tolist() == [0, 1, 2]
    global_local = make("global-local", 1600, 16, sparsity, False, special=16, window=48)
    assert global_local.row(50).tolist() == [0, 49, 50, 51]
    assert len(global_local.row(0)) == 100
    assert len(make("local-window", 1600, 16, sparsity, False, window=9999).row(3)) == 100


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
