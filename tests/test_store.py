"""The store: complete lines only, one writer, and a message for every line that is not read."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from longseq_bench.core.errors import StoreError
from longseq_bench.core.model import SCHEMA, Record, Status, environment_failure
from longseq_bench.store import RECORDS, Store, load
from tests import make

ROOT = Path(__file__).parents[1]
EARLIER = 2  # the last schema whose lines have no checksum


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
    assert loaded.records[-1].environment.fingerprint == odd.environment.fingerprint
    assert (loaded.reasons, loaded.notes) == ({}, [])
    assert load(tmp_path / "new" / "folder" / RECORDS) == loaded


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


def test_records_are_found_by_trial_and_environment(tmp_path: Path) -> None:
    here, there = make.environment("alpha", load=(3.0,)), make.environment("beta")
    now = make.environment("alpha", commit="new", load=(0.0,))
    trial = make.trial()
    filed = make.record(trial, where=here)
    with Store(tmp_path) as store:
        store.append(filed)
    with Store(tmp_path) as again:
        assert again.find(trial, here.fingerprint) == again.find(trial, now.fingerprint) == filed
        assert again.find(trial, there.fingerprint) is None
        assert again.find(trial.at(8192), here.fingerprint) is None


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


# ---- lines that are torn, broken, altered or newer ---------------------------------------------


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_is_ended_and_counted(tmp_path: Path, cut: int) -> None:
    file = filled(tmp_path)
    whole = file.read_bytes()
    torn = whole.splitlines(keepends=True)[-1][:-cut][:-1]
    file.write_bytes(whole + torn)
    assert load(tmp_path).notes == [
        "line 4 is skipped (unchanged on disk): its writer is still running or was killed"
    ]
    with Store(tmp_path) as store:
        assert len(store.records) == 3
        assert store.notes[0].startswith("line 4 is skipped (unchanged on disk): not a record")
        store.append(some(4)[3])
    assert file.read_bytes().startswith(whole + torn + b"\n")
    assert load(tmp_path).records == some(4)


@pytest.mark.parametrize("end", [b"", b"\0", b"\0" * 400])
def test_a_last_line_without_line_end_is_kept(tmp_path: Path, end: bytes) -> None:
    file = filled(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + end)
    with Store(tmp_path) as store:
        store.append(some(4)[3])
    assert (load(tmp_path).records, load(tmp_path).reasons) == (some(4), {})


def impossible(new: str) -> Callable[[str], str]:
    """Return the damage that puts a sample into a line of a version before checksums."""
    return lambda line: re.sub(r'("samples":\[)[^],]+', rf"\g<1>{new}", as_earlier_schema(line))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        *((lambda _, bad=bad: bad, "not a record: ") for bad in ("{", "[1]", "0", "[" * 100_000)),
        (lambda _: '{"schema": 1}', "not a record: trial: Field required"),
        (lambda line: line.replace('"seq_len":2048', '"seq_len":2049'), "its checksum does not ma"),
        (lambda line: without_checksum(line), f"it has no checksum, as lines of schema {SCHEMA}"),
        (lambda line: json.dumps(json.loads(line)), "not a record: checksum: Extra inputs are not"),
        *(
            (impossible(new), "'time' has the sample ")
            for new in ("Infinity", "1e400", "NaN", "-1")
        ),
        (impossible('"Infinity"'), "'time' has the sample inf, which cannot be"),
    ],
    ids=range(13),
)
def test_a_line_that_is_no_record_is_skipped_counted_and_kept(
    tmp_path: Path, damage: Callable[[str], str], reason: str
) -> None:
    file = filled(tmp_path)
    first, second, third = file.read_text().splitlines(keepends=True)
    file.write_text(first + damage(second).strip() + "\n" + third)
    before = file.read_bytes()
    loaded = load(tmp_path)
    assert (loaded.records, [*loaded.reasons]) == ([some(3)[0], some(3)[2]], [2])
    with Store(tmp_path) as store:
        assert store.notes == loaded.notes
        assert store.notes[0].startswith(f"line 2 is skipped (unchanged on disk): {reason}")
        store.append(some(4)[3])
    assert file.read_bytes().startswith(before)


def test_a_newer_schema_is_skipped_and_named(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    newer = json.dumps({"schema": SCHEMA + 1, "anything": "else"})
    known = json.dumps({"schema": 8, "environment": {"longseq": "0.9.0"}})
    file.write_text(file.read_text() + newer + "\n" + newer + "\n" + known + "\n")
    loaded = load(tmp_path)
    assert (loaded.records, [*loaded.reasons]) == (some(2), [3, 4, 5])
    reads = f"this one reads {SCHEMA}"
    by, disk = "written by a newer longseq", "skipped (unchanged on disk)"
    assert loaded.notes == [
        f"2 lines (3, 4) are {disk}: {by} (schema {SCHEMA + 1}); {reads}",
        f"line 5 is {disk}: {by} (schema 8, which longseq 0.9.0 reads); {reads}",
    ]
    file.write_text(newer + "\n")
    with pytest.raises(StoreError, match=rf"line 1 is .*: {by} \(schema {SCHEMA + 1}\)"):
        load(tmp_path)


def test_a_line_ends_with_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    line = filled(tmp_path, 1).read_text().strip()
    body, _, ending = line.rpartition(',"checksum":"')
    assert ending == hashlib.sha256(body.encode()).hexdigest()[:16] + '"}'
    assert body + "}" == without_checksum(line) == some(1)[0].model_dump_json(by_alias=True)


def test_lines_of_versions_before_checksums_are_read(tmp_path: Path) -> None:
    """Also those that another program wrote anew, with spaces or in another order."""
    file = filled(tmp_path, 2)
    first, second = file.read_text().splitlines()
    earlier = as_earlier_schema(first)
    data = json.loads(earlier)
    lines = [earlier, json.dumps(data), json.dumps(data, sort_keys=True), second]
    file.write_bytes("\r\n".join([*lines, ""]).encode())
    old = some(1)[0].model_copy(update={"schema_": EARLIER})
    assert load(tmp_path).records == [old, old, old, some(2)[1]]


@pytest.mark.parametrize(("status", "kept"), [("wrong", True), ("ok", False)])
def test_an_infinite_error_is_one_of_a_failed_trial(
    tmp_path: Path, status: Status, kept: bool
) -> None:
    record = make.record(came_to=make.outcome(status, "far", max_error=float("inf")))
    make.write_records(tmp_path, [*some(1), record])
    assert [*load(tmp_path).reasons] == ([] if kept else [2])


# ---- one writer, killed writers, disks ---------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    code = "import sys; from longseq_bench.store import Store; s = Store(sys.argv[1]);"
    command = [sys.executable, "-c", code + "print('open', flush=True); input()", str(tmp_path)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=f"folder {tmp_path} is in use by another process"):
            Store(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    with Store(tmp_path) as store:
        assert store.notes == []


def test_a_full_disk_leaves_no_torn_line_and_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled(tmp_path)
    whole = file.read_bytes()
    write, left = os.write, [50]

    def full(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: left[0]])
        left[0] -= written
        return written

    with Store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StoreError) as failed:
                store.append(some(4)[3])
        assert f"{tmp_path} can't be written: No space left on device" in str(failed.value)
        assert f"The 3 records before are in {file}; free space" in str(failed.value)
        assert store.find(some(4)[3].trial, make.environment().fingerprint) is None
        assert file.read_bytes() == whole
        store.append(some(4)[3])
    assert load(tmp_path).records == some(4)


@pytest.mark.parametrize("before", ["no folder", "a torn line", "an open end"])
def test_all_is_on_disk_before_an_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The power may fail at any moment: data is synced after a write, a folder after a new name."""
    folder, count = tmp_path / "new", 0 if before == "no folder" else 2
    if count:
        file = filled(folder, count)
        end = b"\n{" if before == "a torn line" else b""
        file.write_bytes(file.read_bytes()[:-1] + end)
    not_synced, paths = set[str](), dict[int, str]()
    os_open, write, fsync = os.open, os.write, os.fsync

    def note_open(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and not path.exists():
            not_synced.add(str(path.parent))
        fd = os_open(path, flags, *mode)
        paths[fd] = str(path)
        return fd

    def note_write(fd: int, data: bytes) -> int:
        not_synced.add(paths[fd])
        return write(fd, data[:100])

    def note_sync(fd: int) -> None:
        fsync(fd)
        not_synced.discard(paths[fd])

    for name, function in (("open", note_open), ("write", note_write), ("fsync", note_sync)):
        monkeypatch.setattr(os, name, function)
    with Store(folder) as store:
        for number, record in enumerate(some(4)[count:], count + 1):
            store.append(record)
            assert not_synced == set()
            assert load(folder).records == some(number)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre without the mount option flock."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=f"folder {tmp_path} is on a file system without locks"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/longseq")):
        with pytest.raises(StoreError, match=f"results folder {folder} can't be written"):
            Store(folder)


