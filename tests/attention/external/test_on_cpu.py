"""Rows of other libraries that run on a CPU, against the definition in float64.

They are skipped where a library is not installed. The extra `test` brings them.
"""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.errors import UnknownNameError, UnsupportedError
from longseq_bench.distributed.group import Group
from longseq_bench.testing import ImplementationContract
from longseq_bench.testing.contract import assert_equals_reference, both_masks, make_workload
from longseq_bench.testing.definition import (
    Options,
    build_attention,
    compute_reference,
    count_pairs,
    make_inputs,
    relative_error,
)
from longseq_bench.worker.check import TOLERANCE
from tests.attention.jobs import take
from tests.ranks import Ranks

RING, HF = "ring-attention-pytorch", "transformers"
REASONS = {n: IMPLEMENTATIONS.get(n).unavailable_reason("cpu") for n in (RING, HF)}

pytestmark = pytest.mark.usefixtures("one_thread")


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(REASONS[name] is not None, reason=str(REASONS[name]))


def installed(*cases: tuple[str, Options]) -> list[tuple[str, Options]]:
    return [case for case in cases if REASONS[case[0]] is None]


class TestRingAttentionPytorch(ImplementationContract):
    cases = installed((RING, {}))

    def test_half_precision_equals_the_reference(self) -> None:
        pytest.skip("it computes float32 only; a test below has the reason")

    @pytest.mark.parametrize("world_size", [2, 3, 4, 8])
    def test_several_ranks_are_accepted_or_refused(
        self, implementation: Any, options: Options, world_size: int
    ) -> None:
        if world_size == 3:
            pytest.skip("ranks hold equally many tokens; a test below has the reason")
        super().test_several_ranks_are_accepted_or_refused(implementation, options, world_size)


class TestTransformers(ImplementationContract):
    cases = installed((HF, {"attention": "sdpa"}))


def _own_rows(group: Group, causal: bool, kv_heads: int) -> Any:
    w = make_workload(192, causal=causal, kv_heads=kv_heads)
    attention = IMPLEMENTATIONS.get(RING)(w, group)
    attention.prepare("cpu")
    s = attention.shard
    q, k, v = make_inputs(w)
    keys = [take(t, s.batch, s.kv_heads, s.keys) for t in (k, v)]
    return attention(take(q, s.batch, s.heads, s.queries), *keys).numpy()


@needs(RING)
@both_masks
def test_ring_attention_pytorch_over_ranks_equals_the_reference(ranks: Ranks, causal: bool) -> None:
    w = make_workload(192, causal=causal, kv_heads=2)
    out = torch.from_numpy(np.concatenate(ranks(3, _own_rows, causal, 2), axis=2))
    expected = compute_reference(count_pairs(build_attention(RING, {}, w)), w, {})["out"]
    assert relative_error(out, expected) < TOLERANCE["float32"]


@needs(HF)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", ["sliding-window:9", "prefix:20", "documents:30,1,119"])
def test_masks_and_sinks_of_transformers_equal_the_reference(attention: str, mask: str) -> None:
    has_sinks = attention == "eager" and find_spec("transformers.models.gpt_oss") is not None
    w = make_workload(150, mask=mask, mode="train", kv_heads=2, sink=has_sinks)
    assert_equals_reference(HF, {"attention": attention}, w)


@needs(HF)
def test_a_soft_cap_of_transformers_is_that_of_gemma_2() -> None:
    w = make_workload(150, mask="sliding-window:40", mode="train", kv_heads=2, soft_cap=0.7)
    assert_equals_reference(HF, {"attention": "eager"}, w)
    with pytest.raises(UnsupportedError, match="attention=sdpa computes no soft_cap; use eager"):
        build_attention(HF, {"attention": "sdpa"}, w)


@needs(HF)
def test_an_unknown_attention_of_transformers_is_named() -> None:
    with pytest.raises(UnknownNameError, match="'spda'; did you mean 'sdpa'"):
        build_attention(HF, {"attention": "spda"}, make_workload(64))


@needs(HF)
def test_an_attention_that_was_registered_is_found() -> None:
    from transformers import AttentionInterface

    called = []

    def spy(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        called.append(more["is_causal"])
        return torch.zeros_like(q).transpose(1, 2), None

    AttentionInterface.register("longseq-spy", spy)
    w = make_workload(64, causal=True)
    attention = build_attention(HF, {"attention": "longseq-spy"}, w)
    assert attention(*make_inputs(w)).shape == (2, 4, 64, 16)
    assert called == [True]
    assert attention.facts()["kernel"] == "transformers longseq-spy"
