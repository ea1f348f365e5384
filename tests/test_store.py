"""The store: complete lines only, one writer, and a message for every line that is not read."""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longseq_bench import store
from longseq_bench.core import record_line
from longseq_bench.core.environment_failure import environment_failure
from longseq_bench.core.errors import StoreError
from longseq_bench.core.model import SCHEMA, Record, Status
from longseq_bench.core.record_line import read_lines
from longseq_bench.store import (
    LOCK,
    RECORDS,
    RECOVERED,
    TORN,
    UNSAVED,
    Store,
    count_checksums,
    load,
)
from tests import make

ROOT = Path(__file__).parents[1]
EARLIER = 2  # the last schema whose lines have no checksum
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")


def some(count: int) -> list[Record]:
    return [make.record(make.trial(seq_len=1024 * (i + 1))) for i in range(count)]


def filled(folder: Path, count: int = 3) -> Path:
    with Store(folder) as store:
        for record in some(count):
            store.append(record)
    return folder / RECORDS


def as_earlier_schema(line: str) -> str:
    """The line as versions before checksums wrote it."""
    line = without_checksum(line)
    return line.replace(f'"schema":{SCHEMA},', f'"schema":{EARLIER},', 1)


def without_checksum(line: str) -> str:
    return re.sub(r',"checksum":"[0-9a-f]{16}"}$', "}", line.strip())


def fail_in_mid_line(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """Let the disk fill up after some bytes, for records.jsonl only."""
    write, left = os.write, [taken]

    def full(fd: int, data: bytes) -> int:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) != RECORDS:
            return write(fd, data)
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)


