"""Results on disk: `records.jsonl` in a results folder, one Record per line.

Schema history, by the `schema` field of each line:

1   trial, outcome, environment, started_at, wall_s, processes, purpose, predicted_tokens, command
2   foreseen: the prediction before the run

A line is written with one write and an fsync, so it is complete on disk when `append` returns. An
unfinished line of a killed writer is moved to `records.jsonl.torn`; no other byte is rewritten.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from longseq_bench.core.errors import StoreError, nearest
from longseq_bench.core.interning import RecordInterner, gc_disabled, keep_uncollected
from longseq_bench.core.model import SCHEMA, Record, Trial

RECORDS = "records.jsonl"
TORN = "records.jsonl.torn"
LOCK = ".lock"


@dataclass(frozen=True)
class Loaded:
    """Records in file order, and the lines that could not be read.

    broken: line numbers, from 1, of lines that are not a record.
    newer: line numbers by schema, of lines that a newer longseq wrote.  writers: its version.
    notes: one sentence for the user on each kind of skipped line.
    """

    records: list[Record]
    broken: list[int] = field(default_factory=list)
    newer: dict[int, list[int]] = field(default_factory=dict)
    writers: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class NewerSchemaError(Exception):
    """A line has a schema that this version does not know; raised and caught in this file."""

    def __init__(self, schema: int, writer: str | None) -> None:
        super().__init__(schema)
        self.schema, self.writer = schema, writer


class Store:
    """A results folder open for writing, by one process at a time.

    Raises StoreError if the folder can't be written or another process uses it. The lock ends with
    the process, also if it is killed. `notes` lists repaired and skipped lines.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RECORDS
        self._records_fd: int | None = None
        self._lock_fd: int | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(self.folder)
            self._records_fd = os.open(
                self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            _sync_folder(self.folder)
            repairs = _repair_tail(self._records_fd, self.folder)
            loaded = _read(self.path)
        except OSError as error:
            self.close()
            raise _unwritable(self.folder, error) from None
        except BaseException:
            self.close()
            raise
        self.records: list[Record] = loaded.records
        self.broken: list[int] = loaded.broken
        self.notes: list[str] = repairs + loaded.notes
        self._index = {_index_key(record): record for record in self.records}
        _OPEN_STORES.add(self)

    def append(self, record: Record) -> Record:
        """Write a record to disk, completely or not at all, and return it.

        Raises StoreError if it can't be written (disk full, folder deleted, store closed).
        """
        if self._records_fd is None:
            raise StoreError(f"results folder {self.folder} is closed; nothing was written")
        line = record.model_dump_json(by_alias=True).encode() + b"\n"
        before = os.fstat(self._records_fd).st_size
        try:
            written = os.write(self._records_fd, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes could be written")
            os.fsync(self._records_fd)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._records_fd, before)
            raise _unwritable(self.folder, error) from None
        self.records.append(record)
        self._index[_index_key(record)] = record
        return record

    def find(self, trial: Trial, fingerprint: str) -> Record | None:
        """Return the newest record of this trial in this environment; None without one.

        The record has the labels of this trial, also if it was measured under others: another model
        of the same shape, or an own function whose file lay elsewhere.
        """
        record = self._index.get((trial.key, fingerprint))
        if record is None or record.trial == trial:
            return record
        return record.model_copy(update={"trial": trial})

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        for fd in (self._records_fd, self._lock_fd):
            if fd is not None:
                os.close(fd)
        self._records_fd = self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load(path: str | Path) -> Loaded:
    """Read a results folder or a .jsonl file, without a lock.

    Raises StoreError if there is no such file, or no record in it can be read.
    """
    file = _records_file(Path(path))
    try:
        loaded = _read(file)
    except OSError as error:
        raise StoreError(f"results {path} can't be read: {_describe_error(error)}") from None
    if not loaded.records:
        reason = "; ".join(loaded.notes) or "it is empty"
        raise StoreError(f"results {file} hold no record: {reason}")
    return loaded


_OPEN_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


def _close_in_fork() -> None:
    # A forked child shares the lock. If it outlived a killed parent, no run could resume.
    for store in list(_OPEN_STORES):
        store.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _index_key(record: Record) -> tuple[str, str]:
    return record.key, record.environment.fingerprint


def _lock(folder: Path) -> int:
    """Take the folder's lock and write our pid to it; StoreError if another process has it."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
        os.close(fd)
        holder = f"process {pid}" if pid.isdigit() else "another process"
        raise StoreError(
            f"results folder {folder} is in use by {holder}; wait for it, or name another folder"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _sync_folder(folder: Path) -> None:
    """Sync the folder: the name of a new file is on disk only after that."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _repair_tail(fd: int, folder: Path) -> list[str]:
    """Repair an incomplete last line; return a note if there was one."""
    start, tail = _read_unfinished_line(fd)
    if not tail:
        return []
    if _is_record(tail):
        os.write(fd, b"\n")
        os.fsync(fd)
        return [f"the last line of {folder / RECORDS} lacked only its line end, which was added"]
    with open(folder / TORN, "ab") as torn_file:
        torn_file.write(tail + b"\n")
        torn_file.flush()
        os.fsync(torn_file.fileno())
    os.ftruncate(fd, start)
    os.fsync(fd)
    return [
        f"the last line of {folder / RECORDS} was torn by a writer that was killed; "
        f"its {len(tail)} bytes were moved to {TORN} and that trial will be run again"
    ]


def _read_unfinished_line(fd: int, block: int = 1 << 16) -> tuple[int, bytes]:
    """Return the offset of the bytes after the last line end, and these bytes."""
    start = os.fstat(fd).st_size
    tail = b""
    while start > 0:
        step = min(block, start)
        start -= step
        tail = os.pread(fd, step, start) + tail
        if (end := tail.rfind(b"\n")) >= 0:
            return start + end + 1, tail[end + 1 :]
    return 0, tail


def _is_record(line: bytes) -> bool:
    try:
        _parse(line, RecordInterner())
    except (NewerSchemaError, ValueError) as error:
        return isinstance(error, NewerSchemaError)
    return True


def _parse(line: bytes, interner: RecordInterner) -> Record:
    """Parse one line. Raises NewerSchemaError, or ValueError if it is not a record."""
    with suppress(ValueError):
        record = interner.read(line)
        if "schema_" in record.model_fields_set:
            return record
    # why the line can't be read; or it is JSON that only Python's reader accepts
    data = json.loads(line)
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ValueError("no schema")
    if schema > SCHEMA:
        # a newer schema may have it in another place
        environment = data.get("environment")
        version = environment.get("longseq") if isinstance(environment, dict) else None
        raise NewerSchemaError(schema, version if isinstance(version, str) else None)
    return interner.share(Record.model_validate(data))


def _read(file: Path) -> Loaded:
    loaded, interner = Loaded([]), RecordInterner()
    torn = None
    with gc_disabled(), open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                loaded.records.append(_parse(line, interner))
            except NewerSchemaError as error:
                loaded.newer.setdefault(error.schema, []).append(number)
                if error.writer:
                    loaded.writers.setdefault(error.schema, error.writer)
            except (ValueError, RecursionError):
                loaded.broken.append(number)
                torn = None if line.endswith(b"\n") else number
        keep_uncollected(loaded.records)
    loaded.notes.extend(_describe_skipped(loaded, torn))
    return loaded


def _describe_skipped(loaded: Loaded, torn: int | None) -> Iterator[str]:
    broken = [number for number in loaded.broken if number != torn]
    if broken:
        yield f"{_format_lines(broken)} not a record and skipped (unchanged on disk)"
    if torn is not None:
        yield f"line {torn} is not finished: its writer is still running or was killed"
    for schema, numbers in sorted(loaded.newer.items()):
        writer = loaded.writers.get(schema)
        reader = f", which longseq {writer} reads" if writer else ""
        yield (
            f"{_format_lines(numbers)} written by a newer longseq (schema {schema}{reader}); "
            f"this one reads {SCHEMA}"
        )


def _format_lines(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
    return f"{len(numbers)} lines ({shown}) are"


def _records_file(path: Path) -> Path:
    """Return the records file of a folder or file; StoreError names a similar file."""
    if path.is_dir():
        if (path / RECORDS).is_file():
            return path / RECORDS
        folders = sorted(f"{path / file.parent.name}" for file in path.glob(f"*/{RECORDS}"))
        hint = f"; did you mean {folders[0]}?" if folders else ""
        raise StoreError(f"results folder {path} holds no {RECORDS}{hint}")
    if path.exists():
        return path
    guess = nearest(path.name, [file.name for file in path.parent.glob("*")])
    hint = f"; did you mean {path.parent / guess}?" if guess else ""
    raise StoreError(f"results {path} do not exist{hint}")


def _unwritable(folder: Path, error: OSError) -> StoreError:
    return StoreError(f"results folder {folder} can't be written: {_describe_error(error)}")


def _describe_error(error: OSError) -> str:
    place = f" ({os.fsdecode(error.filename)})" if error.filename else ""
    return f"{error.strerror or error}{place}"
