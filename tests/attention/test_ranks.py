"""The contract over several ranks, for all implementations that support them.

A new implementation is tested with its default options without a change here; other options are
a line in `options_at`. The joined results of all ranks are compared with the definition.
"""

import pickle
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.model import Workload
from longseq_bench.core.units import divisors
from longseq_bench.distributed.group import Group
from longseq_bench.testing.definition import (
    Options,
    compute_reference,
    count_pairs,
    make_inputs,
    relative_error,
)
from longseq_bench.worker.check import TOLERANCE
from tests.attention.definition import MANY, SEGMENTS
from tests.attention.jobs import Case, PassResult, delayed, halves, passes, take
from tests.ranks import Ranks

HEAD_DIM = 16
WORLDS = (2, 3, 4)
LARGE = 8

MISSING = {
    library: "" if find_spec(library) else f"{library} is not installed"
    for library in ("deepspeed", "fairscale")
}
"""Reasons why transports of the ring can't be tested here."""

pytestmark = pytest.mark.usefixtures("one_thread")


def options_at(name: str, world: int) -> list[Options]:
    """Return the options with which an implementation is tested."""
    if name == "ring":
        rings: list[Options] = [
            {"order": "contiguous"},
            {"order": "striped"},
            {"order": "contiguous", "queries": "full"},
            {"order": "striped", "queries": "full", "chunk": 7},
            {"chunk": 7},
            {"wire_dtype": "bfloat16", "order": "striped"},
            {"wire_dtype": "float16", "queries": "full", "chunk": 9},
        ]
        transports: list[Options] = [{"transport": name, "chunk": 20} for name in MISSING]
        if world == 3:
            return [{}, *rings, *transports]
        return [{}, *rings[2 * (world == 4) :: 4], transports[world == 4]]
    if name == "collective":
        gathers: list[Options] = [{"chunk": 30}, {"order": "striped", "chunk": 30}]
        return [{}, *gathers, {"order": "contiguous"}][: 4 if world == 3 else 2]
    if name == "usp":
        return [{}, *({"ulysses": d} for d in divisors(world))]
    if name == "head-parallel":
        return [{}, {"sequence_parallel": True}]
    if name == "ddp":
        return [{}, {"inner": "ring"}]
    if name in ("dilated", "hilbert"):
        in_tiles: Options = {"segments": (24, 100), "dilation": (1, 3), "kernel": "aten-flash-cpu"}
        rates = [*SEGMENTS[:: 1 if name == "dilated" else 2], in_tiles]
        return rates if world == 3 else rates[2 * (world == 4) :: 4]
    if name == "block-sparse":
        patterns: list[Options] = [
            {"block": 8, "sparsity": 0.6, "pattern": pattern}
            for pattern in ("local-window", "global-local")
        ]
        places: list[Options] = [
            {"block": 5, "sparsity": 0.5, "pattern": "strided", "placement": "load-balanced"},
            {"block": 4, "sparsity": 0.7, "placement": "hierarchical", "ranks_per_node": 2},
            {"block": 8, "sparsity": 0.6, "pattern": "indices", "kernel": "torch"},
        ]
        every: list[Options] = [*patterns, *places]
        return every if world == 3 else every[2 * (world == 4) :: 4]
    return [{}]


FINEST: dict[str, Options] = {"block-sparse": {"block": 4}}
"""Options for implementations that split the sequence into blocks."""


def named(name: str, world: int, options: Options) -> Any:
    words = [f"{key}={value}" for key, value in options.items()]
    reason = MISSING.get(options.get("transport", ""))
    marks = [pytest.mark.skip(reason)] if reason else []
    return pytest.param(name, world, options, id="-".join([name, str(world), *words]), marks=marks)


EVERY = [named(n, w, o) for n in MANY for w in WORLDS for o in options_at(n, w)]
DEFAULTS = [named(n, w, FINEST.get(n, {})) for n in MANY for w in WORLDS]
SOME = [
    *(case for case in DEFAULTS if case.values[1] == 3),
    named("ring", 3, {"order": "contiguous", "queries": "full", "chunk": 7}),
    named("ring", 2, {"wire_dtype": "bfloat16", "order": "striped", "chunk": 7}),
    named("ring", 3, {"transport": "deepspeed", "chunk": 7}),
    named("collective", 3, {"order": "striped", "chunk": 20}),
    named("usp", 4, {"ulysses": 2}),
    named("head-parallel", 3, {"sequence_parallel": True}),
    named("dilated", 3, {"segments": (24, 100), "dilation": (1, 3)}),
    named("block-sparse", 2, {"block": 4, "placement": "load-balanced"}),
]
MODULES = [
    named("ring", 2, {"transport": "fairscale"}),
    named("ring", 3, {"transport": "fairscale", "queries": "full"}),
]
defaults = pytest.mark.parametrize(("name", "world", "options"), [*DEFAULTS, *MODULES])
some = pytest.mark.parametrize(("name", "world", "options"), [*SOME, *MODULES])
causality = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])


