"""The Triton kernels against dense masked softmax in float64, on a CPU.

They run in Triton's interpreter in a separate process, because it has to be chosen before the first
import of triton. Other tests compile the kernels, which needs no device.
"""

import importlib.util
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.triton_static import Variant, compile_variant
from longseq_bench.core.errors import KernelLimitError, UnsupportedError, UserError
from longseq_bench.core.workload import Scores
from longseq_bench.kernels.merge import merge_part, put_rows, take_rows
from longseq_bench.patterns.block_layout import BlockLayout
from longseq_bench.patterns.blocks import PATTERNS, make_layout
from tests.kernels.plain_attention import PassResult, assert_passed, inputs
from tests.kernels.triton_interpreter import LIMIT_S, Interpreted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed"),
]


# ---- passes in Triton's interpreter -------------------------------------------------------------


def run(
    layouts: Sequence[BlockLayout],
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    tile: tuple[int, int] | None = None,
    soft_cap: float | None = None,
) -> PassResult:
    from longseq_bench.kernels import triton_blocks

    chosen = triton_blocks.select_shape
    if tile:
        triton_blocks.select_shape = lambda *_: triton_blocks.Shape(*tile, 4, 1)
    try:
        kernel = triton_blocks.TritonBlocks(layouts, Scores(soft_cap=soft_cap))
        out, lse = kernel.forward(*tensors, True)
        assert lse is not None
        q, *keys = tensors
        return PassResult(out, lse, kernel.backward((grad_out, q, out, lse), tuple(keys)))
    finally:
        triton_blocks.select_shape = chosen


def assert_right(
    interpreted: Interpreted,
    layouts: Sequence[BlockLayout],
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    tile: tuple[int, int] | None = None,
    soft_cap: float | None = None,
) -> PassResult:
    got: PassResult = interpreted(run, layouts, tensors, grad_out, tile, soft_cap)
    assert_passed(got, layouts, tensors, grad_out, soft_cap)
    return got


# ---- results ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # random, which is drawn as indices are, has the tests below
    ("pattern", "causal"),
    [(name, i % 2 == 0) for i, name in enumerate(sorted(PATTERNS.keys() - {"random"}))],
)
def test_every_pattern_equals_its_definition(
    interpreted: Interpreted, pattern: str, causal: bool
) -> None:
    special = 16 if pattern in ("global-local", "sink-window") else 0
    layout = make_layout(pattern, 43, 16, 0.5, causal, special=special)
    assert_right(interpreted, [layout], *inputs(43, heads=(1, 1)))


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, torch.float32) for dim in (32, 80, 256)]
    + [(dim, dtype) for dtype in (torch.float16, torch.bfloat16) for dim in (64, 128)],
)
def test_every_head_dim_and_dtype(interpreted: Interpreted, dim: int, dtype: torch.dtype) -> None:
    """The kernel pads 80 to 128."""
    layout = make_layout("random", 38, 32, 0.3, dim != 64)
    assert_right(interpreted, [layout], *inputs(38, dtype, dim=dim))


@pytest.mark.parametrize(
    ("tile", "causal"), [((16, 32), False), ((32, 16), True), ((16, 64), True), ((64, 16), False)]
)
def test_tiles_smaller_than_a_block(
    interpreted: Interpreted, tile: tuple[int, int], causal: bool
) -> None:
    """A last block of 43 tokens ends inside a tile; another tile has no token."""
    layout = make_layout("strided", 64 + 43, 64, 0.0, causal)
    assert_right(interpreted, [layout], *inputs(64 + 43, heads=(1, 1)), tile)


