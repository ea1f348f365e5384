"""Masks: every implementation that takes them, on one rank and on several, against a definition
of its own."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.patterns.blocks import PATTERNS
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import Options, build_attention, count_pairs
from tests.attention.definition import MANY, REGISTERED
from tests.attention.jobs import Case
from tests.attention.test_ranks import assert_right, options_at, run_cases, workload
from tests.ranks import Ranks

TOKENS = 131
MASKS = {
    "sliding-window:1": lambda i, j: i == j,
    "sliding-window:24": lambda i, j: i - 24 < j <= i,
    "sliding-window:4k": lambda i, j: j <= i,
    "prefix:1": lambda i, j: j <= i,
    "prefix:50": lambda i, j: j <= i or j < 50,
    "prefix:1k": lambda i, j: True,
    "documents:1": lambda i, j: i == j,
    "chunked:31": lambda i, j: j <= i and i // 31 == j // 31,
    "documents:37": lambda i, j: j <= i and i // 37 == j // 37,
    "documents:1,13,90,27": lambda i, j: j <= i and number_of(i) == number_of(j),
    "full-documents:1,13,90,27": lambda i, j: number_of(i) == number_of(j),
    "full-documents:40": lambda i, j: i // 40 == j // 40,
}
"""The definition of each mask: whether a query at i sees a key at j, of 131 tokens.

Documents have one token, a prime number, and more than a rank holds.
"""

pytestmark = pytest.mark.usefixtures("one_thread")


def number_of(position: int) -> int:
    """Return the document of a position for lengths 1, 13, 90, 27."""
    return sum(position >= start for start in (1, 14, 104))


def defined(mask: str) -> Tensor:
    """Return the visible pairs by the definition, (N, N)."""
    pairs = [[bool(MASKS[mask](i, j)) for j in range(TOKENS)] for i in range(TOKENS)]
    return torch.tensor(pairs)


ALONE = ("sliding-window:1", "documents:1")
"""Masks of queries that see only themselves: the gradients of q and k are rounding errors, and
those of a module's matrices sums of them."""

TAKING = [n for n in REGISTERED if IMPLEMENTATIONS.get(n).takes_masks]
OWN: dict[str, list[Options]] = {
    "fused": [{"kernel": "aten-flash-cpu"}],
    "ring": [{"kernel": "native"}, {"kernel": "aten-flash-cpu"}],
    "collective": [{"kernel": "native"}, {"chunk": 50}],
    "ulysses": [{"kernel": "aten-flash-cpu"}],
    "sdpa": [{}, {"backend": "math"}],
    "block-sparse": [{"block": 16, "sparsity": 0.0}],
}
CASES = [
    pytest.param(name, options, id="-".join([name, *map(str, options.values())]))
    for name in TAKING
    if name != "flex"  # compiled: a test of its own
    for options in OWN.get(name, [{}])
]


EDGES = ("sliding-window:4k", "prefix:1", "prefix:1k", "documents:1")
"""Masks that equal a simpler one: for one implementation of each kind."""


@pytest.mark.parametrize(
    ("name", "options", "mask"),
    [
        pytest.param(*case.values, mask, id=f"{case.id}-{mask}")
        for case in CASES
        for mask in MASKS
        if mask not in EDGES or case.values[0] in ("ring", "sdpa", "dense", "block-sparse")
    ],
)
def test_one_rank_equals_the_definition(name: str, options: Options, mask: str) -> None:
    """Forward and gradients, with grouped heads and, for every second mask, full ones."""
    if name in ("data-parallel", "ddp") and mask in ALONE:
        pytest.skip("gradients of its matrices are rounding errors")
    kv_heads = 4 if [*MASKS].index(mask) % 2 else 2
    w = make_workload(TOKENS, kv_heads=kv_heads, mode="train", mask=mask)
    pairs = count_pairs(build_attention(name, options, w))
    assert torch.equal(pairs.bool(), defined(mask).expand_as(pairs))
    assert_equals_reference(name, options, w)


@pytest.mark.parametrize("kernel", ["native", "aten-flash-cpu"])
@pytest.mark.parametrize("mask", ["sliding-window:200", "documents:1,700,2,650", "prefix:1100"])
def test_longer_than_a_tile(mask: str, kernel: str) -> None:
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 8, "batch": 1}
    w = make_workload(1353, mode="train", mask=mask, **sizes)
    assert_equals_reference("ring", {"kernel": kernel}, w)


@pytest.mark.parametrize("name", ["ring", "collective", "ulysses", "dense", "sdpa"])
def test_half_precision_and_values_with_another_head_dim(name: str) -> None:
    for mask, fields in (
        ("sliding-window:24", {"dtype": "bfloat16"}),
        ("documents:37", {"dtype": "float16"}),
        ("sliding-window:24", {"v_head_dim": 8}),
        ("full-documents:40", {"v_head_dim": 8}),
    ):
        w = make_workload(TOKENS, kv_heads=2, mode="train", mask=mask, **fields)
        assert_equals_reference(name, {}, w)


