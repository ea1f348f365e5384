"""Results on disk: `records.jsonl` in a results folder, one Record per line (core/record_line.py).

Schema history, by the `schema` field of each line:

1   trial, outcome, environment, started_at, wall_s, processes, purpose, predicted_tokens, command
2   foreseen: the prediction before the run
3   checksum: the last field of a line, over the bytes before it

A line is written with one write and an fsync, so it is complete on disk when `append` returns. An
unfinished line of a killed writer is moved to `records.jsonl.torn`; no other byte is rewritten.
"""

import errno
import fcntl
import os
import re
import socket
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from longseq_bench.core.environment_difference import name_differences
from longseq_bench.core.environment_failure import is_environment_failure
from longseq_bench.core.errors import StoreError, nearest
from longseq_bench.core.interning import RecordInterner, gc_disabled, keep_uncollected
from longseq_bench.core.model import SCHEMA, Environment, Record, Trial
from longseq_bench.core.record_file import (
    append_line,
    find_path,
    is_file_of,
    make_folder,
    read_blocks,
    save_copy,
    sync_folder,
    write_fully,
)
from longseq_bench.core.record_line import (
    MAX_LINE_BYTES,
    TOO_LONG,
    BrokenLineError,
    NewerSchemaError,
    has_checksum,
    read_line,
    read_lines,
    write_line,
)
from longseq_bench.core.user_files import open_regular
from longseq_bench.core.written_file import WrittenFile

RECORDS = "records.jsonl"
TORN = "records.jsonl.torn"
RECOVERED = "records.recovered.jsonl"
UNSAVED = "records.unsaved.jsonl"
LOCK = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
_HOLDER = re.compile(r"([0-9]+)(?: ([\w.-]+))?\n?")