@pytest.mark.parametrize(
    ("heads", "tokens", "soft_cap"), [((4, 2), 64, None), ((3, 3), 17, 0.7), ((6, 2), 33, 50.0)]
)
def test_batches_groups_lengths_and_soft_caps(
    interpreted: Interpreted, heads: tuple[int, int], tokens: int, soft_cap: float | None
) -> None:
    layout = make_layout("random", tokens, 16, 0.5, heads != (6, 2))
    tensors, grad_out = inputs(tokens, heads=heads, batch=2)
    # scores up to 40 are where a cap of 50 bends
    tensors[0] *= 10 if soft_cap == 50 else 1
    assert_right(interpreted, [layout], tensors, grad_out, None, soft_cap)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_every_head_may_have_another_layout(interpreted: Interpreted, causal: bool) -> None:
    """With strides of every kind: every second head, heads next to channels, rows that are cut,
    an expanded gradient."""
    names = ["local-window", "random", "strided", "dilated-sparse"]
    layouts = [make_layout(p, 75, 16, 0.4 + 0.1 * i, causal) for i, p in enumerate(names)]
    (q, k, v), _ = inputs(75, heads=(4, 2))
    views = [
        torch.randn(1, 75, 8, 16)[:, :, ::2].transpose(1, 2),
        k.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([v, v], 3)[..., :16],
    ]
    assert_right(interpreted, layouts, views, torch.linspace(-1, 1, 16).expand(q.shape))


def run_split(*args: Any) -> tuple[PassResult, int, int]:
    """Run with lists split from two blocks on; also return the slots of rows and of columns."""
    from longseq_bench.kernels import triton_blocks, work_items

    names = {"SHORTEST_SPLIT": 2, "MEANS": 0, "ROWS_PER_SLOT": 0.01}
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, number in names.items():
            patch.setattr(work_items, name, number)
        slots = triton_blocks.TritonBlocks._slots

        def counted(kernel: Any, owner: Tensor, items: Any) -> Tensor:
            made.append(items.slots)
            return slots(kernel, owner, items)

        patch.setattr(triton_blocks.TritonBlocks, "_slots", counted)
        return run(*args), made[0], made[-1]


@pytest.mark.parametrize(
    ("dim", "causal", "is_shared"),
    [(64, True, False), (80, False, False), (80, True, True), (256, False, True)],
)
def test_long_rows_and_columns_are_split(
    interpreted: Interpreted, dim: int, causal: bool, is_shared: bool
) -> None:
    """Global tokens: the first rows and columns see everything; 75 tokens leave a short block."""
    names = ["global-local", "sink-window", "random", "strided"][: 1 if is_shared else 4]
    sizes = [16, 16, 0, 0]
    made = [
        make_layout(name, 75, 16, 0.3, causal, special=size)
        for name, size in zip(names, sizes, strict=False)
    ]
    tensors, grad_out = inputs(75, heads=(2, 1) if is_shared else (4, 2), dim=dim)
    got, row_slots, column_slots = interpreted(run_split, made, tensors, grad_out)
    assert row_slots >= 4
    assert column_slots >= 4
    assert_passed(got, made, tensors, grad_out)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_padding_items_change_nothing(interpreted: Interpreted, causal: bool) -> None:
    """The columns of the second head are never split, so its list is padded."""
    layouts = []
    for rows in ([range(row + 1) for row in range(5)], [[row] for row in range(5)]):
        indptr = np.cumsum([0, *(len(row) for row in rows)])
        keys = np.concatenate(rows).astype(np.int32)
        layouts.append(BlockLayout(75, 16, causal, indptr, keys))
    tensors, grad_out = inputs(75, heads=(2, 2))
    got, _, _ = interpreted(run_split, layouts, tensors, grad_out)
    assert_passed(got, layouts, tensors, grad_out)


# ---- offsets -----------------------------------------------------------------------------------

TOKEN_STRIDE = 5 * 2**25
"""Elements between two tokens: the 16 tokens of a tile span 2.5e9, more than 32 bits."""

LONG = 20
"""Tokens: the second block starts beyond 32 bits too."""


def far_apart(axis: int) -> tuple[PassResult, PassResult] | str:
    """Run a pass over tokens (axis 2) or heads (axis 1) that are far apart in memory."""
    layout = make_layout("local-window", LONG, 16, 0.0, True)
    tensors, grad_out = inputs(LONG, torch.float16, (3, 3))
    expected = run([layout], tensors, grad_out)
    try:
        storage = torch.empty(LONG * TOKEN_STRIDE, dtype=torch.float16)
    except RuntimeError as error:
        return str(error)
    strides = (1, 16, TOKEN_STRIDE, 1) if axis == 2 else (1, 2**30, 16, 1)
    views = []
    for i, t in enumerate((*tensors, grad_out)):
        view = storage.as_strided(t.shape, strides, i * 1024)
        view.copy_(t)
        views.append(view)
    return run([layout], views[:3], views[3]), expected


