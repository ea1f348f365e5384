"""Results on disk: `records.jsonl` in a results folder, one Record per line (store.py).

Schema history, by the `schema` field of each line:

1   trial, outcome, environment, started_at, wall_s, processes, purpose, predicted_tokens, command
2   foreseen: the prediction before the run
3   checksum: the last field of a line, over the bytes before it
4   part, place, environment.workers: of trials that ran side by side

The checksum is the first 16 hex digits of the SHA-256 hash of all bytes of the line before
`,"checksum"`. Lines of schema 1 and 2 have none; they are read without this check.

A line is written with one write and an fsync, so it is complete on disk when `append` returns. What
is on disk is never rewritten: the next writer ends an unfinished line of a killed one, and whoever
reads counts and names the lines that are not records.
"""

import errno
import fcntl
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf, nan
from pathlib import Path
from typing import Self

from pydantic import ValidationError
from pydantic_core import from_json

from longseq_bench.core.errors import StoreError, nearest
from longseq_bench.core.model import (
    SCHEMA,
    STABLE_FIELDS,
    Environment,
    Outcome,
    Record,
    Trial,
    is_environment_failure,
)

_ENDING = re.compile(rb',"checksum":"([0-9a-f]{16})"}$')
_FIRST_WITH_CHECKSUM = 3


class BrokenLineError(ValueError):
    """A line that can't be read as a record; the text is the reason."""


def write_line(record: Record) -> bytes:
    """Return the line of a record, with its checksum and line end."""
    return add_checksum(record.model_dump_json(by_alias=True).encode())


def add_checksum(document: bytes) -> bytes:
    """Return the line of a JSON object."""
    body = document[:-1]
    return body + b',"checksum":"' + _hash(body) + b'"}\n'


def read_line(line: bytes) -> Record:
    """Return the record of a line.

    Raises BrokenLineError if it is not a record, was altered, or is of a newer longseq.
    """
    line = line.rstrip(b"\0\r\n\t ")  # a power loss may leave a zero in place of a line end
    ending = _ENDING.search(line)
    if ending and ending[1] != _hash(line[: ending.start()]):
        raise BrokenLineError("its checksum does not match: it was altered after it was written")
    document = line[: ending.start()] + b"}" if ending else line
    try:
        record = Record.model_validate_json(document)
    except ValidationError as error:
        if reason := _newer_schema(document):
            raise BrokenLineError(reason) from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place[:100]}: {first['msg'][:100]}".removeprefix(": ")
        raise BrokenLineError(f"not a record: {reason}") from None
    if record.schema_ >= _FIRST_WITH_CHECKSUM and not ending:
        raise BrokenLineError(f"it has no checksum, as lines of schema {record.schema_} have")
    if reason := find_impossible_sample(record.outcome):
        raise BrokenLineError(f"{reason}, which cannot be")
    return record


def find_impossible_sample(outcome: Outcome) -> str | None:
    """Return the name and value of a sample that nothing can measure; None without one.

    Not a number, negative, or infinite; an error of a failed trial may be infinite. A trial whose
    meter returns one ends with status `error`.
    """
    most = inf if outcome.status == "ok" else nan  # nothing is equal to nan
    for one in outcome.measurements:
        for sample in one.samples:
            if not sample >= 0 or sample == most:
                return f"{one.name[:100]!r} has the sample {sample:.6g}"
    return None


def _hash(body: bytes) -> bytes:
    return sha256(body).hexdigest()[:16].encode()


def _newer_schema(document: bytes) -> str | None:
    """Return the reason why a JSON object is not read if its schema is a newer one."""
    with suppress(ValueError, TypeError, LookupError, AttributeError):  # it is no object of ours
        data = from_json(document)
        if data["schema"] > SCHEMA:
            writer = data.get("environment", {}).get("longseq")
            reader = f", which longseq {writer} reads" if writer else ""
            by = f"written by a newer longseq (schema {data['schema']}{reader})"
            return f"{by}; this one reads {SCHEMA}"
    return None