@dataclass(frozen=True)
class Loaded:
    """Records in file order, and the lines that could not be read.

    reasons: of each line that is not a record, by its number from 1.
    newer: line numbers by schema, of lines that a newer longseq wrote.  writers: its version.
    notes: one sentence for the user on each kind of skipped line.
    """

    records: list[Record]
    reasons: dict[int, str] = field(default_factory=dict)
    newer: dict[int, list[int]] = field(default_factory=dict)
    writers: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[int]:
        """Numbers of the lines that are not a record."""
        return list(self.reasons)

    @property
    def lines(self) -> int:
        """Number of lines that are not empty."""
        return len(self.records) + len(self.reasons) + sum(map(len, self.newer.values()))


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
            make_folder(self.folder)
            self._lock_fd = _lock_folder(self.folder)
            self._records_fd = _open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            # also held by a run whose .lock was deleted
            _lock(self._records_fd, self.folder, "another process")
            sync_folder(self.folder)
            repairs = _repair_tail(self._records_fd, self.folder)
            self._file = WrittenFile(self._records_fd)
            loaded = _read(self.path)
        except OSError as error:
            self.close()
            raise _unwritable(self.folder, error) from None
        except BaseException:
            self.close()
            raise
        self.records: list[Record] = loaded.records
        self.broken: list[int] = loaded.broken
        self.notes: list[str] = [*repairs, *loaded.notes]
        self._index = {_index_key(record): record for record in self.records}
        # of each trial, by its key: where it was measured last, before this run
        self._measured_in = {key: one.environment for (key, _), one in self._index.items()}
        _OPEN_STORES.add(self)

    def append(self, record: Record) -> Record:
        """Write a record to disk, completely or not at all, and return it.

        Raises StoreError if it can't be written (disk full, store closed), or if the folder or its
        file is no longer the one that was opened (moved, deleted, replaced). The error names the
        file that has the record.
        """
        if self._records_fd is None:
            raise StoreError(f"results folder {self.folder} is closed; nothing was written")
        line = write_line(record)
        self._file.examine(trust_time=True)
        try:
            append_line(self._records_fd, line)
        except OSError as error:
            raise StoreError(
                f"{_unwritable(self.folder, error)}. {self._save_unwritten(line)}"
            ) from None
        self.records.append(record)
        self._index[_index_key(record)] = record
        self._file.take_in()
        self.check_in_place()
        return record

    def check_in_place(self, *, trust_time: bool = True) -> None:
        """Raise StoreError if the folder or the file of records was moved, deleted or replaced.

        The error names the file that has all records: where it is now, or a copy of it.

        trust_time: a file whose size and time are those of the last append holds what it held.
        """
        if self._records_fd is None:
            return
        self._file.examine(trust_time=trust_time)
        if self._file.is_altered:
            what = "another program wrote to it"
        elif is_file_of(self._records_fd, self.path):
            return
        elif os.path.exists(self.path):
            what = "another file took its place"
        else:
            what = "it is no longer there"
        raise StoreError(
            f"{self.path} was moved, deleted or replaced while this run wrote to it: {what}, and "
            f"{self._locate(self._records_fd)}. Put that file back as {RECORDS} in a results "
            "folder and name the folder with --out to go on"
        )

    def _locate(self, fd: int) -> str:
        """Say where the records are now: in the file that was moved, else in a copy."""
        count = f"its {len(self.records):,} records"
        if self._file.is_altered:
            copied = save_copy(RECOVERED, map(write_line, self.records), self.folder)
        elif place := find_path(fd):
            return f"{count} are in {place}"
        else:
            copied = save_copy(RECOVERED, read_blocks(fd), self.folder)
        return f"{count} were copied to {copied}" if copied else f"{count} are lost"

    def _save_unwritten(self, line: bytes) -> str:
        """Save a line that the file did not take, and return a sentence on what is where."""
        before = f"The {len(self.records):,} records before are in {self.path}; the last one"
        if saved := save_copy(UNSAVED, [line], self.folder):
            return f"{before} was saved as {saved}. Free space, append it to {RECORDS}, run again"
        return f"{before} could not be saved anywhere. Free space and run again: its trial repeats"

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
        """Return a sentence if the trial was measured, but only elsewhere; else an empty string.

        It counts all records of the environment that measured the trial last.
        """
        other = self._measured_in.get(trial.key)
        if other is None or other.fingerprint == here.fingerprint:
            return ""
        count = sum(record.environment.fingerprint == other.fingerprint for record in self.records)
        records, do = ("record", "does") if count == 1 else ("records", "do")
        return (
            f"{count:,} {records} of {other.host} {do} not count here: another environment "
            f"({name_differences(here, other)})"
        )

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        for fd in (self._records_fd, self._lock_fd):
            if fd is not None:
                os.close(fd)
        self._records_fd = self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            # an interrupted run says that its records are on disk
            if kind is None or issubclass(kind, KeyboardInterrupt):
                self.check_in_place(trust_time=False)
        finally:
            self.close()


def load(path: str | Path) -> Loaded:
    """Read a results folder or a .jsonl file, without a lock.

    Raises StoreError if there is no such file, or no record in it can be read.
    """
    loaded = read(path)
    if not loaded.records:
        reason = "; ".join(loaded.notes) or "it is empty"
        raise StoreError(f"results {_records_file(Path(path))} hold no record: {reason}")
    return loaded


def read(path: str | Path) -> Loaded:
    """Read a results folder or a .jsonl file, which may hold no record, without a lock.

    Raises StoreError if there is no such file, or if it can't be read.
    """
    try:
        return _read(_records_file(Path(path)))
    except OSError as error:
        raise StoreError(f"results {path} can't be read: {_describe_error(error)}") from None


def count_checksums(path: str | Path) -> int:
    """Return the number of lines of a readable file or folder that have a checksum."""
    with open(_records_file(Path(path)), "rb") as stream:
        return sum(map(has_checksum, read_lines(stream)))


def _read(file: Path) -> Loaded:
    records, interner = list[Record](), RecordInterner()
    reasons: dict[int, str] = {}
    newer: dict[int, list[int]] = {}
    writers: dict[int, str] = {}
    is_torn = False
    with gc_disabled(), open(_open(file, os.O_RDONLY), "rb") as stream:
        for number, line in enumerate(read_lines(stream), 1):
            if line.isspace():
                continue
            try:
                records.append(read_line(line, interner))
            except NewerSchemaError as error:
                newer.setdefault(error.schema, []).append(number)
                if error.writer:
                    writers.setdefault(error.schema, error.writer)
            except BrokenLineError as error:
                reasons[number] = str(error)
                is_torn = not line.endswith(b"\n")
        keep_uncollected(records)
    if is_torn:
        reasons[next(reversed(reasons))] = "it is not finished: it has no line end"
    loaded = Loaded(_without_superseded(records), reasons, newer, writers)
    return replace(loaded, notes=list(_describe_skipped(loaded, is_torn)))


