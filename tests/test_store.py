"""The store: complete lines only, one writer, and a message for every line that is not read."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longseq_bench.core.errors import StoreError
from longseq_bench.core.model import SCHEMA, Record
from longseq_bench.store import LOCK, RECORDS, TORN, Store, load
from tests import make

ROOT = Path(__file__).parents[1]


def some(count: int) -> list[Record]:
    return [make.record(make.trial(seq_len=1024 * (i + 1))) for i in range(count)]


def filled(folder: Path, count: int = 3) -> Path:
    with Store(folder) as store:
        for record in some(count):
            store.append(record)
    return folder / RECORDS


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


def test_a_last_line_without_line_end_is_kept(tmp_path: Path) -> None:
    file = filled(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
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
    note = "2 lines (3, 4) are written by a newer longseq (schema 7); this one reads 2"
    known = json.dumps({"schema": 8, "environment": {"longseq": "0.9.0"}})
    (tmp_path / "later.jsonl").write_text(file.read_text() + known + "\n")
    assert load(tmp_path / "later.jsonl").notes[-1] == (
        "line 5 is written by a newer longseq (schema 8, which longseq 0.9.0 reads); "
        "this one reads 2"
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
    opening = f'{{"schema":{SCHEMA},'
    whole = file.read_text().strip()
    assert whole.startswith(opening)
    inner, entry = whole.removeprefix(opening)[:-1], f'"schema":{schema}'
    fields = [inner] if schema is None else [inner, entry] if last else [entry, inner]
    file.write_text(whole + "\n" + "{" + ",".join(fields) + "}\n")
    loaded = load(tmp_path)
    assert loaded.broken == ([] if kept else [2])
    assert [str(r.schema_) for r in loaded.records] == [str(SCHEMA), *[schema] * kept]


def test_the_last_of_two_schemas_in_a_line_applies(tmp_path: Path) -> None:
    file = filled(tmp_path, 1)
    line = file.read_text().strip()
    for other in ("true", "7"):
        with file.open("a") as stream:
            stream.write(f'{line[:-1]},"schema":{other}}}\n')
    loaded = load(tmp_path)
    assert (len(loaded.records), loaded.broken, loaded.newer) == (1, [2], {7: [3]})


def test_other_json_formats_of_a_line_are_read(tmp_path: Path) -> None:
    """With spaces, in another order, or with values that only Python's JSON reader accepts."""
    file = filled(tmp_path, 1)
    line = json.loads(file.read_text())
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


def test_an_incomplete_write_leaves_no_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled(tmp_path)
    whole, write = file.read_bytes(), os.write
    with Store(tmp_path) as store:
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:50]))
        with pytest.raises(StoreError, match=f"{tmp_path} can't be written: only 50 of"):
            store.append(some(4)[3])
        assert store.find(some(4)[3].trial, make.environment().fingerprint) is None
    assert file.read_bytes() == whole


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


def test_the_store_needs_neither_torch_nor_pandas() -> None:
    code = "import sys, longseq_bench.store; print({'torch', 'pandas'} & set(sys.modules))"
    assert python(code).communicate()[0] == "set()\n"