def python(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_records_come_back_equal_and_in_order(tmp_path: Path) -> None:
    odd = make.record(
        make.trial("ring", options={"chunk": 1024, "stages": (2, 3), "wire": None, "f": 1.0}),
        make.outcome("wrong", 'line one\nline "two" | é', "check", max_error=float("inf")),
        predicted_tokens=7,
    )
    with Store(tmp_path / "new" / "folder") as store:
        for record in [*some(2), odd]:
            assert store.append(record) is record
    loaded = load(tmp_path / "new" / "folder")
    assert loaded.records == [*some(2), odd]
    assert loaded.records[-1].key == odd.key
    assert (loaded.broken, loaded.notes) == ([], [])


def test_a_shape_is_measured_once_and_found_under_the_label_that_is_asked(tmp_path: Path) -> None:
    labelled, plain = make.trial(model="mine"), make.trial()
    measured = make.record(labelled)
    with Store(tmp_path) as store:
        store.append(measured)
        fingerprint = measured.environment.fingerprint
        assert store.find(labelled, fingerprint) is measured
        found = store.find(plain, fingerprint)
        assert found is not None
        assert (found.trial, found.outcome) == (plain, measured.outcome)
        assert store.find(labelled.at(2048), fingerprint) is None
    assert load(tmp_path).records == [measured]  # the file keeps its label


def test_a_line_has_its_schema(tmp_path: Path) -> None:
    line = json.loads(filled(tmp_path, 1).read_text())
    assert line["schema"] == SCHEMA
    assert "schema_" not in line


def test_each_record_is_one_write_then_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write, sync = os.write, os.fsync

    def noted_write(fd: int, data: bytes) -> int:
        calls.append("write")
        return write(fd, data)

    def noted_sync(fd: int) -> None:
        calls.append("sync")
        sync(fd)

    with Store(tmp_path) as store:
        monkeypatch.setattr(os, "write", noted_write)
        monkeypatch.setattr(os, "fsync", noted_sync)
        store.append(some(1)[0])
    assert calls == ["write", "sync"]


def test_records_are_found_by_trial_and_environment(tmp_path: Path) -> None:
    here, there = make.environment("alpha"), make.environment("beta")
    trial = make.trial()
    filed = make.record(trial, where=here)
    with Store(tmp_path) as store:
        store.append(filed)
        assert store.find(trial, here.fingerprint) == filed
        assert store.find(trial, there.fingerprint) is None
        assert store.find(trial.at(8192), here.fingerprint) is None
    with Store(tmp_path) as again:
        assert again.find(trial, here.fingerprint) == filed


def test_load_and_commit_do_not_hide_a_record(tmp_path: Path) -> None:
    trial = make.trial()
    with Store(tmp_path) as store:
        store.append(make.record(trial, where=make.environment(commit="old", load=(3.0,))))
        assert store.find(trial, make.environment(commit="new", load=(0.0,)).fingerprint)


def test_a_file_or_its_folder_can_be_read(tmp_path: Path) -> None:
    file = filled(tmp_path)
    assert load(file).records == load(tmp_path).records == load(str(tmp_path)).records


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_is_moved_to_a_file_and_reported(tmp_path: Path, cut: int) -> None:
    file = filled(tmp_path)
    whole = file.read_bytes()
    torn = whole.splitlines(keepends=True)[-1][:-cut][:-1]
    file.write_bytes(whole + torn)
    assert load(tmp_path).broken == [4]
    assert "line 4 is not finished" in load(tmp_path).notes[0]
    with Store(tmp_path) as store:
        assert len(store.records) == 3
        assert "torn" in store.notes[0]
        assert str(len(torn)) in store.notes[0]
        store.append(some(4)[3])
    assert file.read_bytes().startswith(whole)
    assert (tmp_path / TORN).read_bytes() == torn + b"\n"
    assert load(tmp_path).records == some(4)


def test_a_long_torn_line_is_moved_completely(tmp_path: Path) -> None:
    file = filled(tmp_path)
    whole, torn = file.read_bytes(), b'{"schema":2,"command":"' + b"longseq " * 20_000
    file.write_bytes(whole + torn)
    with Store(tmp_path) as store:
        assert len(store.records) == 3
    assert file.read_bytes() == whole
    assert (tmp_path / TORN).read_bytes() == torn + b"\n"


class CountedBytes(bytes):
    """Bytes that count how many of them were copied or searched."""

    handled = 0

    def __add__(self, other: bytes) -> "CountedBytes":
        CountedBytes.handled += len(self) + len(other)
        return CountedBytes(bytes(self) + other)

    def rfind(self, *args: Any) -> int:
        CountedBytes.handled += len(self)
        return super().rfind(*args)


def test_a_long_torn_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = filled(tmp_path)
    torn = b"x" * 2**23
    file.write_bytes(file.read_bytes() + torn)
    pread = os.pread
    monkeypatch.setattr("os.pread", lambda *args: CountedBytes(pread(*args)))
    with Store(tmp_path) as store:
        assert len(store.records) == 3
    assert (tmp_path / TORN).stat().st_size == len(torn) + 1
    assert 0 < CountedBytes.handled < 2 * len(torn)


@pytest.mark.parametrize("end", [b"", b"\0"])
def test_a_last_line_without_line_end_is_kept(tmp_path: Path, end: bytes) -> None:
    file = filled(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + end)
    with Store(tmp_path) as store:
        store.append(some(4)[3])
    assert load(tmp_path).records == some(4)
    assert not (tmp_path / TORN).exists()


@pytest.mark.parametrize(
    "bad", [b"{", b"[1]", b'{"schema": 1}', b"\xff\xfe", b'{"schema": "x"}', b"0", b'{"schema": 0}']
)
def test_a_broken_line_is_skipped_counted_and_kept(tmp_path: Path, bad: bytes) -> None:
    file = filled(tmp_path)
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], bad, *lines[1:]]) + b"\n")
    before = file.read_bytes()
    assert load(tmp_path).broken == [2]
    assert load(tmp_path).records == some(3)
    with Store(tmp_path) as store:
        assert store.broken == [2]
        assert "line 2 is not a record" in store.notes[0]
        store.append(some(4)[3])
    assert file.read_bytes().startswith(before)


