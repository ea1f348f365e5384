"""Steps of decoding: masks, ranks, refusals, and what the checks see.

The contract (longseq_bench/testing) compares every implementation on one rank with the definition.
"""

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.cost import attention_flops, floor_bytes, floor_tokens, mask_pairs
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.meters.memory import StoragePeak
from longseq_bench.patterns.blocks import make_layout
from longseq_bench.patterns.visible_keys import visible_keys
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import (
    Options,
    build_attention,
    compute_reference,
    count_pairs,
    make_inputs,
    relative_error,
)
from longseq_bench.worker.check import TOLERANCE
from tests.attention.definition import REGISTERED
from tests.attention.jobs import Case, PassResult, passes
from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = ("sliding-window:24", "sliding-window:1", "prefix:50", "chunked:37", "full-documents:40")
TAKING = {"sdpa", "ring", "block-sparse"}


def decode(tokens: int = 100, new_tokens: int = 1, **fields: Any) -> Workload:
    return make_workload(tokens, mode="decode", new_tokens=new_tokens, **fields)


@pytest.mark.parametrize("name", REGISTERED)
def test_an_implementation_takes_steps_of_decoding_or_refuses_them(name: str) -> None:
    kind = IMPLEMENTATIONS.get(name)
    assert kind.takes_decode == (name in TAKING)
    if name not in TAKING:
        with pytest.raises(UnsupportedError, match=r"mode decode: this .* use ring"):
            kind(decode(), Group.alone())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("ring", {}), ("ring", {"kernel": "aten-flash-cpu"}), ("sdpa", {})],
    ids=str,
)
def test_masks(name: str, options: Options, mask: str) -> None:
    for new_tokens, dtype in ((1, "float32"), (5, "float16")):
        w = decode(100, new_tokens, kv_heads=2, mask=mask, dtype=dtype)
        assert_equals_reference(name, options, w)
        visible, queries = visible_keys(w), np.asarray(w.queries)
        assert mask_pairs(w) == int(visible.multiplicity(queries, np.arange(100)).sum())


def test_a_latent_of_many_heads() -> None:
    """In every dtype, and with a mask; the compiled kernel takes it as one tensor."""
    for name, dtype in itertools.product(("ring", "sdpa"), ("float32", "float16")):
        shape = {"latent": "64+16/80", "heads": 18, "head_dim": 80, "dtype": dtype}
        assert_equals_reference(name, {}, decode(333, 2, mask="sliding-window:150", **shape))


def test_values_with_another_head_dim() -> None:
    for name, v_head_dim in itertools.product(("ring", "sdpa"), (8, 40)):
        assert_equals_reference(name, {}, decode(90, 2, kv_heads=2, v_head_dim=v_head_dim))


# ---- ranks -------------------------------------------------------------------------------------


def assert_joins(results: list[PassResult], w: Workload) -> None:
    """Every rank has the whole output of the definition, and sent what the formula says."""
    attention = build_attention("ring", {}, w)
    sinks = {} if attention.sinks is None else {"sink": attention.sinks}
    expected = compute_reference(count_pairs(attention), w, sinks)["out"]
    for one in results:
        assert one.out.shape == (w.batch, w.heads, w.new_tokens, w.v_head_dim)
        assert relative_error(one.out, expected) < TOLERANCE[w.dtype]
        row = w.v_head_dim + 1
        bytes_sent = (len(results) - 1) * 4 * w.batch * w.heads * w.new_tokens * row
        assert one.sent == one.formula == bytes_sent
    assert sum(len(one.shard.keys) for one in results) == w.seq_len


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_merge_their_parts_of_the_cache(ranks: Ranks, world: int) -> None:
    """Both groupings, one and three new tokens, every dtype; masks that leave ranks no key; the
    sink is added once."""
    workloads = [
        decode(101, m, kv_heads=kv_heads, dtype=dtype, **mask)
        for m, (kv_heads, dtype), mask in itertools.product(
            (1, 3), ((4, "float32"), (2, "bfloat16"), (1, "float16")),
            ({}, {"causal": True}, {"mask": "sliding-window:5", "sink": True}),
        )
    ]  # fmt: skip
    workloads += [decode(101, m, latent="12+4/9", causal=True, dtype="bfloat16") for m in (1, 3)]
    orders = itertools.cycle(("zigzag", "contiguous", "striped"))
    cases = [Case("ring", {"order": next(orders)}, w) for w in workloads]
    by_rank = [pickle.loads(found) for found in ranks(world, passes, cases)]
    for i, w in enumerate(workloads):
        assert_joins([results[i] for results in by_rank], w)