RECORDS = "records.jsonl"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class Loaded:
    """Records in file order.

    reasons: why a line could not be read, by its number from 1.  notes: the same as sentences.
    """

    records: list[Record]
    reasons: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Store:
    """A results folder open for writing, by one process at a time.

    Raises StoreError if the folder can't be written or another process uses it. The lock ends with
    the process, also if it is killed. `notes` lists skipped lines.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RECORDS
        self._fd = -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _lock(self._fd, self.folder)
            _sync_folder(self.folder)
            self._size = os.fstat(self._fd).st_size
            if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
                self._size += _append(self._fd, b"\n")  # a killed writer left a line unfinished
            loaded = _read(self.path)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise unwritable(self.folder, error) from None
            raise
        self.records: list[Record] = loaded.records
        self.notes: list[str] = loaded.notes
        self._index = {_index_key(record): record for record in self.records}

    def append(self, record: Record) -> Record:
        """Write a record to disk, completely or not at all, and return it.

        Raises StoreError if it can't be written (disk full), or if the folder or its
        file is no longer the one that was opened (moved, deleted, replaced).
        """
        try:
            self._size += _append(self._fd, write_line(record))
        except OSError as error:
            raise StoreError(
                f"{unwritable(self.folder, error)}. The {len(self.records):,} records before are "
                f"in {self.path}; free space and run again: only the last trial repeats"
            ) from None
        self.records.append(record)
        self._index[_index_key(record)] = record
        self.check_in_place()
        return record

    def check_in_place(self) -> None:
        """Raise StoreError if the folder or the file of records was moved, deleted or replaced.

        The error names a copy that has all records.
        """
        if self._fd < 0:
            return
        with suppress(OSError):  # nothing has the path any more
            now, own = os.stat(self.path), os.fstat(self._fd)
            if os.path.samestat(own, now) and own.st_size >= self._size:
                return
        copy_fd, copy = tempfile.mkstemp(".jsonl", "records-")
        with open(copy_fd, "wb") as stream:
            stream.writelines(map(write_line, self.records))
        raise StoreError(
            f"{self.path} was moved, deleted, replaced or cut while this run wrote to it; its "
            f"{len(self.records):,} records were copied to {copy}. Put that file back as {RECORDS} "
            "in a results folder and name the folder with --out to go on"
        )

    def find(self, trial: Trial, fingerprint: str) -> Record | None:
        """Return the newest record of this trial in this environment.

        None without one, or if something other than the trial ended it.  The record has the labels
        of this trial, also if it was measured under others: another model of the same shape, or an
        own function whose file lay elsewhere.
        """
        record = self._index.get((trial.key, fingerprint))
        if record is None or is_environment_failure(record.outcome):
            return None
        return record if record.trial == trial else record.model_copy(update={"trial": trial})

    def describe_skipped_records(self, trial: Trial, here: Environment) -> str:
        """Return a sentence if the trial was measured, but only elsewhere; else an empty string."""
        known, key = reversed(self._index.items()), trial.key
        other = next((one.environment for (of, _), one in known if of == key), None)
        if other is None or other.fingerprint == here.fingerprint:
            return ""
        count = sum(record.environment.fingerprint == other.fingerprint for record in self.records)
        return (
            f"records of {other.host} do not count here ({count:,}): another environment "
            f"({_name_differences(here, other)})"
        )

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            # an interrupted run says that its records are on disk
            if kind is None or issubclass(kind, KeyboardInterrupt):
                self.check_in_place()
        finally:
            self.close()


def load(path: str | Path, may_be_empty: bool = False) -> Loaded:
    """Read a results folder or a .jsonl file, without a lock.

    Raises StoreError if there is no such file, or no record in it unless it may be empty.
    """
    try:
        loaded = _read(file := _records_file(Path(path)))
    except OSError as error:
        raise StoreError(f"results {path} can't be read: {_describe_error(error)}") from None
    if not loaded.records and not may_be_empty:
        reason = "; ".join(loaded.notes) or "it is empty"
        raise StoreError(f"results {file} hold no record: {reason}")
    return loaded


def _read(file: Path) -> Loaded:
    records, reasons, lines = list[Record](), dict[int, str](), dict[str, list[int]]()
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                records.append(read_line(line))
            except BrokenLineError as error:
                is_unfinished = not line.endswith(b"\n")
                why = "its writer is still running or was killed" if is_unfinished else str(error)
                reasons[number] = why
                lines.setdefault(why, []).append(number)
    notes = [f"{_format_lines(n)} skipped (unchanged on disk): {why}" for why, n in lines.items()]
    return Loaded(_without_superseded(records), reasons, notes)


def _format_lines(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
    return f"{len(numbers)} lines ({shown}) are"


def _without_superseded(records: list[Record]) -> list[Record]:
    """Return the records without environment failures of trials that ran again later."""
    if not any(is_environment_failure(record.outcome) for record in records):
        return records
    newest = {_index_key(record): record for record in records}
    return [
        record
        for record in records
        if not is_environment_failure(record.outcome) or newest[_index_key(record)] is record
    ]


def _index_key(record: Record) -> tuple[str, str]:
    return record.key, record.environment.fingerprint


def _name_differences(here: Environment, other: Environment) -> str:
    """Name the first differing parts of two fingerprints: "host, cores, OMP_NUM_THREADS"."""
    fields = [name for name in STABLE_FIELDS if getattr(here, name) != getattr(other, name)]
    names = [name.removesuffix("_bytes").removesuffix("_w").replace("_", " ") for name in fields]
    either = sorted({*here.variables, *other.variables})
    names += [name for name in either if here.variables.get(name) != other.variables.get(name)]
    return ", ".join(names[:3] + ["…"] * (len(names) > 3))


def _sync_folder(folder: Path) -> None:
    """Make the names of new files in a folder safe from power loss."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    """Lock the file of records until its descriptor is closed.

    Raises StoreError if another process has it, or if the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            reason = "in use by another process; wait for it, or name another folder"
        elif error.errno in _NO_LOCKS:
            reason = "on a file system without locks; name another, or mount it with option flock"
        else:
            raise
        raise StoreError(f"results folder {folder} is {reason}") from None


def _append(fd: int, data: bytes) -> int:
    """Append bytes, sync them and return their number. If that fails, take them back and raise."""
    end, count = os.fstat(fd).st_size, len(data)
    try:
        while data:  # a disk that fills up takes a part first
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, end)
        raise
    return count


def _records_file(path: Path) -> Path:
    """Return the records file of a folder or file; StoreError names a similar one."""
    file = path / RECORDS if path.is_dir() else path
    if file.exists():
        return file
    if path.is_dir():
        what = f"folder {path} holds no {RECORDS}"
        near = [path / other.parent.name for other in sorted(path.glob(f"*/{RECORDS}"))]
    else:
        name = nearest(path.name, [other.name for other in path.parent.glob("*")])
        what, near = f"{path} do not exist", [path.parent / name] if name else []
    raise StoreError(f"results {what}" + (f"; did you mean {near[0]}?" if near else ""))


def unwritable(folder: Path, error: OSError) -> StoreError:
    """Return the error of a results folder or of a file in it that can't be written."""
    return StoreError(f"results folder {folder} can't be written: {_describe_error(error)}")


def _describe_error(error: OSError) -> str:
    place = f" ({os.fsdecode(error.filename)})" if error.filename else ""
    return f"{error.strerror or error}{place}"
