"""Records that share equal parts, to save memory.

A pydantic model keeps a dictionary of its fields and a set of the given ones. With 100,000 records
these take more memory than the values. An interned record equals its original, field by field and
byte by byte in JSON.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from longseq_bench.core.model import Record

M = TypeVar("M", bound=BaseModel)
V = TypeVar("V")

MANY = 5_000
"""Number of records from which garbage collection is noticeably slow."""


class RecordInterner:
    """Interns records. Use one instance for records that stay in memory together."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def record(self, record: Record) -> Record:
        """Return an equal record that shares its parts with earlier ones."""
        trial, environment = record.trial, record.environment
        words = environment.model_dump_json(exclude={"fingerprint"})
        interned = self._made(
            trial,
            workload=self._once(trial.workload, trial.workload, self._made),
            options=self._once(repr(trial.options), trial.options),
        )
        return self._made(
            record, trial=interned, outcome=self._made(record.outcome),
            environment=self._once(words, environment, self._made),
        )  # fmt: skip

    def _once(self, key: Hashable, value: V, make: Callable[[V], V] = lambda value: value) -> V:
        known = self._known.get((type(value), key))
        if known is None:
            known = self._known[type(value), key] = make(value)
        found: V = known
        return found

    def _made(self, model: M, **parts: Any) -> M:
        """Return a copy with other parts, without validation."""
        made, put = object.__new__(type(model)), object.__setattr__
        # Set one by one, objects share the key table of their class and hold only the values.
        for name, value in (model.__dict__ | parts).items():
            put(made, name, value)
        given = model.__pydantic_fields_set__
        put(made, "__pydantic_fields_set__", self._once(frozenset(given), given))
        put(made, "__pydantic_extra__", None)
        put(made, "__pydantic_private__", None)
        return made


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Switch off garbage collection while records are read or tabulated.

    This work makes no cycles, and searching for them would take longer than the work.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def keep_uncollected(records: Sized) -> None:
    """Exclude all current objects from garbage collection, if there are many records.

    Reference counting still frees them.
    """
    if len(records) >= MANY:
        gc.freeze()
