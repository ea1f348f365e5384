"""A cache by identity computes once for an object and never mixes up two objects."""

import pytest

from longseq_bench.core import identity_cache
from longseq_bench.core.identity_cache import cached_by_identity


def test_results_are_kept_by_object_and_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_cache, "MAX_KEPT", 3)
    seen: list[int] = []

    @cached_by_identity
    def first(items: list[int]) -> int:
        seen.append(items[0])
        return items[0]

    one, equal = [1], [1]
    assert [first(one), first(one), first(equal)] == [1, 1, 1]
    assert seen == [1, 1]
    # each list is new; an id of a list that is gone must not be taken for another
    assert [first([i]) for i in range(100)] == list(range(100))