def test_the_next_schema_counts_as_newer(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    first = json.loads(file.read_text().splitlines()[0])
    file.write_text(file.read_text() + json.dumps({**first, "schema": SCHEMA + 1}) + "\n")
    assert load(tmp_path).newer == {SCHEMA + 1: [3]}
    assert load(tmp_path).records == some(2)


def test_a_newer_schema_is_skipped_and_named(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    newer = json.dumps({"schema": 7, "anything": "else"})
    file.write_text(file.read_text() + newer + "\n" + newer + "\n")
    loaded = load(tmp_path)
    assert (loaded.records, loaded.newer) == (some(2), {7: [3, 4]})
    note = f"2 lines (3, 4) are written by a newer longseq (schema 7); this one reads {SCHEMA}"
    known = json.dumps({"schema": 8, "environment": {"longseq": "0.9.0"}})
    (tmp_path / "later.jsonl").write_text(file.read_text() + known + "\n")
    assert load(tmp_path / "later.jsonl").notes[-1] == (
        "line 5 is written by a newer longseq (schema 8, which longseq 0.9.0 reads); "
        f"this one reads {SCHEMA}"
    )
    assert loaded.notes == [note]
    file.write_text(newer + "\n")
    with pytest.raises(StoreError, match=r"line 1 is written by a newer longseq \(schema 7\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("schema", "kept"),
    [("1", True), ("2", True), ("0", False), ("-1", False), ("true", False), ('"2"', False),
     ("2.0", False), ("null", False), (None, False)],
)  # fmt: skip
@pytest.mark.parametrize("last", [False, True])
def test_a_schema_is_found_at_any_position_in_a_line(
    tmp_path: Path, schema: str | None, kept: bool, last: bool
) -> None:
    file = filled(tmp_path, 1)
    opening = f'{{"schema":{EARLIER},'
    whole = as_earlier_schema(file.read_text())
    assert whole.startswith(opening)
    inner, entry = whole.removeprefix(opening)[:-1], f'"schema":{schema}'
    fields = [inner] if schema is None else [inner, entry] if last else [entry, inner]
    file.write_text(whole + "\n" + "{" + ",".join(fields) + "}\n")
    loaded = load(tmp_path)
    assert loaded.broken == ([] if kept else [2])
    assert [str(r.schema_) for r in loaded.records] == [str(EARLIER), *[schema] * kept]


def test_the_last_of_two_schemas_in_a_line_applies(tmp_path: Path) -> None:
    file = filled(tmp_path, 1)
    line = as_earlier_schema(file.read_text())
    for other in ("true", "7"):
        with file.open("a") as stream:
            stream.write(f'{line[:-1]},"schema":{other}}}\n')
    loaded = load(tmp_path)
    assert (len(loaded.records), loaded.broken, loaded.newer) == (1, [2], {7: [3]})


def test_other_json_formats_of_a_line_are_read(tmp_path: Path) -> None:
    """With spaces, in another order, or with values that only Python's JSON reader accepts."""
    file = filled(tmp_path, 1)
    line = json.loads(as_earlier_schema(file.read_text()))
    line["outcome"]["facts"] = {"note": "\ud800", "schema": 9, "share": float("nan")}
    file.write_text(json.dumps(line) + "\n" + json.dumps(line, sort_keys=True) + "\n")
    loaded = load(tmp_path)
    assert loaded.broken == []
    assert [r.outcome.facts["note"] for r in loaded.records] == ["\ud800"] * 2


def test_loaded_records_share_equal_parts(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    one, two, three = load(tmp_path).records
    assert one.environment is two.environment is three.environment
    assert one.environment == make.environment()
    assert [one, two, three] == some(3)


def test_the_error_of_a_second_writer_names_the_first(tmp_path: Path) -> None:
    code = "import sys; from longseq_bench.store import Store; s = Store(sys.argv[1]);"
    holder = python(code + "print('open', flush=True); input()", str(tmp_path))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreError) as refused:
            Store(tmp_path)
        assert str(tmp_path) in str(refused.value)
        assert f"process {holder.pid};" in str(refused.value)
    finally:
        holder.kill()
        holder.communicate()
    with Store(tmp_path) as store:
        assert store.notes == []


def test_a_child_of_a_killed_writer_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from longseq_bench.store import Store
store = Store(sys.argv[1])
child = os.fork()
if not child:
    os.close(1); time.sleep(20); os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = python(code, str(tmp_path))
    out, _ = parent.communicate()
    orphan = int(out)
    try:
        time.sleep(0.05)
        with Store(tmp_path) as store:
            assert store.records == []
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_kill_9_keeps_every_complete_line(tmp_path: Path) -> None:
    code = """
import sys
from longseq_bench.store import Store
from tests import make
store = Store(sys.argv[1])
for i in range(1, 100000):
    store.append(make.record(make.trial(seq_len=i)))
    print(i, flush=True)
"""
    writer = python(code, str(tmp_path))
    assert writer.stdout is not None
    printed = [int(writer.stdout.readline()) for _ in range(40)]
    writer.send_signal(signal.SIGKILL)
    printed += [int(line) for line in writer.communicate()[0].split()]
    with Store(tmp_path) as store:
        lengths = [record.trial.workload.seq_len for record in store.records]
        assert lengths[: len(printed)] == printed
        assert lengths == list(range(1, len(lengths) + 1))
        assert store.broken == []


@linux
def test_a_full_disk_leaves_no_torn_line_and_loses_no_record(tmp_path: Path) -> None:
    file = filled(tmp_path)
    whole = file.read_bytes()
    with pytest.MonkeyPatch.context() as patch, Store(tmp_path) as store:
        fail_in_mid_line(patch, 50)
        with pytest.raises(StoreError) as failed:
            store.append(some(4)[3])
        assert f"{tmp_path} can't be written: No space left on device" in str(failed.value)
        assert f"The 3 records before are in {file}" in str(failed.value)
        assert f"the last one was saved as {tmp_path / UNSAVED}" in str(failed.value)
        assert store.find(some(4)[3].trial, make.environment().fingerprint) is None
    assert file.read_bytes() == whole
    with file.open("ab") as stream:
        stream.write((tmp_path / UNSAVED).read_bytes())
    assert load(tmp_path).records == some(4)


@linux
def test_a_half_line_that_stays_does_not_spoil_the_next_record(tmp_path: Path) -> None:
    filled(tmp_path)
    with Store(tmp_path) as store:
        with pytest.MonkeyPatch.context() as patch:
            fail_in_mid_line(patch, 50)
            patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO)))
            with pytest.raises(StoreError, match="No space left"):
                store.append(some(4)[3])
        store.append(some(5)[4])
    loaded = load(tmp_path)
    assert (loaded.records, loaded.broken) == ([*some(3), some(5)[4]], [4])


