"""Reports of a process with a small address space."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.reports.render import markdown
from tests.make import record, trial, write_records


def shell(prefix: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run longseq in a shell, after its words `prefix`."""
    text = f"{prefix} {shlex.quote(sys.executable)} -m longseq_bench {command}"
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def _records() -> None:
    """Records for which there are charts."""
    tried = [trial(name, seq_len=n) for name in ("sdpa", "dense") for n in (1024, 2048)]
    write_records("kept", [record(one) for one in tried])


@pytest.mark.parametrize("command", ["report kept", "compare kept kept"])
def test_a_report_is_written_without_charts_where_none_can_be_drawn(command: str) -> None:
    """The library that draws them would end the process (SIGTRAP)."""
    reason = "they need 65 GiB of address space, and the limit (`ulimit -v`) is 5.72 GiB"
    done = shell("ulimit -v 6000000;", f"{command} --format md --out out")
    assert done.returncode == 0, done.stderr[-2000:]
    note = f"The charts are left out: {reason}."
    assert done.stderr.splitlines()[-1] == note
    details, page = sorted(Path("out").iterdir())
    assert details.name == f"{page.stem}-details.md"
    assert note.replace("`", "\\`") in page.read_text()
    assert "svg" not in page.read_text() + details.read_text()


def test_a_library_that_panics_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import vl_convert

    class PanicException(BaseException):
        """As pyo3 raises it."""

    def panic(spec: object) -> None:
        raise PanicException("can't spawn\na thread")

    monkeypatch.setattr(vl_convert, "vegalite_to_svg", panic)
    reason = markdown._find_obstacle.__wrapped__()
    assert reason == "vl-convert-python does not work here (can't spawn a thread)"
