"""`longseq verify`: broken lines by number and reason."""

from pathlib import Path

from longseq_bench.cli import run
from longseq_bench.core.model import SCHEMA
from longseq_bench.store import RECORDS
from tests.cli.commands import Capture, document, refusal
from tests.make import record, trial, write_records

LINE = record(trial(seq_len=64)).model_dump_json(by_alias=True)
OLD_LINE = LINE.replace(f'"schema":{SCHEMA}', '"schema":2')


def test_good_records_are_counted_by_their_checksum(tmp_path: Path, capfd: Capture) -> None:
    folder = write_records(tmp_path / "a", [record(), record()])
    with (folder / RECORDS).open("a") as stream:
        stream.write(OLD_LINE + "\n")
    write_records(tmp_path / "b", [record()])
    one, two = document(capfd, "verify", tmp_path)["files"]
    assert one == {
        "file": str(folder / RECORDS), "lines": 3, "with_checksum": 2, "without_checksum": 1,
        "newer": [], "broken": [],
    }  # fmt: skip
    assert (two["lines"], two["with_checksum"]) == (1, 1)


def test_broken_lines_have_a_number_and_a_reason_and_exit_code_1(
    tmp_path: Path, capfd: Capture
) -> None:
    folder = write_records(tmp_path, [record(), record(trial(seq_len=2048))])
    altered = (folder / RECORDS).read_text().replace("2048", "2047")
    newer = '{"schema":99}'
    lines = [OLD_LINE.replace('"batch":1', '"batch":"1"'), "words", newer, OLD_LINE[:50]]
    (folder / RECORDS).write_text(altered + "\n".join(lines))
    (file,) = document(capfd, "verify", folder, code=1)["files"]
    assert (file["lines"], file["with_checksum"], file["newer"]) == (6, 2, [5])
    broken = {found["line"]: found["reason"] for found in file["broken"]}
    assert list(broken) == [2, 3, 4, 6]
    assert broken[2] == "its checksum does not match: it was altered after it was written"
    assert broken[3] == "trial.workload.batch: Input should be a valid integer"
    assert broken[4].startswith("it is not JSON")
    assert broken[6] == "it is not finished: it has no line end"

    assert run(["verify", str(folder)]) == 1
    printed = capfd.readouterr().out
    assert "Broken lines" in printed
    assert "its checksum does not match" in printed


def test_a_missing_path_is_one_error(tmp_path: Path, capfd: Capture) -> None:
    assert (
        refusal(capfd, "verify", tmp_path / "none") == f"results {tmp_path / 'none'} do not exist"
    )