def test_work_is_shared_by_the_keys_that_are_seen() -> None:
    w = decode(100, 2, mask="sliding-window:30")
    shares = [
        IMPLEMENTATIONS.get("ring")(w, Group(rank, 4), order="contiguous").work_share()
        for rank in range(4)
    ]
    assert shares == [0, 0, pytest.approx(11 / 60), pytest.approx(49 / 60)]


# ---- block-sparse ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "options", [{"sparsity": 0.5}, {"window": 48, "globals": 16}, {"sparsity": 0.0}], ids=str
)
def test_runs_of_new_tokens_are_those_of_the_whole_layout(options: Options, causal: bool) -> None:
    """New tokens that lie in one block, in two blocks, and in all."""
    for tokens, new_tokens in ((300, 1), (300, 30), (17, 17)):
        sparsity, window = options.get("sparsity", 0.9), options.get("window")
        special = options.get("globals", 32 if tokens > 32 else 16)
        sizes = "sink-window", tokens, 16, sparsity, causal, 0, special, window
        rows, layout = make_layout(*sizes, first_query=tokens - new_tokens), make_layout(*sizes)
        queries, keys = np.arange(tokens - new_tokens, tokens), np.arange(tokens)
        expected = layout.multiplicity(queries, keys)
        assert np.array_equal(rows.multiplicity(queries, keys), expected)
        assert rows.visible_pairs == expected.sum()
        assert list(rows.row_lengths[queries[0] // 16 :]) == list(
            layout.row_lengths[queries[0] // 16 :]
        )
        runs = rows.runs()
        assert len(runs) <= 2
        in_runs = sum((keys >= a[:, None]) & (keys < b[:, None]) for a, b in runs)
        assert np.array_equal(in_runs, expected)
        own = {"pattern": "sink-window", "block": 16, "globals": special, **options}
        assert_equals_reference(
            "block-sparse", own, decode(tokens, new_tokens, causal=causal, kv_heads=2)
        )


def test_a_sparse_step_reads_sinks_and_window_alone() -> None:
    options = {"pattern": "sink-window", "block": 16, "globals": 32, "window": 64}
    attention = build_attention("block-sparse", options, decode(4096, kv_heads=2))
    per_token = floor_bytes(attention.workload) // 4096
    assert attention.bytes_to_read() == (32 + 64) * per_token
    assert attention.cost().flops == attention_flops(attention.workload, 96)
    assert build_attention("ring", {}, attention.workload).bytes_to_read() == 4096 * per_token


@pytest.mark.parametrize(("tokens", "new_tokens", "head_dim"), [(301, 1, 64), (330, 40, 80)])
def test_a_step_sees_the_lists_that_a_prefill_has(
    tokens: int, new_tokens: int, head_dim: int
) -> None:
    """New tokens in one block and in three, the last one short."""
    options: Options = {"pattern": "indices", "block": 16, "sparsity": 0.6, "seed": 3}
    sizes: dict[str, Any] = {"causal": True, "kv_heads": 2, "head_dim": head_dim}
    w = decode(tokens, new_tokens, **sizes)
    attention = build_attention("block-sparse", options, w)
    pairs = count_pairs(attention)
    prefill = build_attention("block-sparse", options, make_workload(tokens, **sizes))
    assert torch.equal(pairs, count_pairs(prefill)[:, -new_tokens:])
    assert not torch.equal(pairs[1], pairs[2])  # of another KV head
    assert attention.kept_pairs() == float(pairs.sum()) / w.heads
    assert attention.measures()["density_achieved"] == pytest.approx(0.4, abs=0.5 * 16 / 260)
    seen = int((pairs[[0, 2]] > 0).any(1).sum())
    assert attention.bytes_to_read() == seen * floor_bytes(w) // tokens // 2
    assert_equals_reference("block-sparse", options, w)


def test_a_sparse_step_over_a_latent_copies_its_values_with_its_keys() -> None:
    """As DeepSeek's sparse attention decodes: one list for all heads."""
    for pattern in ("indices", "sink-window"):
        options: Options = {"pattern": pattern, "block": 16, "sparsity": 0.6}
        w = decode(5000, 2, causal=True, latent="64+16/80", heads=4, head_dim=80)
        assert_equals_reference("block-sparse", options, w)
        attention, qkv = build_attention("block-sparse", options, w), make_inputs(w)
        with (meter := StoragePeak("cpu")):
            attention(*qkv)
        # the cache counts as well: the meter sees views of it
        assert meter.peak < floor_bytes(w) + 1.2 * attention.bytes_to_read()


def test_a_quantised_cache_is_counted_with_its_scales() -> None:
    """Two scales of 4 bytes for each of 2 · 2 KV heads and 128 tokens, or some."""
    w = decode(300, kv_heads=2, kv_dtype="fp8", v_head_dim=8)
    head = 300 * (16 + 8) + 3 * 2 * 4
    assert floor_bytes(w) == build_attention("ring", {}, w).bytes_to_read() == 4 * head
    assert floor_tokens(w, 4 * head) == 300
    assert floor_tokens(w, 4 * head - 1) == 299
    options = {"pattern": "sink-window", "block": 16, "globals": 32, "window": 64}
    sparse = build_attention("block-sparse", options, decode(300, kv_heads=2, kv_dtype="fp8"))
    assert sparse.bytes_to_read() == 4 * (92 * 32 + 2 * 4)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("ring", {"queries": "full"}, "queries=full has no meaning with mode decode"),
        ("ring", {"chunk": 64}, "chunk=64 has no meaning"),
        ("ring", {"wire_dtype": "bfloat16"}, "wire_dtype=bfloat16 has no meaning"),
        ("ring", {"offload": "host"}, "offload=host has no meaning"),
        ("ring", {"kernel": "aten-flash-cpu", "latent": "12+4"}, "can.t scale a latent"),
        ("block-sparse", {"pattern": "sink-window", "kernel": "torch"}, "use auto"),
        ("block-sparse", {"pattern": "indices"}, "several new tokens need causal=true"),
    ],
    ids=str,
)
def test_refusals(name: str, options: Options, reason: str) -> None:
    own = {n: value for n, value in options.items() if n != "latent"}
    with pytest.raises(UnsupportedError, match=reason):
        build_attention(name, own, decode(new_tokens=2, latent=options.get("latent")))


def test_a_sparse_cache_is_on_one_rank() -> None:
    with pytest.raises(WorldError, match="runs on one rank; ring splits a cache"):
        IMPLEMENTATIONS.get("block-sparse")(decode(), Group(0, 2), pattern="sink-window")


# ---- costs and checks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("sdpa", {}, "kv_dtype int8 is for split-kv kernels: .* use ring"),
        (
            "ring",
            {"kernel": "aten-flash-cpu"},
            "kernel=aten-flash-cpu: only split-kv reads int8 caches",
        ),
        ("block-sparse", {"pattern": "sink-window", "kernel": "triton"}, "reads int8 caches"),
    ],
    ids=str,
)
def test_kernels_that_read_no_quantised_cache_are_refused(
    name: str, options: Options, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        build_attention(name, options, decode(kv_dtype="int8"))
