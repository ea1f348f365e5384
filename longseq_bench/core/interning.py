"""Records that share equal parts, to save memory.

A pydantic model keeps a dictionary of its fields and a set of those that were given. With 100,000
records these take more memory than the values. An interned record equals its original, field by
field and byte by byte in JSON.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from longseq_bench.core.model import Environment, Record

M = TypeVar("M", bound=BaseModel)
V = TypeVar("V")

GC_THRESHOLD_RECORDS = 5_000
"""Number of records from which garbage collection is noticeably slow."""


class RecordInterner:
    """Interns records. Use one instance for records that stay in memory together."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._names: dict[tuple[type, int], set[str]] = {}
        self._environment: Environment | None = None

    def record(self, record: Record) -> Record:
        """Return an equal record that shares its parts with earlier ones."""
        trial, workload = record.trial, record.trial.workload
        interned = self._copy_with(
            trial,
            workload=self._intern(tuple(workload.__dict__.values()), workload, self._copy_with),
            options=self._intern(repr(trial.options), trial.options),
        )
        return self._copy_with(
            record, trial=interned, outcome=self._copy_with(record.outcome),
            environment=self._share(record.environment),
        )  # fmt: skip

    def _share(self, environment: Environment) -> Environment:
        """Return the environment of the record before, if it is equal; else an interned one."""
        last = self._environment
        if last is None or _values(environment) != _values(last):
            text = environment.model_dump_json(exclude={"fingerprint"})
            last = self._environment = self._intern(text, environment, self._copy_with)
        return last

    def _intern(self, key: Hashable, value: V, make: Callable[[V], V] = lambda value: value) -> V:
        known: V | None = self._known.get((type(value), key))
        if known is None:
            known = self._known[type(value), key] = make(value)
        return known

    def _copy_with(self, model: M, **parts: Any) -> M:
        """Return a copy with other parts, without validation."""
        copied, assign = object.__new__(type(model)), object.__setattr__
        # Set one by one, objects share the key table of their class and hold only the values.
        for name, value in (model.__dict__ | parts).items():
            assign(copied, name, value)
        names = model.__pydantic_fields_set__
        shared = self._names.setdefault((type(model), len(names)), names)
        if shared != names:
            shared = self._intern(frozenset(names), names)
        assign(copied, "__pydantic_fields_set__", shared)
        assign(copied, "__pydantic_extra__", None)
        assign(copied, "__pydantic_private__", None)
        return copied


def _values(environment: Environment) -> tuple[object, ...]:
    """Return what is equal for environments that are equal byte by byte in JSON."""
    return environment.__dict__, [*environment.variables]


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Switch off garbage collection while records are read or tabulated.

    This work makes no cycles, and searching for them would take longer than the work.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_uncollected(records: Sized) -> None:
    """Exclude all current objects from garbage collection, if there are many records.

    Reference counting still frees them.
    """
    if len(records) >= GC_THRESHOLD_RECORDS:
        gc.freeze()
