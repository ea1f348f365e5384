"""Workloads and options that do not fit the ranks are refused with the reason."""

import re
from typing import Any

import pytest

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.errors import UnsupportedError, UserError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.testing.definition import Options
from tests.attention.definition import MANY
from tests.make import trial


def refused(name: str, w: Workload, world: int, **options: Any) -> str:
    """Return the message of the error, which is the same on all ranks."""
    messages = []
    for rank in range(world):
        with pytest.raises(WorldError) as raised:
            IMPLEMENTATIONS.get(name)(w, Group(rank, world), **options)
        messages.append(str(raised.value))
    assert len({*messages}) == 1
    return messages[0]


def test_a_batch_smaller_than_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 13: batch 1 under data parallelism reported as a speed-up."""
    for batch, world in ((1, 2), (3, 4)):
        w = Workload(seq_len=64, batch=batch)
        reason = f"a batch of {batch} can't be split into {world} parts: each rank"
        assert reason in refused("ddp", w, world)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(WorldError, match="a batch of 1 can't be split into 2 parts: each rank"):
        IMPLEMENTATIONS.get("data-parallel")(Workload(seq_len=64), Group.alone())


@pytest.mark.parametrize("name", ["ddp", "data-parallel"])
@pytest.mark.parametrize("inner", ["ddp", "block-sparse-multihead", "block-sparse-adaptive"])
def test_an_attention_that_cannot_run_on_parts_of_a_batch_is_refused(name: str, inner: str) -> None:
    with pytest.raises(UserError, match=f"inner={inner} can't run on a part of the batch"):
        IMPLEMENTATIONS.get(name)(Workload(seq_len=64, batch=4), Group.alone(), inner=inner)


def test_sinks_are_refused_with_a_reason() -> None:
    """Where no log-sum-exp of a row is known, or no gradient of a sink."""
    w = Workload(seq_len=64, sink=True)
    for name, options, words in (
        ("sdpa", {}, "sink: this attention can't compute it; use ring"),
        ("ring", {"offload": "host"}, "offload=host needs a v_head_dim like head_dim, and no sink"),
        ("block-sparse", {"kernel": "flex"}, "kernel=flex has no sinks"),
        ("block-sparse-adaptive", {"scorer": "learned"}, "scorer=learned has no sinks"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            IMPLEMENTATIONS.get(name)(w, Group.alone(), **options)
    kept = trial("ring", sink=True).replace(keep="nothing").unsupported_reason or ""
    assert kept.startswith("keep=nothing keeps no log-sum-exp, which a sink needs")


def test_heads_that_do_not_divide_are_refused() -> None:
    w = Workload(seq_len=64, heads=6)
    message = "6 heads can't be split over 4 ranks; possible: 1, 2, 3, 6"
    assert refused("ulysses", w, 4) == refused("head-parallel", w, 4) == message
    assert refused("usp", w, 4, ulysses=4) == message
    grouped = Workload(seq_len=64, heads=8, kv_heads=2)
    limits = "8 heads with 2 kv_heads can't be split over"
    assert refused("head-parallel", grouped, 4) == f"{limits} 4 ranks; possible: 1, 2"
    assert refused("ulysses", grouped, 16) == f"{limits} 16 ranks; possible: 1, 2, 4, 8"
    three = Workload(seq_len=64, heads=12, kv_heads=3)
    assert "4 ranks; possible: 1, 3, 6, 12" in refused("ulysses", three, 4)


def test_degrees_that_do_not_match_the_ranks_are_refused() -> None:
    w = Workload(seq_len=64, heads=8)
    assert refused("usp", w, 4, ulysses=3) == "ulysses=3 does not divide 4 ranks"


def test_missing_degrees_are_chosen() -> None:
    def degrees(world: int, kv_heads: int, **options: int) -> tuple[int, int]:
        w = Workload(seq_len=64, heads=12, kv_heads=kv_heads)
        usp: Any = IMPLEMENTATIONS.get("usp")(w, Group(0, world), **options)
        return usp.ulysses, usp.ring

    assert [degrees(world, 12) for world in (2, 3, 4, 8)] == [(2, 1), (3, 1), (4, 1), (4, 2)]
    assert [degrees(world, 2) for world in (2, 3, 4, 8)] == [(2, 1), (1, 3), (2, 2), (2, 4)]
    assert degrees(8, 12, ulysses=2) == (2, 4)


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, {}) for n in MANY if n not in ("ddp", "head-parallel")]
    + [("head-parallel", {"sequence_parallel": True}), ("ring", {"queries": "full"})],
)
def test_fewer_tokens_than_ranks_are_refused(name: str, options: Options) -> None:
    w = Workload(seq_len=3, heads=4)
    message = refused(name, w, 4, **options)
    assert re.match(r"3 tokens( in blocks of \d+)? are too few for 4 ranks; each", message)


@pytest.mark.parametrize(
    ("transport", "library"), [("deepspeed", "DeepSpeed"), ("fairscale", "FairScale")]
)
def test_a_missing_library_is_named_with_its_pip_command(
    monkeypatch: pytest.MonkeyPatch, transport: str, library: str
) -> None:
    monkeypatch.setattr("longseq_bench.attention.exact.ring.find_spec", lambda name: None)
    make, w = IMPLEMENTATIONS.get("ring"), Workload(seq_len=64)
    message = rf"{library} is not installed; pip install 'longseq-bench\[transports\]'"
    with pytest.raises(UnsupportedError, match=message):
        make(w, Group(0, 2), transport=transport)
    # one rank sends nothing
    make(w, Group.alone(), transport=transport)


def test_fairscale_refuses_half_precision() -> None:
    w = Workload(seq_len=64, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=r"float32 parameters .* not bfloat16"):
        IMPLEMENTATIONS.get("ring")(w, Group(0, 2), transport="fairscale")
