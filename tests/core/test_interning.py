"""Interned records equal their originals and are as independent."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from longseq_bench.core import interning as module
from longseq_bench.core.interning import RecordInterner, gc_disabled, keep_uncollected
from longseq_bench.core.model import Record
from tests import make


def ring(**fields: object) -> Record:
    trial = make.trial("ring", options={"chunk": 8, "stages": (1, 2)}, seed=3)
    return make.record(trial, where=make.environment(variables={"A": "1"}), **fields)


def intern(*records: Record) -> list[Record]:
    interner = RecordInterner()
    return [interner.share(record) for record in records]


def test_an_interned_record_is_equal_in_every_byte() -> None:
    odd = make.record(
        make.trial("sdpa", memory_budget=7),
        make.outcome("wrong", "why", "check", {"errors": {"out": 1.0}}, max_error=float("nan")),
        make.environment(load=(1.0, 2.0, 3.0), gpus=("H200", "H200")),
        predicted_tokens=4, foreseen={"peak_bytes": 9},
    )  # fmt: skip
    for before, after in zip([ring(), odd], intern(ring(), odd), strict=True):
        assert after.model_dump_json() == before.model_dump_json()
        assert repr(after) == repr(before)
        assert (after.key, after.model_fields_set) == (before.key, before.model_fields_set)
        assert after.model_dump(exclude_unset=True) == before.model_dump(exclude_unset=True)
    assert intern(ring()) == [ring()]


def test_equal_parts_are_shared() -> None:
    one, two, other = intern(ring(), ring(wall_s=9.0), make.record())
    assert one.environment is two.environment is not other.environment
    assert one.trial.workload is two.trial.workload is other.trial.workload
    assert one.trial.options is two.trial.options is not other.trial.options
    assert (two.wall_s, other.trial.implementation) == (9.0, "sdpa")


def test_different_parts_are_not_shared() -> None:
    hosts = [make.environment(), make.environment(load=(2.0,)), make.environment(commit="b")]
    assert [r.environment for r in intern(*(make.record(where=h) for h in hosts))] == hosts
    options = [{"a": 1}, {"a": 1.0}, {"a": True}, {"b": 1, "a": 2}, {"a": 2, "b": 1}]
    records = [make.record(make.trial(options=given)) for given in options]
    assert [repr(r.trial.options) for r in intern(*records)] == list(map(repr, options))


def test_read_environments_are_shared_only_if_equal_in_every_byte() -> None:
    given: list[dict[str, Any]] = [{"variables": {"A": "1", "B": "2"}}, {"commit": "b"}]
    orders = [*given, given[0], {"variables": {"B": "2", "A": "1"}}, given[0]]
    records = [make.record(where=make.environment(**fields)) for fields in orders]
    interner = RecordInterner()
    read = [interner.read(record.model_dump_json(by_alias=True).encode()) for record in records]
    assert list(map(repr, read)) == list(map(repr, records))
    first, _, third, _, last = [record.environment for record in read]
    assert first is third is last


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_interned_records_can_be_copied(copied: Callable[[Record], Record]) -> None:
    one, two = intern(ring(), ring())
    assert copied(one) == one
    later = copied(one.trial).model_copy(update={"round": 5})
    assert (later.round, one.trial.round, two.trial.round) == (5, 0, 0)
    assert "round" in later.model_fields_set
    assert "round" not in two.trial.model_fields_set
    assert later.key == ring().trial.replace(round=5).key


def test_interned_records_are_frozen() -> None:
    (one,) = intern(ring())
    with pytest.raises(ValidationError, match="frozen"):
        setattr(one.trial, "seed", 4)  # noqa: B010


def test_garbage_collection_is_off_inside_and_restored_after() -> None:
    def failing() -> None:
        with gc_disabled():
            with gc_disabled():
                pass
            raise KeyError(gc.isenabled())

    assert gc.isenabled()
    with pytest.raises(KeyError, match="False"):
        failing()
    assert gc.isenabled()


def test_only_many_records_are_excluded_from_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(module.gc, "freeze", lambda: frozen.append(True))
    keep_uncollected(range(module.GC_THRESHOLD_RECORDS - 1))
    assert frozen == []
    keep_uncollected(range(module.GC_THRESHOLD_RECORDS))
    assert frozen == [True]