# ---- the file is moved, deleted or replaced while a run writes ---------------------------------


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced", "cut"])
def test_a_run_whose_file_was_taken_away_ends_and_its_records_are_copied(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = filled(tmp_path / "out")
    with Store(tmp_path / "out") as store:
        if how == "moved":
            (tmp_path / "out").rename(tmp_path / "elsewhere")
        elif how == "deleted":
            shutil.rmtree(tmp_path / "out")
        elif how == "replaced":  # as an editor saves a file
            (tmp_path / "edited").write_bytes(file.read_bytes())
            (tmp_path / "edited").rename(file)
        else:
            file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
        with pytest.raises(StoreError, match=f"{file} was moved, deleted, .* 4 records") as failed:
            store.append(some(4)[3])
        store.close()
    copy = re.search(r"copied to (\S+\.jsonl)", str(failed.value))
    assert copy
    assert load(copy[1]).records == some(4)


def test_what_others_append_or_touch_does_not_end_a_run(tmp_path: Path) -> None:
    file = filled(tmp_path)
    with Store(tmp_path) as store:
        store.append(some(4)[3])
        with open(file, "ab") as stream:
            stream.write(b"{}\n")
        os.utime(file)
        store.append(some(5)[4])
    assert load(tmp_path).records == some(5)


def test_a_folder_of_results_folders_suggests_one(tmp_path: Path) -> None:
    filled(tmp_path / "laptop")
    with pytest.raises(StoreError, match=f"holds no {RECORDS}; did you mean {tmp_path}/laptop"):
        load(tmp_path)
