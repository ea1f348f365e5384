"""A line of `records.jsonl`: a record as JSON, with a checksum as its last field.

    {"schema":3,"trial":{…},"outcome":{…},…,"command":null,"checksum":"0123456789abcdef"}

The checksum is the first 16 hex digits of the SHA-256 hash of all bytes of the line before
`,"checksum"`. A reader hashes these bytes as they are and never writes JSON again. Lines of schema
1 and 2 have no checksum; they are read without this check.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, BinaryIO

from pydantic import ValidationError

from longseq_bench.core.interning import RecordInterner
from longseq_bench.core.model import SCHEMA, Record
from longseq_bench.core.number_checks import ERRORS, find_impossible_number

_FIELD = b',"checksum":"'
_DIGEST_DIGITS = 16
_ENDING_BYTES = len(_FIELD) + _DIGEST_DIGITS + len(b'"}')
_FIRST_WITH_CHECKSUM = 3
_MAX_NAME = 100
_LONG_LINE = 2**18
_MOST_BYTES = {b"[": 2**20, b"{": 2**20, b":": 2**22, b",": 2**23}
"""Bytes of lists, objects and their items, which take a parser a hundred times their memory.

A record of 65,536 ranks, or of a million passes, has fewer.
"""
MAX_LINE_BYTES = 2**28
"""Longest line that is read into memory; a record is shorter."""
_BLOCK_BYTES = 2**16
TOO_LONG = f"it has more than {MAX_LINE_BYTES >> 20} MiB; a record has fewer"
NO_SCHEMA = "it is not an object with a schema number"
_NOT_FINITE = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


class BrokenLineError(ValueError):
    """A line that is not a record; the text is the reason."""


class NewerSchemaError(Exception):
    """A line has a schema that this version does not know. writer: the version that wrote it."""

    def __init__(self, schema: int, writer: str | None) -> None:
        super().__init__(schema)
        self.schema, self.writer = schema, writer


def write_line(record: Record) -> bytes:
    """Return the line of a record, with its checksum and line end."""
    body = record.model_dump_json(by_alias=True).encode()[:-1]
    return body + _FIELD + _hash(body) + b'"}\n'


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of a line that is too long its beginning, and its line end."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(_BLOCK_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield line + rest[-1:]


def read_line(line: bytes, interner: RecordInterner) -> Record:
    """Return the record of a line.

    Raises BrokenLineError if it is not a record or was altered, NewerSchemaError for a line of a
    newer longseq.
    """
    if len(line) > MAX_LINE_BYTES:
        raise BrokenLineError(TOO_LONG)
    is_checked = has_checksum(line)
    line = _check_sum(line.rstrip())
    _check_size(line)
    try:
        record = interner.read(line)
    except ValidationError as error:
        if _is_final(error):
            raise BrokenLineError(_describe(error)) from None
        record = _read_slowly(line, interner)
    except ValueError:
        record = _read_slowly(line, interner)
    if "schema_" not in record.model_fields_set:
        raise BrokenLineError(NO_SCHEMA)
    if record.schema_ >= _FIRST_WITH_CHECKSUM and not is_checked:
        raise BrokenLineError(f"it has no checksum, as lines of schema {record.schema_} have")
    if reason := find_impossible_number(record):
        raise BrokenLineError(f"{reason}, which cannot be")
    return record


def has_checksum(line: bytes) -> bool:
    """Return True if the last field of a line is a checksum."""
    line = line.rstrip()
    return line.startswith(_FIELD, max(0, len(line) - _ENDING_BYTES))


def _hash(body: bytes) -> bytes:
    return sha256(body).hexdigest()[:_DIGEST_DIGITS].encode()


def _check_sum(line: bytes) -> bytes:
    """Return the line without its checksum, if it has one. Raises BrokenLineError if it differs."""
    if not has_checksum(line):
        return line
    body, ending = line[:-_ENDING_BYTES], line[-_ENDING_BYTES:]
    if ending[len(_FIELD) :] != _hash(body) + b'"}':
        raise BrokenLineError("its checksum does not match: it was altered after it was written")
    return body + b"}"


def _check_size(line: bytes) -> None:
    """Raise BrokenLineError for a line that takes much memory to read."""
    if len(line) < _LONG_LINE:
        return
    for byte, most in _MOST_BYTES.items():
        if (count := line.count(byte)) > most:
            raise BrokenLineError(
                f"it has {count:,} times the character {byte.decode()}; a record has at most "
                f"{most:,}"
            )


def _is_final(error: ValidationError) -> bool:
    """Return True for an error that does not need the slow reader: it takes seconds per megabyte.

    The slow reader is for text that is not JSON, schemas, checksums and infinite errors.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = [one["loc"] for one in found]
    return all(
        place and place[0] not in ("schema", "checksum") and "samples" not in place
        for place in places
    )


def _read_slowly(line: bytes, interner: RecordInterner) -> Record:
    """Read a line that the fast reader refused, or find the reason why it is not a record.

    Only Python's JSON reader knows lone surrogates, which facts may hold; and an error of a failed
    trial may be infinite, which a record has as text.
    """
    try:
        data = json.loads(line)
        schema = data.get("schema") if isinstance(data, dict) else None
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise BrokenLineError(NO_SCHEMA)
        if schema > SCHEMA:
            # a newer schema may have it in another place
            environment = data.get("environment")
            version = environment.get("longseq") if isinstance(environment, dict) else None
            raise NewerSchemaError(schema, version if isinstance(version, str) else None)
        if "checksum" in data:
            raise BrokenLineError(
                "its checksum is not its last field: another program wrote the line anew"
            )
        facts = _take_facts(data)
        record = interner.read(json.dumps(data).encode())
    except ValidationError as error:
        raise BrokenLineError(_describe(error)) from None
    except RecursionError:
        raise BrokenLineError("it is nested too deeply") from None
    except BrokenLineError:
        raise
    except ValueError as error:
        raise BrokenLineError(f"it is not JSON: {str(error)[:_MAX_NAME]}") from None
    if facts:
        vars(record.outcome)["facts"] = facts
    return record


def _take_facts(data: dict[str, Any]) -> dict[str, Any]:
    """Take out the facts of a record, and write its errors that are not finite as numbers."""
    outcome = data.get("outcome")
    if not isinstance(outcome, dict):
        return {}
    measurements = outcome.get("measurements")
    for one in measurements if isinstance(measurements, list) else ():
        if isinstance(one, dict) and str(one.get("name")) in ERRORS:
            samples = one.get("samples")
            if isinstance(samples, list):
                one["samples"] = [
                    _NOT_FINITE.get(s, s) if isinstance(s, str) else s for s in samples
                ]
    facts = outcome.get("facts")
    if not isinstance(facts, dict):
        return {}
    outcome["facts"] = {}
    return facts


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))[:_MAX_NAME]
    reason = first["msg"][:_MAX_NAME]
    return f"{place}: {reason}" if place else reason