def test_a_record_that_no_folder_takes_is_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(StoreError, match=r"could not be saved anywhere.*its trial repeats"):
            store.append(some(1)[0])


# ---- the file is moved, deleted or replaced while a run writes ---------------------------------


@linux
def test_a_moved_folder_ends_the_run_and_names_where_the_records_are(tmp_path: Path) -> None:
    folder, moved = tmp_path / "out", tmp_path / "elsewhere"
    with Store(folder) as store:
        store.append(some(1)[0])
        folder.rename(moved)
        with pytest.raises(StoreError) as failed:
            store.append(some(2)[1])
        store.close()
    text = str(failed.value)
    assert text.startswith(f"{folder / RECORDS} was moved, deleted or replaced while this run")
    assert f"its 2 records are in {moved / RECORDS}" in text
    assert load(moved).records == some(2)
    assert not folder.exists()


@linux
def test_a_deleted_folder_ends_the_run_and_its_records_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store("out") as store:
        store.append(some(1)[0])
        shutil.rmtree("out")
        with pytest.raises(StoreError, match=f"its 2 records were copied to {RECOVERED}"):
            store.append(some(2)[1])
        store.close()
    assert load(RECOVERED).records == some(2)
    assert not Path("out").exists()


@linux
def test_a_file_replaced_by_an_editor_ends_the_run(tmp_path: Path) -> None:
    file = filled(tmp_path)
    with Store(tmp_path) as store:
        (tmp_path / "edited").write_bytes(file.read_bytes())
        (tmp_path / "edited").rename(file)
        with pytest.raises(StoreError, match="another file took its place"):
            store.append(some(4)[3])
        store.close()
    assert load(tmp_path).records == some(3)
    assert load(tmp_path / RECOVERED).records == some(4)


def test_a_file_that_an_editor_writes_anew_in_place_ends_the_run(tmp_path: Path) -> None:
    file = filled(tmp_path)
    with Store(tmp_path) as store:
        store.append(some(4)[3])
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
        with pytest.raises(StoreError, match="another program wrote to it") as failed:
            store.append(some(5)[4])
        store.close()
    assert f"its 5 records were copied to {tmp_path / RECOVERED}" in str(failed.value)
    assert load(tmp_path / RECOVERED).records == some(5)