def in_turn(name: str, cases: list[Any], values: dict[str, Any]) -> Any:
    """Parametrize with cases and another value: each with default options, else in turn."""
    both = [
        pytest.param(*case.values, value, id=f"{case.id}-{word}", marks=case.marks)
        for i, case in enumerate(cases)
        for j, (word, value) in enumerate(values.items())
        if i % len(values) == j or (case.values[1] == 3 and not case.values[2])
    ]
    return pytest.mark.parametrize(("name", "world", "options", name), both)


def workload(name: str, world: int, tokens: int, grouped: bool = False, **fields: Any) -> Workload:
    """Two key heads per rank (grouped: one), and a larger batch for ddp."""
    heads = 2 * min(world, 4)
    shape = {"heads": heads, "kv_heads": heads // 2 if grouped else heads, "head_dim": HEAD_DIM}
    if world == LARGE:
        shape = {"heads": LARGE, "kv_heads": LARGE, "head_dim": HEAD_DIM}
    batch = world + 1 if name == "ddp" else 2
    return Workload(seq_len=tokens, **{**shape, "batch": batch, **fields})


def run_cases(ranks: Ranks, world: int, cases: list[Case]) -> list[list[PassResult]]:
    """Return for each case the results of all ranks."""
    by_rank = [pickle.loads(answer) for answer in ranks(world, passes, cases)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def run_case(ranks: Ranks, world: int, case: Case) -> list[PassResult]:
    return run_cases(ranks, world, [case])[0]


def unconnected(case: Case, world: int, rank: int = 0) -> Attention:
    """Return the attention of a rank, for its visible pairs and its shard."""
    return IMPLEMENTATIONS.get(case.name)(case.workload, Group(rank, world), **case.options)


def parts(shard: Any) -> dict[str, tuple[range, range, np.ndarray]]:
    queries = (shard.batch, shard.heads, shard.queries)
    keys = (shard.batch, shard.kv_heads, shard.keys)
    return {"out": queries, "q": queries, "k": keys, "v": keys}


def joined(results: list[PassResult], name: str, like: Tensor) -> Tensor:
    """Join a tensor of all ranks; each element is on one rank or on all."""
    full = torch.full(like.shape, torch.nan, dtype=like.dtype)
    copies = torch.zeros(like.shape, dtype=torch.int64)
    for one in results:
        batch, heads, tokens = parts(one.shard)[name]
        index = np.ix_(batch, heads, tokens)
        tensor = one.out if name == "out" else one.gradients[name]
        assert tensor.shape[:3] == (len(batch), len(heads), len(tokens))
        full[index] = tensor.to(like.dtype)
        copies[index] += 1
    assert copies.unique().tolist() in ([1], [len(results)])
    return full


def assert_right(case: Case, results: list[PassResult]) -> None:
    """Check results and coverage against the reference of a single process (fault 8), sent bytes
    and work against the formulas, and that no pair was computed twice (with full queries: once on
    every rank)."""
    world, w = len(results), case.workload
    options = {n: value for n, value in case.options.items() if n != "ulysses"}
    alone = IMPLEMENTATIONS.get(case.name)(w, Group.alone(), **options)
    pairs = count_pairs(alone)
    total = int(pairs.sum()) * w.batch
    matrices = results[0].projections
    expected = compute_reference(pairs, w, matrices)
    allowed = TOLERANCE[results[0].tolerance_of]
    for rank, one in enumerate(results):
        assert one.sent == one.formula, f"rank {rank} sent {one.sent}, not {one.formula}"
        if alone.is_exact:
            share = unconnected(case, world, rank).work_share()
            assert share == pytest.approx(one.pairs / total, rel=1e-12)
        assert one.out.dtype == getattr(torch, w.dtype)
        assert {"out", *one.gradients} == expected.keys()
        for n, matrix in one.projections.items():
            assert torch.equal(matrix, matrices[n]), f"rank {rank} has another W{n}"
        for n, tensor in {"out": one.out, **one.gradients}.items():
            index = parts(one.shard).get(n)
            own = expected[n] if index is None else take(expected[n], *index)
            scale = max(float(expected[n].abs().max()), 0.1)
            assert relative_error(tensor, own, scale) < allowed, f"{n} of rank {rank} of {case}"
    for n in expected.keys() & {"out", "q", "k", "v"}:
        assert torch.isfinite(joined(results, n, expected[n])).all()
    copies = world if case.options.get("queries") == "full" else 1
    assert sum(one.pairs for one in results) == copies * total


@in_turn("causal", EVERY, {"both-ways": False, "causal": True})
def test_ranks_together_equal_the_reference(
    ranks: Ranks, name: str, world: int, options: Options, causal: bool
) -> None:
    """Faults 4 and 8, forward and backward: 41 and 67 are not multiples of the number of ranks;
    `fine` has small pieces, transfers and tiles, and the first options have other lengths too."""
    shapes = [(41, causal, "train", True)]
    if options == options_at(name, world)[0]:
        shapes.append((64, True, "train", False) if causal else (67, True, "forward", False))
    cases = [
        Case(name, options, workload(name, world, tokens, grouped, causal=causal, mode=mode), fine)
        for tokens, grouped, mode, fine in shapes
    ]
    for case, results in zip(cases, run_cases(ranks, world, cases), strict=True):
        assert_right(case, results)


TAKE_V_HEAD_DIM = [
    case for case in SOME if IMPLEMENTATIONS.get(str(case.values[0])).takes_v_head_dim
]


@in_turn("causal", TAKE_V_HEAD_DIM, {"both-ways": False, "causal": True})
def test_a_v_head_dim_of_its_own_and_sinks_equal_the_reference(
    ranks: Ranks, name: str, world: int, options: Options, causal: bool
) -> None:
    """Blocks of k and v, of their gradients and of the output have different sizes. Ranks add a
    sink once, and the gradients of their rows of it."""
    shape = {"v_head_dim": 8, "causal": causal}
    cases = [
        Case(name, options, workload(name, world, 67, True, mode="forward", **shape)),
        Case(
            name, options, workload(name, world, 41, False, mode="train", **shape, sink=True), True
        ),
    ]
    for case, results in zip(cases, run_cases(ranks, world, cases), strict=True):
        assert_right(case, results)


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(8, 2, 4), (6, 1, 3), (4, 1, 2)])
@pytest.mark.parametrize("name", ["ulysses", "usp"])
def test_ranks_that_share_a_kv_head_sum_its_gradient(
    ranks: Ranks, name: str, heads: int, kv_heads: int, world: int
) -> None:
    options: Options = {"ulysses": world} if name == "usp" else {}
    shape = {"heads": heads, "kv_heads": kv_heads, "mode": "train"}
    shapes = (
        {"causal": True},
        {"mask": "sliding-window:24", "sink": True},
        {"dtype": "bfloat16", "v_head_dim": 8},
    )
    cases = [
        Case(name, options, workload(name, world, 67, **shape, **more), fine=i == 0)
        for i, more in enumerate(shapes)
    ]
    for case, results in zip(cases, run_cases(ranks, world, cases), strict=True):
        assert_right(case, results)