@pytest.mark.parametrize("axis", [2, 1], ids=["tokens", "heads"])
def test_offsets_are_wider_than_32_bits(interpreted: Interpreted, axis: int) -> None:
    """Seven gigabytes are reserved; only some hundred kilobytes are touched."""
    passed = interpreted(far_apart, axis)
    if isinstance(passed, str):
        pytest.skip(f"this machine does not reserve untouched memory: {passed}")
    got, expected = passed
    assert torch.equal(got.out, expected.out)
    for own, other in zip(got.grads, expected.grads, strict=True):
        assert torch.equal(own, other)


# ---- the kernel that moves rows and merges two softmaxes ----------------------------------------


def run_move(
    targets: list[Tensor], sources: list[Tensor], index: Tensor | None, mode: str
) -> list[Tensor]:
    from longseq_bench.kernels.triton_merge import move

    move(targets, sources, index, mode)  # type: ignore[arg-type]
    return targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_launch_merges_two_softmaxes(interpreted: Interpreted, dtype: torch.dtype) -> None:
    """Also where one side or both have seen no key, and for views of other strides."""
    torch.manual_seed(0)
    out, part = torch.randn(2, 3, 70, 80), torch.randn(2, 70, 3, 80).transpose(1, 2).to(dtype)
    lse, part_lse = torch.randn(2, 3, 70), torch.randn(2, 70, 3).transpose(1, 2)
    for at, sides in (
        (slice(0, 9), (lse,)),
        (slice(5, 20), (part_lse,)),
        (slice(30, 33), (lse, part_lse)),
    ):
        for side in sides:
            side[:, :, at] = -torch.inf
    out = torch.where((lse == -torch.inf)[..., None], 0.0, out)
    expected, expected_lse = out.clone(), lse.clone()
    merge_part(expected, expected_lse, part, part_lse)
    got_lse, got = interpreted(run_move, [lse, out], [part_lse, part], None, "merge")
    torch.testing.assert_close(got_lse, expected_lse)
    torch.testing.assert_close(got, expected)
    assert not got[:, :, 30:33].any()