@pytest.mark.parametrize("extra", [0, 3])
def test_another_file_copied_over_the_records_ends_the_run(tmp_path: Path, extra: int) -> None:
    """`cp` keeps the file and its name; what it copies may be as long as what was there."""
    file = filled(tmp_path)
    with Store(tmp_path) as store:
        store.append(some(4)[3])
        other = reversed(file.read_bytes().splitlines(keepends=True) * (1 + extra))
        time.sleep(0.02)  # so that the time of the file changes
        file.write_bytes(b"".join(other))
        with pytest.raises(StoreError, match="another program wrote to it") as failed:
            store.append(some(5)[4])
        store.close()
    assert f"its 5 records were copied to {tmp_path / RECOVERED}" in str(failed.value)
    assert load(tmp_path / RECOVERED).records == some(5)


def test_a_run_whose_file_was_altered_unseen_does_not_end_well(tmp_path: Path) -> None:
    """Neither the size nor the time shows it, as after a copy within a tick of the clock."""
    file = filled(tmp_path)

    def run() -> None:
        with Store(tmp_path) as store:
            store.append(some(4)[3])
            found = os.stat(file)
            file.write_bytes(b"".join(reversed(file.read_bytes().splitlines(keepends=True))))
            os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))

    with pytest.raises(StoreError, match="another program wrote to it"):
        run()
    assert load(tmp_path / RECOVERED).records == some(4)


@pytest.mark.parametrize("addition", [b"", b"{half a line", b"{}\n"])
def test_what_others_append_or_touch_does_not_end_a_run(tmp_path: Path, addition: bytes) -> None:
    file = filled(tmp_path)
    with Store(tmp_path) as store:
        store.append(some(4)[3])
        with open(file, "ab") as stream:
            stream.write(addition)
        os.utime(file)
        store.append(some(5)[4])
    assert load(tmp_path).records == some(5)


@linux
@pytest.mark.parametrize("end", [None, KeyboardInterrupt])
def test_a_run_does_not_end_well_after_its_folder_was_moved(
    tmp_path: Path, end: type[BaseException] | None
) -> None:
    def run() -> None:
        with Store(tmp_path / "out") as store:
            store.append(some(1)[0])
            (tmp_path / "out").rename(tmp_path / "new")
            if end:
                raise end

    with pytest.raises(StoreError, match=f"its 1 records are in {tmp_path / 'new'}"):
        run()


def test_a_second_writer_is_refused_although_the_lock_file_was_deleted(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        (tmp_path / LOCK).unlink()
        with pytest.raises(StoreError, match=f"results folder {tmp_path} is in use"):
            Store(tmp_path)
        store.append(some(1)[0])
    assert load(tmp_path).records == some(1)


@pytest.mark.parametrize("host", [None, "n2"])
def test_a_second_writer_learns_who_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    """Nodes of a cluster may share the folder, and a process id says nothing without its host."""
    with Store(tmp_path):
        if host:
            monkeypatch.setattr(socket, "gethostname", lambda: "n1")
            (tmp_path / LOCK).write_text(f"{os.getpid()} {host}\n")
        holder = f"process {os.getpid()}{f' on {host}' if host else ''};"
        with pytest.raises(StoreError, match=f"{tmp_path} is in use by {holder}"):
            Store(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As Lustre without the mount option flock."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=f"folder {tmp_path} is on a file system without locks"):
        Store(tmp_path)


@pytest.mark.parametrize("through_link", [False, True])
def test_records_are_only_in_a_regular_file(tmp_path: Path, through_link: bool) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for kind, target in (("a FIFO", fifo), ("a character device", Path("/dev/null"))):
        folder = tmp_path / kind
        folder.mkdir()
        if through_link or target != fifo:
            (folder / RECORDS).symlink_to(target)
        else:
            os.mkfifo(folder / RECORDS)
        for opened in (Store, load):
            with pytest.raises(StoreError, match=f"{RECORDS} is {kind}"):
                opened(folder)


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("words")
    (tmp_path / LOCK).symlink_to("precious")
    with pytest.raises(StoreError, match=LOCK):
        Store(tmp_path)
    assert (tmp_path / "precious").read_text() == "words"


# ---- checksums and numbers ---------------------------------------------------------------------


def test_a_line_ends_with_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    line = filled(tmp_path, 1).read_text().strip()
    body, _, ending = line.rpartition(',"checksum":"')
    assert ending == hashlib.sha256(body.encode()).hexdigest()[:16] + '"}'
    assert body + "}" == without_checksum(line) == some(1)[0].model_dump_json(by_alias=True)


def test_an_altered_digit_is_a_broken_line(tmp_path: Path) -> None:
    file = filled(tmp_path)
    file.write_text(file.read_text().replace('"seq_len":2048', '"seq_len":2049'))
    loaded = load(tmp_path)
    assert loaded.records == [some(3)[0], some(3)[2]]
    assert loaded.broken == [2]
    assert "its checksum does not match" in loaded.reasons[2]
    assert loaded.notes == ["line 2 is not a record and skipped (unchanged on disk)"]


def test_a_line_that_lost_its_checksum_is_broken(tmp_path: Path) -> None:
    file = filled(tmp_path)
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([without_checksum(first), *others]) + "\n")
    loaded = load(tmp_path)
    assert loaded.records == some(3)[1:]
    assert loaded.reasons == {1: f"it has no checksum, as lines of schema {SCHEMA} have"}


def test_lines_of_versions_before_checksums_are_read_and_counted(tmp_path: Path) -> None:
    file = filled(tmp_path)
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([as_earlier_schema(first), *others]) + "\n")
    loaded = load(tmp_path)
    old = some(1)[0].model_copy(update={"schema_": EARLIER})
    assert (loaded.records, loaded.broken) == ([old, *some(3)[1:]], [])
    assert (loaded.lines, count_checksums(tmp_path)) == (3, 2)