_OPEN_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


def _close_in_fork() -> None:
    # A forked child shares the lock. If it outlived a killed parent, no run could resume.
    for store in list(_OPEN_STORES):
        store.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _open(path: Path, flags: int) -> int:
    return open_regular(
        path, flags, StoreError,
        "and records are in a regular file; remove it or name another folder",
    )  # fmt: skip


def _index_key(record: Record) -> tuple[str, str]:
    return record.key, record.environment.fingerprint


def _lock_folder(folder: Path) -> int:
    """Take the folder's lock and write our pid and host to it; StoreError if another has it."""
    # a link in its place would lead to a file that is not ours to empty
    fd = _open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        found = _HOLDER.fullmatch(os.pread(fd, 300, 0).decode(errors="replace"))
        holder = f"process {found[1]}" if found else "another process"
        # nodes of a cluster may share the folder
        if found and found[2] and found[2] != socket.gethostname():
            holder += f" on {found[2]}"
        _lock(fd, folder, holder)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, folder: Path, holder: str) -> None:
    """Lock a file until its descriptor is closed.

    Raises StoreError if another process has it, or if the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreError(
            f"results folder {folder} is in use by {holder}; wait for it, or name another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StoreError(
            f"results folder {folder} is on a file system without locks; name a folder on another "
            f"one, or mount it with them (Lustre: mount option flock)"
        ) from None


def _repair_tail(fd: int, folder: Path) -> list[str]:
    """Repair an incomplete last line; return a note if there was one."""
    try:
        start, tail = _read_unfinished_line(fd)
    except BrokenLineError as error:
        raise StoreError(
            f"the last line of {folder / RECORDS} is not a record: {error}; remove it or name "
            "another folder"
        ) from None
    if not tail:
        return []
    # a power loss may leave zeros in place of a line end that was not synced
    whole = tail.rstrip(b"\0")
    if _is_record(whole):
        os.ftruncate(fd, start + len(whole))
        os.write(fd, b"\n")
        os.fsync(fd)
        return [f"the last line of {folder / RECORDS} lacked only its line end, which was added"]
    torn_fd = _open(folder / TORN, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    try:
        write_fully(torn_fd, tail + b"\n")
        os.fsync(torn_fd)
    finally:
        os.close(torn_fd)
    sync_folder(folder)
    os.ftruncate(fd, start)
    os.fsync(fd)
    return [
        f"the last line of {folder / RECORDS} was torn by a writer that was killed; "
        f"its {len(tail)} bytes were moved to {TORN} and that trial will be run again"
    ]


def _read_unfinished_line(fd: int, block: int = 1 << 16) -> tuple[int, bytes]:
    """Return the offset of the bytes after the last line end, and these bytes."""
    start = size = os.fstat(fd).st_size
    blocks = list[bytes]()
    while start > 0:
        step = min(block, start)
        start -= step
        blocks.append(os.pread(fd, step, start))
        if (end := blocks[-1].rfind(b"\n")) >= 0:
            blocks[-1] = blocks[-1][end + 1 :]
            start += end + 1
        if size - start > MAX_LINE_BYTES:
            raise BrokenLineError(TOO_LONG)
        if end >= 0:
            break
    return start, b"".join(reversed(blocks))


def _is_record(line: bytes) -> bool:
    try:
        read_line(line, RecordInterner())
    except BrokenLineError:
        return False
    except NewerSchemaError:
        return True
    return True


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


def _describe_skipped(loaded: Loaded, is_torn: bool) -> Iterator[str]:
    *broken, last = loaded.broken or [0]
    if last and not is_torn:
        broken.append(last)
    if broken:
        yield f"{_format_lines(broken)} not a record and skipped (unchanged on disk)"
    if is_torn:
        yield f"line {last} is not finished: its writer is still running or was killed"
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
        if (path / RECORDS).exists():
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
