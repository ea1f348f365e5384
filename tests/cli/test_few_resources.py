"""Commands of a process with a small address space, few open files, or without its streams."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.reports.render import _pictures
from tests.make import record, trial, write_records


def shell(prefix: str, command: str, suffix: str = "") -> subprocess.CompletedProcess[str]:
    """Run longseq in a shell, after its words `prefix` and with the redirections `suffix`."""
    text = f"{prefix} {shlex.quote(sys.executable)} -m longseq_bench {command} {suffix}"
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def _records() -> None:
    """Records for which there are charts."""
    tried = [trial(name, seq_len=n) for name in ("sdpa", "dense") for n in (1024, 2048)]
    write_records("kept", [record(one) for one in tried])


@pytest.mark.parametrize("command", ["report kept", "compare kept kept"])
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (
            "ulimit -v 6000000;",
            "they need 65 GiB of address space, and the limit (`ulimit -v`) is 5.72 GiB",
        ),
        ("ulimit -n 12;", "they need 24 more open files, and the limit (`ulimit -n`) is 12"),
    ],
)
def test_a_report_is_written_without_charts_where_none_can_be_drawn(
    command: str, limit: str, reason: str
) -> None:
    """The library that draws them would end the process (SIGTRAP), or panic."""
    done = shell(limit, f"{command} --format md --out out")
    assert done.returncode == 0, done.stderr[-2000:]
    note = f"The charts are left out: {reason}."
    assert done.stderr.splitlines()[-1] == note
    (report,) = Path("out").glob("*.md")
    assert note.replace("`", "\\`") in report.read_text()
    assert "svg" not in report.read_text()
    assert [path.name for path in Path("out").iterdir()] == [report.name]


def test_a_library_that_panics_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import vl_convert

    class PanicException(BaseException):
        """As pyo3 raises it."""

    def panic(spec: object) -> None:
        raise PanicException("can't spawn\na thread")

    monkeypatch.setattr(vl_convert, "vegalite_to_svg", panic)
    reason = _pictures.unavailable_reason.__wrapped__()
    assert reason == "vl-convert-python does not work here (can't spawn a thread)"


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_process_without_streams_writes_the_same_report(streams: str) -> None:
    assert shell("", "report kept --out whole").returncode == 0
    done = shell("", "report kept --out out", streams)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr[-2000:]
    files = {
        folder: {p.name: p.read_bytes() for p in Path(folder).rglob("*.*")}
        for folder in ("whole", "out")
    }
    assert files["out"] == files["whole"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2> >(exec 0<&-)"], ids=["full", "closed"])
def test_a_run_goes_on_although_nothing_takes_its_progress(stderr: str) -> None:
    """A sweep ended after its first trial, with exit code 1 or even 0."""
    Path("two.yaml").write_text(
        "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\nrounds: 1\nrepeats: 1\n"
        "tokens: [32, 64]\nimplementations: ['f.py:fails', sdpa]\n"
    )
    Path("f.py").write_text("def fails(q, k, v):\n    raise ValueError\n")
    assert shell("", "sweep two.yaml --out out", stderr).returncode == 3
    assert len(Path("out/records.jsonl").read_text().splitlines()) == 4
    assert shell("", "report nowhere", stderr).returncode == 2


def test_an_error_without_stderr_does_not_go_to_stdout() -> None:
    done = shell("", "report nowhere", "2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_sweep_without_streams_runs() -> None:
    Path("one.yaml").write_text(
        "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\nrounds: 1\nrepeats: 1\n"
        "tokens: 32\nimplementations: [sdpa]\n"
    )
    assert shell("", "sweep one.yaml --out out", "<&- >&- 2>&-").returncode == 0
    assert len((Path("out") / "records.jsonl").read_text().splitlines()) == 1