def test_line_ends_of_other_systems_keep_the_checksum_valid(tmp_path: Path) -> None:
    file = filled(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert load(tmp_path).records == some(3)


def test_a_line_that_another_program_wrote_anew_is_broken(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    first, second = file.read_text().splitlines()
    file.write_text(json.dumps(json.loads(first)) + "\n" + second + "\n")
    assert "another program wrote the line anew" in load(tmp_path).reasons[1]


@pytest.mark.parametrize(
    "new",
    ["[Infinity]", "[1e400]", "[NaN]", "[-0.5]", "[18446744073709551616]", '["0.1"]', "[true]",
     '["Infinity"]', '[0.125],"rank":1'],
)  # fmt: skip
def test_a_sample_that_nothing_can_measure_is_a_broken_line(tmp_path: Path, new: str) -> None:
    record = make.record(came_to=make.outcome(time=0.125)).model_copy(update={"schema_": EARLIER})
    line = record.model_dump_json(by_alias=True)
    old = '[0.125],"rank":0'
    assert old in line
    altered = line.replace(old, new if "rank" in new else f'{new},"rank":0')
    (tmp_path / RECORDS).write_text(line + "\n" + altered + "\n")
    loaded = load(tmp_path)
    assert (loaded.records, loaded.broken) == ([record], [2])


@pytest.mark.parametrize(
    ("old", "new"),
    [('"wall_s":1.5', '"wall_s":-1'), ('"wall_s":1.5', '"wall_s":true'),
     ('"batch":1', '"batch":"1"'),
     ('"seq_len":4096', '"seq_len":9223372036854775808'),
     ('"round":0', '"round":true'), ('"cores":2', '"cores":-2'),
     ('"time_cap":2.0', '"time_cap":NaN'),
     ('"world_size":1', '"world_size":9223372036854775808'), ('"load":[]', '"load":[-1.0]'),
     ('"predicted_tokens":null', '"predicted_tokens":-7'), ('"options":{}', '"options":{"a":NaN}'),
     ('"purpose":"measure"', '"purpose":"density"'), ('"v_head_dim":64', '"v_head_dim":[]')],
)  # fmt: skip
def test_other_impossible_values_are_a_broken_line(tmp_path: Path, old: str, new: str) -> None:
    line = as_earlier_schema(make.record().model_dump_json(by_alias=True))
    assert old in line
    (tmp_path / RECORDS).write_text(line + "\n" + line.replace(old, new) + "\n")
    assert load(tmp_path).broken == [2]


def test_drawn_documents_that_are_too_many_to_draw_again_are_a_broken_line(tmp_path: Path) -> None:
    lengths, mask = (2**33, 2**34), "documents:chatqa2"
    records = [make.record(make.trial(seq_len=tokens, mask=mask)) for tokens in lengths]
    make.write_records(tmp_path, records)
    assert load(tmp_path).reasons == {2: "trial.workload.seq_len is 1.71799e+10, which cannot be"}


@pytest.mark.parametrize(("status", "kept"), [("wrong", True), ("ok", False)])
def test_an_infinite_error_is_one_of_a_failed_trial(
    tmp_path: Path, status: Status, kept: bool
) -> None:
    record = make.record(came_to=make.outcome(status, "far", max_error=float("inf")))
    make.write_records(tmp_path, [*some(1), record])
    assert load(tmp_path).broken == ([] if kept else [2])


def test_many_flops_are_possible_and_as_many_bytes_are_not(tmp_path: Path) -> None:
    records = [make.record(came_to=make.outcome(**{n: 2.0**70})) for n in ("dense_flops", "peak")]
    make.write_records(tmp_path, records)
    assert load(tmp_path).broken == [2]


def test_a_closed_store_refuses_records(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.append(some(1)[0])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/longseq")):
        with pytest.raises(StoreError, match=f"results folder {folder} can't be written"):
            Store(folder)
    (tmp_path / "blocked" / RECORDS).mkdir(parents=True)
    with pytest.raises(StoreError, match=RECORDS):
        Store(tmp_path / "blocked")
    (tmp_path / "blocked" / RECORDS).rmdir()
    with Store(tmp_path / "blocked") as store:
        assert store.records == []


def test_an_empty_or_missing_store_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"folder {tmp_path} holds no {RECORDS}"):
        load(tmp_path)
    (tmp_path / RECORDS).write_text("")
    with pytest.raises(StoreError, match="hold no record: it is empty"):
        load(tmp_path)
    (tmp_path / RECORDS).write_text("nonsense\n")
    with pytest.raises(StoreError, match="hold no record: line 1 is not a record"):
        load(tmp_path)


def test_the_error_of_a_wrong_path_suggests_the_right_one(tmp_path: Path) -> None:
    filled(tmp_path / "laptop")
    with pytest.raises(StoreError, match=f"laptob do not exist; did you mean {tmp_path}/laptop"):
        load(tmp_path / "laptob")
    with pytest.raises(StoreError, match=f"did you mean {tmp_path}/laptop"):
        load(tmp_path)


def test_reading_takes_no_lock_and_leaves_no_file(tmp_path: Path) -> None:
    file = filled(tmp_path)
    (tmp_path / LOCK).unlink()
    load(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    with Store(tmp_path):
        assert len(load(tmp_path).records) == 3


def test_a_trial_that_something_else_ended_runs_again(tmp_path: Path) -> None:
    """And then its first record no longer counts."""
    one, other = make.trial(seq_len=1024), make.trial(seq_len=2048)
    ended = make.record(one, environment_failure("the fork server was killed", "forward"))
    good, again = make.record(other), make.record(one)
    with Store(tmp_path) as store:
        for record in (ended, good):
            store.append(record)
        fingerprint = ended.environment.fingerprint
        assert store.find(one, fingerprint) is None
        assert store.find(other, fingerprint) is good
    assert load(tmp_path).records == [ended, good]
    with Store(tmp_path) as store:
        assert store.find(one, fingerprint) is None
        store.append(again)
        assert store.find(one, fingerprint) is again
    assert load(tmp_path).records == [good, again]


def test_the_store_needs_neither_torch_nor_pandas() -> None:
    code = "import sys, longseq_bench.store; print({'torch', 'pandas'} & set(sys.modules))"
    assert python(code).communicate()[0] == "set()\n"


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled(tmp_path)
    longest = max(map(len, file.read_bytes().splitlines(keepends=True)))
    for module in (record_line, store):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", longest)
    monkeypatch.setattr(record_line, "_BLOCK_BYTES", 64)
    first, *others = file.read_bytes().splitlines(keepends=True)
    asked = list[int]()

    class Watched(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            asked.append(-1 if size is None else size)
            return super().readline(size)

    endless = b"\0" * (5 * longest)
    lines = list(read_lines(Watched(first + endless + b"\n" + b"".join(others))))
    assert lines == [first, endless[: longest + 1] + b"\n", *others]
    assert set(asked) == {longest + 1, 64}

    file.write_bytes(first + b"x" * (3 * longest) + b"\n" + b"".join(others))
    loaded = load(tmp_path)
    assert (len(loaded.records), loaded.broken) == (3, [2])
    assert loaded.reasons[2].startswith("it has more than ")
    assert count_checksums(file) == 3

    file.write_bytes(first + b"x" * (3 * longest))
    with pytest.raises(StoreError, match=r"the last line of .* is not a record: it has more than"):
        Store(tmp_path)
    assert load(tmp_path).records == some(3)[:1]
