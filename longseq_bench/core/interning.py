"""Many records in little memory: what is equal in several is kept once.

A model of pydantic's keeps a dictionary of its fields and a set of those that were given: with 100
thousand records these take more than the figures themselves. Records made lean are equal to what
they were made from, field by field and byte by byte in JSON.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel

from longseq_bench.core.model import Environment, Record

M = TypeVar("M", bound=BaseModel)
V = TypeVar("V")

MANY = 5_000
"""Records among which every look for cycles, of which they have none, is felt."""


class Lean:
    """Makes records lean; one is for records that stay in memory together."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def record(self, record: Record) -> Record:
        """The same record, its parts shared with equal ones."""
        trial, outcome = record.trial, record.outcome
        lean = self._made(
            trial,
            workload=self._once(trial.workload, trial.workload, self._made),
            options=self._once(repr(trial.options), trial.options),
        )
        came_to = self._made(outcome)
        where = self._once(_words(record.environment), record.environment, self._made)
        return self._made(record, trial=lean, outcome=came_to, environment=where)

    def _once(self, key: Hashable, value: V, make: Callable[[V], V] = lambda value: value) -> V:
        known = self._known.get((type(value), key))
        if known is None:
            known = self._known[type(value), key] = make(value)
        found: V = known
        return found

    def _made(self, model: M, **parts: Any) -> M:
        """The same with other parts, as if made from them without another look at them."""
        made, put = object.__new__(type(model)), object.__setattr__
        # One by one: then the names are those of the class, and an object has values alone.
        for name, value in (model.__dict__ | parts).items():
            put(made, name, value)
        given = model.__pydantic_fields_set__
        put(made, "__pydantic_fields_set__", self._once(frozenset(given), given))
        put(made, "__pydantic_extra__", None)
        put(made, "__pydantic_private__", None)
        return made


def _words(environment: Environment) -> str:
    return environment.model_dump_json(exclude={"fingerprint"})


@contextmanager
def no_collecting() -> Iterator[None]:
    """While records are read or tabulated: neither makes cycles, and looking for them among all
    that is kept takes longer than the work itself."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def keep_uncollected(records: Sized) -> None:
    """Spare what is in memory now from later looks for cycles, where there are many records.

    They are freed all the same when nobody holds them any more.
    """
    if len(records) >= MANY:
        gc.freeze()
