"""A line of `records.jsonl`: a record as JSON, with a checksum as its last field.

    {"schema":3,"trial":{…},"outcome":{…},…,"command":null,"checksum":"0123456789abcdef"}

The checksum is the first 16 hex digits of the SHA-256 hash of all bytes of the line before
`,"checksum"`. Lines of schema 1 and 2 have no checksum; they are read without this check.
"""

import re
from hashlib import sha256
from math import inf, isfinite

from pydantic import ValidationError
from pydantic_core import from_json

from longseq_bench.core.model import SCHEMA, Outcome, Record

ERRORS = frozenset({"max_error", "error_of_allowed", "bias", "wire_error"})
"""Measurements that are infinite if an output is: only in a trial that failed."""

_ENDING = re.compile(rb',"checksum":"([0-9a-f]{16})"}$')
_FIRST_WITH_CHECKSUM = 3


class BrokenLineError(ValueError):
    """A line that is not a record; the text is the reason."""


class NewerSchemaError(BrokenLineError):
    """A line has a schema that this version does not know; the text says which one reads it."""


def write_line(record: Record) -> bytes:
    """Return the line of a record, with its checksum and line end."""
    return add_checksum(record.model_dump_json(by_alias=True).encode())


def add_checksum(document: bytes) -> bytes:
    """Return the line of a JSON object."""
    body = document[:-1]
    return body + b',"checksum":"' + _hash(body) + b'"}\n'


def read_line(line: bytes) -> Record:
    """Return the record of a line.

    Raises BrokenLineError if it is not a record or was altered, NewerSchemaError for a line of a
    newer longseq.
    """
    line = line.rstrip()
    ending = _ENDING.search(line)
    if ending and ending[1] != _hash(line[: ending.start()]):
        raise BrokenLineError("its checksum does not match: it was altered after it was written")
    document = line[: ending.start()] + b"}" if ending else line
    try:
        record = Record.model_validate_json(document)
    except ValidationError as error:
        _check_schema(document)
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise BrokenLineError(f"{place[:100]}: {first['msg'][:100]}".removeprefix(": ")) from None
    if record.schema_ >= _FIRST_WITH_CHECKSUM and not ending:
        raise BrokenLineError(f"it has no checksum, as lines of schema {record.schema_} have")
    if reason := find_impossible_sample(record.outcome):
        raise BrokenLineError(f"{reason}, which cannot be")
    return record


def find_impossible_sample(outcome: Outcome) -> str | None:
    """Return the name and value of a sample that nothing can measure; None without one.

    Infinite, not a number, or negative. A trial whose meter returns one ends with status `error`.
    """
    for one in outcome.measurements:
        may_be_infinite = one.name in ERRORS and outcome.status != "ok"
        for sample in one.samples:
            if not 0 <= sample < inf and (isfinite(sample) or not may_be_infinite):
                return f"{one.name[:100]!r} has the sample {sample:.6g}"
    return None


def _hash(body: bytes) -> bytes:
    return sha256(body).hexdigest()[:16].encode()


def _check_schema(document: bytes) -> None:
    """Raise NewerSchemaError if the schema of a JSON object is a newer one."""
    try:
        data = from_json(document)
    except ValueError:
        return
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        environment = data.get("environment")
        writer = environment.get("longseq") if isinstance(environment, dict) else None
        reader = f", which longseq {writer} reads" if writer else ""
        raise NewerSchemaError(
            f"written by a newer longseq (schema {schema}{reader}); this one reads {SCHEMA}"
        )
