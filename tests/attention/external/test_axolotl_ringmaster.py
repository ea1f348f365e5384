"""axolotl's ringmaster: over CPU ranks where it is installed, and up to the call with a fake.

The fake has the signatures of its wheel 0.2.7.
"""

import sys
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.distributed.group import Group
from longseq_bench.testing.contract import make_workload
from longseq_bench.testing.definition import (
    make_inputs,
)

NAME = "axolotl-ringmaster"

pytestmark = pytest.mark.usefixtures("one_thread")


class LoadBalance(StrEnum):
    NONE, HEAD_TAIL, DISTFLASH = "none", "head_tail", "distflash"


def install(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    attentions: dict[str, Any] = {}

    def RingmasterConfig(
        size: int, ulysses_size: int, ring_size: int, load_balance: LoadBalance
    ) -> Any:
        return (size, ulysses_size, ring_size, LoadBalance(load_balance).value)

    def setup(config: Any, *, num_kv_heads: int, device_type: str, inner_attn: str) -> Any:
        calls.append((config, num_kv_heads, device_type, inner_attn))
        attentions["ringmaster_ring"] = attend
        return SimpleNamespace(attn_implementation="ringmaster_ring")

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        dropout: float, scaling: float, is_causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (attention_mask, dropout) == (None, 0.0)
        assert (query.shape, key.shape, value.shape) == (
            (2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16),
        )  # fmt: skip
        calls.append((module.num_key_value_groups, scaling, is_causal))
        return 2 * query.transpose(1, 2), None

    fake = SimpleNamespace(RingmasterConfig=RingmasterConfig, setup=setup, LoadBalance=LoadBalance)
    monkeypatch.setitem(sys.modules, "ringmaster", fake)
    hf = SimpleNamespace(ALL_ATTENTION_FUNCTIONS=attentions)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", hf)


@pytest.mark.usefixtures("oldest_versions")
@pytest.mark.parametrize(
    ("order", "balance", "causal", "positions"),
    [
        ("contiguous", "none", False, [*range(32, 64)]),
        ("zigzag", "head_tail", True, [*range(16, 48)]),
    ],
)
def test_the_library_gets_its_ranks_and_tokens(
    monkeypatch: pytest.MonkeyPatch, order: str, balance: str, causal: bool, positions: list[int]
) -> None:
    calls: list[Any] = []
    install(monkeypatch, calls)
    w = make_workload(64, causal=causal, kv_heads=2, dtype="bfloat16")
    attention = IMPLEMENTATIONS.get(NAME)(w, Group(1, 2), order=order)
    attention.prepare("cuda")
    assert attention.shard.queries.tolist() == positions
    q, k, v = (t[:, :, positions] for t in make_inputs(w))
    assert torch.equal(attention(q, k, v), 2 * q)
    config = (2, 1, 2, balance)
    assert calls == [(config, 2, "cuda", "flash_attention_2"), (2, 0.25, causal)]