@pytest.mark.parametrize("mode", ["take", "put", "add", "merge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_sets_are_moved_by_their_index(
    interpreted: Interpreted, dtype: torch.dtype, mode: str
) -> None:
    """Two sets of six heads; head 3 has the rows of head 0. Sums may have 16 bits."""
    torch.manual_seed(1)
    index = torch.randperm(256)[None, None, :, None].as_strided((2, 3, 40), (128, 1, 3))
    out, lse = torch.randn(1, 6, 256, 24).to(dtype), torch.randn(1, 6, 256)
    part, part_lse = torch.randn(2, 6, 40, 24).to(dtype), torch.randn(2, 6, 40)
    expected = [lse.clone(), out.clone()]
    if mode == "take":
        targets = [part_lse, part]
        expected = take_rows([lse, out], index)
        got = interpreted(run_move, targets, [lse, out], index, mode)
    else:
        if mode == "merge":
            merge_part(expected[1], expected[0], part, part_lse, index)
        else:
            put_rows(expected, [part_lse, part], index, add=mode == "add")
        got = interpreted(run_move, [lse, out], [part_lse, part], index, mode)
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_tensors_of_other_shapes_are_added_in_one_launch(interpreted: Interpreted) -> None:
    """Gradients of queries and of fewer keys of fewer heads, added to views of wide sums."""
    totals = [torch.ones(1, 4, 70, 80)[:, :, ::2], torch.ones(1, 2, 50, 24)]
    parts = [torch.randn(1, 35, 4, 80).transpose(1, 2), torch.randn(1, 2, 50, 24)]
    parts = [part.bfloat16() for part in parts]
    got = interpreted(run_move, totals, parts, None, "add")
    assert all(torch.equal(own, 1 + part.float()) for own, part in zip(got, parts, strict=True))


# ---- refusals ----------------------------------------------------------------------------------


def test_unsupported_calls_are_refused_with_the_reason() -> None:
    from longseq_bench.kernels import triton_blocks

    layout, other, odd = (
        make_layout("local-window", tokens, block, 0.0, True)
        for tokens, block in ((40, 16), (48, 16), (40, 24))
    )
    for layouts, dim, words in (
        ([odd], 16, "block of 16, 32, 64, 128 or 256 tokens, not 24"),
        ([layout], 8, "head_dim of 16 to 256 in steps of 16"),
        ([other], 16, "prepared for 4 query heads and 48 tokens"),
        ([layout] * 3, 16, "prepared for 3 query heads"),
    ):
        q = torch.zeros(1, 4, 40, dim)
        with pytest.raises((UnsupportedError, UserError), match=words):
            triton_blocks.TritonBlocks(layouts).forward(q, q, q, False)


def test_a_tile_that_does_not_fit_is_replaced_by_a_smaller_one() -> None:
    from triton.runtime.errors import OutOfResources

    from longseq_bench.kernels.triton_tiles import run_fitting, select_shape

    def fit(room: int) -> tuple[int, int, int]:
        """Return the tile for a device with room for so many numbers."""

        def attempt(tile: Any) -> None:
            needed = tile.queries * tile.keys * tile.stages
            if needed > room:
                raise OutOfResources(needed, room, "shared memory")

        found = run_fitting(select_shape("forward", 128, 128, torch.bfloat16), attempt)
        return found.queries, found.keys, found.stages

    assert (fit(2**30), fit(64 * 64)) == ((64, 64, 3), (32, 64, 2))
    with pytest.raises(KernelLimitError, match="no tile is small enough"):
        fit(10)


def test_the_table_of_tiles_has_one_for_every_workload() -> None:
    from longseq_bench.kernels import triton_tiles

    lines = Path(triton_tiles.__file__).parents[1].joinpath("data/tiles.csv").read_text()
    rows = [line for line in lines.splitlines() if not line.startswith(("#", "kernel"))]
    assert len(triton_tiles._tiles()) == len(rows)  # no tile is given twice
    for workload in itertools.product(
        ("forward", "dq", "dkv"), triton_tiles.BLOCKS, (16, 80, 256), triton_tiles.DTYPES,
        (8, 9, 10, 12), (False, True), (False, True),
    ):  # fmt: skip
        shape = triton_tiles.select_shape(*workload)
        assert max(shape.queries, shape.keys) <= workload[1]


def test_a_launch_starts_what_was_compiled_by_its_handle() -> None:
    """But not for a tensor that begins elsewhere: for that Triton compiles the kernel again."""
    from triton.compiler import CompiledKernel

    from longseq_bench.kernels.triton_tiles import Launch

    calls: list[Any] = []

    class Made(CompiledKernel):  # type: ignore[misc]
        __init__ = __del__ = lambda _: None

        def __getitem__(self, grid: Any) -> Any:
            return lambda _, *args: calls.append(("handle", grid, *args))

    class Kernel:
        __name__, arg_names = "kernel", ("t", "size", "DIM")

        def __getitem__(self, grid: Any) -> Any:
            return lambda _, *args, **named: calls.append((*args, named)) or Made()

    launch, t = Launch(Kernel(), 5, [7], {"DIM": 64, "num_warps": 8}), torch.empty(32)
    for tensor in (t[1:], t, t, t[1:]):
        launch(tensor)
    first = (7, {"DIM": 64, "num_warps": 8})
    assert calls == [first, first, ("handle", (5, 1, 1), 7, 64), (7, 64, {"num_warps": 8})]


# ---- compiled kernels --------------------------------------------------------------------------


def compile_quietly(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "capability", "product"),
    [("forward", 90, "wgmma.mma_async"), ("dq", 80, "mma.sync")],
)
def test_the_kernels_compile_for_other_devices(
    tmp_path: Path, kernel: Any, capability: int, product: str
) -> None:
    """They use tensor cores and asynchronous loads, and nothing spills."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, compile_quietly, (str(tmp_path),)) as pool:
        variant = Variant(kernel, 64, causal=True)
        made = pool.submit(compile_variant, variant, capability).result(LIMIT_S)
    assert (made.spilled, made.product) == (0, product)
    assert (made.in_flight or 0) >= 2