@in_turn("dtype", SOME, {dtype: dtype for dtype in ("bfloat16", "float16")})
def test_half_precision_equals_the_reference(
    ranks: Ranks, name: str, world: int, options: Options, dtype: str
) -> None:
    sink = dtype == "float16" and name != "ddp"  # its inner attention has none
    w = workload(
        name, world, 41, True, causal=dtype == "bfloat16", mode="train", dtype=dtype, sink=sink
    )
    case = Case(name, options, w, fine=dtype == "bfloat16")
    assert_right(case, run_case(ranks, world, case))


@pytest.mark.parametrize("name", MANY)
def test_eight_ranks_equal_the_reference(ranks: Ranks, name: str) -> None:
    w = workload(name, LARGE, 131, causal=True, mode="train")
    case = Case(name, FINEST.get(name, {}), w)
    results = run_case(ranks, LARGE, case)
    assert_right(case, results)
    for rank, one in enumerate(results):  # inputs are drawn before ranks are connected
        shard = unconnected(case, LARGE, rank).shard
        for field in ("batch", "heads", "kv_heads"):
            assert getattr(shard, field) == getattr(one.shard, field)
        assert shard.queries.tolist() == one.shard.queries.tolist()
        assert shard.keys.tolist() == one.shard.keys.tolist()


@defaults
def test_one_or_two_tokens_per_rank(ranks: Ranks, name: str, world: int, options: Options) -> None:
    """As many tokens as ranks and a few more: every rank has a token."""
    if name in FINEST:
        options = {**options, "block": 1}
    cases = [
        Case(name, options, workload(name, world, world + more, True, causal=causal, mode="train"))
        for more, causal in ((0, True), (1, False))
    ]
    for case, results in zip(cases, run_cases(ranks, world, cases), strict=True):
        assert_right(case, results)


