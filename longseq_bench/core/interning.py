"""Records that share equal parts, to save memory.

A pydantic model keeps a dictionary of its fields and a set of those that were given. With 100,000
records these take more memory than the values. An interned record equals its original, field by
field and byte by byte in JSON.
"""

import gc
from collections.abc import Hashable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from longseq_bench.core.model import Environment, Record

M = TypeVar("M", bound=BaseModel)
V = TypeVar("V")

GC_THRESHOLD_RECORDS = 5_000
"""Number of records from which garbage collection is noticeably slow."""


class RecordInterner:
    """Reads and interns records. Use one instance for records that stay in memory together."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._names: dict[tuple[type, int], set[str]] = {}
        self._context: dict[type, Any] = {}
        self._last: Environment | None = None
        self._interned: Environment | None = None

    def read(self, line: bytes) -> Record:
        """Return the record of a line of JSON. Raises ValueError if it is not a record.

        Text or `true` for a number is not converted: no record has it.
        """
        return self.share(Record.model_validate_json(line, strict=True, context=self._context))

    def share(self, record: Record) -> Record:
        """Let a new record share its parts with earlier ones, and return it."""
        trial, workload = record.trial, record.trial.workload
        # the fields of a frozen model; nothing else has seen the record yet
        vars(trial)["workload"] = self._intern(tuple(vars(workload).values()), workload)
        vars(trial)["options"] = self._intern(repr(trial.options), trial.options)
        if record.environment is not self._last:
            self._last = record.environment
            text = self._last.model_dump_json(exclude={"fingerprint"})
            self._interned = self._intern(text, self._last)
        vars(record)["environment"] = self._interned
        for model in (record, trial, record.outcome):
            names = model.__pydantic_fields_set__
            shared = self._names.setdefault((type(model), len(names)), names)
            if shared != names:
                shared = self._intern(frozenset(names), names)
            object.__setattr__(model, "__pydantic_fields_set__", shared)
        return record

    def _intern(self, key: Hashable, value: V) -> V:
        found: V = self._known.setdefault((type(value), key), value)
        return found


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