def test_flex() -> None:
    """Not compiled; test_contract.py has a compiled case."""
    mask = "documents:37"
    w = make_workload(TOKENS, kv_heads=2, mask=mask, soft_cap=0.7)
    with torch.compiler.set_stance("force_eager"):
        assert_equals_reference("flex", {}, w)
    flex = IMPLEMENTATIONS.get("flex")(w, Group.alone())
    assert torch.equal(count_pairs(flex)[0].bool(), defined(mask))


@pytest.mark.parametrize(
    "mask", ["sliding-window:24", "documents:37", "full-documents:40", "prefix:50"]
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparse_patterns_lie_inside_a_mask(pattern: str, mask: str) -> None:
    """Blocks are chosen among those that the mask shows; of those that it cuts, hidden pairs are
    hidden."""
    for kernel in ("native", "torch"):
        options: Options = {"pattern": pattern, "sparsity": 0.5, "block": 8, "kernel": kernel}
        w = make_workload(TOKENS, kv_heads=2, mode="train", mask=mask)
        attention = build_attention("block-sparse", options, w)
        pairs = count_pairs(attention)[0].bool()
        assert not (pairs & ~defined(mask)).any()
        assert pairs.diagonal().all()
        layout, *_ = attention.layouts  # type: ignore[attr-defined]
        assert layout.visible_pairs == int(pairs.sum())
        asked = np.repeat(np.arange(layout.rows), layout.row_lengths)
        blocks = torch.nn.functional.pad(defined(mask), (0, 5, 0, 5)).unflatten(0, (-1, 8))
        shown = blocks.unflatten(2, (-1, 8)).any(3).any(1)
        assert shown[asked, layout.indices].all()
        assert layout.block_density == pytest.approx(len(layout.indices) / int(shown.sum()))
        assert_equals_reference("block-sparse", options, w)


# ---- several ranks -----------------------------------------------------------------------------


def rank_options(name: str, world: int) -> list[Options]:
    """Return the options of a case over ranks."""
    if name in ("ring", "collective"):
        return [{"order": o} for o in ("zigzag", "striped", "contiguous")[:world]]
    if name == "block-sparse":
        return [{"block": 8, "sparsity": 0.0}]
    return [{}] if name in ("ulysses", "head-parallel") else options_at(name, world)


ON_TWO = ("prefix:50", "documents:1,13,90,27")
ON_THREE = (*ON_TWO, "sliding-window:24", "full-documents:40")
OVER_RANKS = [
    pytest.param(name, world, mask, id=f"{name}-{world}-{mask}")
    for name in MANY
    if name in TAKING
    for world, some in ((2, ON_TWO[:1]), (3, ON_THREE))
    for mask in some
]


@pytest.mark.parametrize(("name", "world", "mask"), OVER_RANKS)
def test_ranks_together_equal_the_definition(
    ranks: Ranks, name: str, world: int, mask: str
) -> None:
    """Forward and gradients, full and grouped heads; the same pairs as on one rank, each once.

    With documents scores have a soft cap, but not in ddp, whose inner attention is torch's.

    `fine` has small pieces, transfers and tiles. The grouping and `fine` alternate over options and
    over masks at different rates, so that any two values occur together.
    """
    more: Any = {"mode": "train", "mask": mask}
    more |= {"soft_cap": 0.7} if mask.startswith("documents") and name != "ddp" else {}
    shapes = [workload(name, world, TOKENS, grouped, **more) for grouped in (True, False)]
    turn, every = ON_THREE.index(mask), rank_options(name, world)
    every = every * 2 if len(every) == 1 else every
    cases = [
        Case(name, options, shapes[(i + turn // 2) % 2], fine=(i + turn // 3) % 2 == 1)
        for i, options in enumerate(every)
    ]
    for case, results in zip(cases, run_cases(ranks, world, cases), strict=True):
        attention = IMPLEMENTATIONS.get(name)(case.workload, Group(0, world), **case.options)
        pairs = count_pairs(attention)
        assert torch.equal(pairs.bool(), defined(mask).expand_as(pairs))
        assert_right(case, results)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in REGISTERED if n not in TAKING])
def test_others_say_that_they_take_no_mask(name: str) -> None:
    w = Workload(seq_len=64, mask="sliding-window:8")
    with pytest.raises(UnsupportedError, match="mask sliding-window:8 is neither full nor causal"):
        IMPLEMENTATIONS.get(name)(w, Group.alone())


def test_a_stream_from_the_host_takes_no_mask() -> None:
    with pytest.raises(UnsupportedError, match="offload=host streams no mask"):
        build_attention("ring", {"offload": "host"}, Workload(seq_len=64, mask="documents:8"))