@some
def test_the_future_never_reaches_the_past(
    ranks: Ranks, name: str, world: int, options: Options
) -> None:
    """Fault 3, bit for bit, and no NaN on a late rank."""
    w = workload(name, world, 67, True, causal=True)
    futures = (None, 1, 33, 66)
    cases = [Case(name, options, w, future=future) for future in futures]
    like = make_inputs(w)[0]
    before, *after = (joined(p, "out", like) for p in run_cases(ranks, world, cases))
    for token, out in zip(futures[1:], after, strict=True):
        assert torch.isfinite(out).all()
        assert torch.equal(out[:, :, :token], before[:, :, :token])
        assert not torch.equal(out[:, :, token:], before[:, :, token:])


# ---- work and memory ---------------------------------------------------------------------------


@causality
def test_partitioned_queries_save_work_and_full_queries_do_not(ranks: Ranks, causal: bool) -> None:
    """Fault 14: with full q on every rank only keys and values are split, not the work."""
    world, tokens = 3, 120
    w = workload("ring", world, tokens, causal=causal)
    dense = w.batch * w.heads * (tokens * (tokens + 1) // 2 if causal else tokens**2)
    results = {
        queries: run_case(ranks, world, Case("ring", {"queries": queries}, w))
        for queries in ("partitioned", "full")
    }
    for one in results["full"]:
        assert one.pairs == dense
        assert sorted(one.shard.queries.tolist()) == list(range(tokens))
        assert one.out.shape[2] == tokens
        assert len(one.shard.keys) == tokens // world
    for one in results["partitioned"]:
        assert one.pairs == pytest.approx(dense / world, rel=0.02)
        assert len(one.shard.queries) == one.out.shape[2] == tokens // world
        assert one.shard.keys.tolist() == one.shard.queries.tolist()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["dilated", "hilbert"])
def test_blocks_are_sent_only_as_far_as_segments_need(ranks: Ranks, name: str, world: int) -> None:
    """Segments inside shards need no transfer. Segments over two shards need one hop if causality
    follows the walk; otherwise all hops, because blocks go round in one direction."""
    shard = 24
    for segment, causal, hops in (
        (8, False, 0),
        (24, False, 0),
        (48, False, world - 1),
        (48, True, 1 if name == "dilated" else world - 1),
        (4096, False, world - 1),
    ):
        w = workload(name, world, shard * world, causal=causal)
        options: Options = {"segments": (segment,), "dilation": (1,)}
        token = 2 * w.batch * w.kv_heads * HEAD_DIM * 4
        for one in run_case(ranks, world, Case(name, options, w)):
            assert one.sent == hops * shard * token, segment


# ---- halves of a pass --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "options"), [c for c in [*DEFAULTS, *MODULES] if c.values[1] == 3]
)
def test_each_half_of_a_pass_runs_alone(
    ranks: Ranks, name: str, world: int, options: Options
) -> None:
    """Without computation no kernel is called and everything is sent; without communication
    everything is computed. Neither changes later passes."""
    w = workload(name, world, 41, True, causal=True, mode="train")
    for answer in ranks(world, halves, Case(name, options, w, fine=True)):
        results: dict[str, PassResult] = pickle.loads(answer)
        full = results["full"]
        assert results["sending alone"].calls == 0
        assert results["sending alone"].sent == full.sent
        assert results["computing alone"].sent == 0
        assert results["computing alone"].calls == full.calls > 0
        assert results["computing alone"].pairs == full.pairs
        assert results["after sending"].equals(full)
        assert results["after computing"].equals(full)
        assert results["after computing"].sent == full.sent == full.formula


# ---- asynchronous transfers --------------------------------------------------------------------

ASYNCHRONOUS = [
    ("ring", 3, {"order": "zigzag", "chunk": 2}),
    ("ring", 4, {"order": "striped", "chunk": 2}),
    ("collective", 3, {"chunk": 6}),
    ("collective", 4, {"chunk": 8}),
]


@pytest.mark.parametrize(("name", "world", "options"), ASYNCHRONOUS)
def test_delays_change_nothing(ranks: Ranks, name: str, world: int, options: Options) -> None:
    """Fault 5: a buffer that is sent and received into, or a missing wait. Three times with random
    delays, bit by bit."""
    w = workload(name, world, 4 * world + 1, True, causal=True, mode="train", batch=1)
    assert ranks(world, delayed, Case(name, options, w), 3) == [[]] * world
