"""What lies on Python's path runs only if the user named it; what breaks there is named."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from longseq_bench import __version__
from tests.make import record, write_records

ROOT = Path(__file__).parents[2]
TINY = "tokens: 64\nimplementations: [sdpa]\n"
CONSOLE_SCRIPT = "import sys; sys.path.pop(0); from longseq_bench.__main__ import main; main()"


def longseq(
    folder: Path,
    *first: Path,
    path: str = str(ROOT),
    command: Sequence[str] = ("--version",),
    starter: Sequence[str] = ("-m", "longseq_bench"),
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with more folders on Python's path."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, first), path])}
    return subprocess.run(
        [sys.executable, *starter, *command],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_module_in_the_current_folder_is_not_run(tmp_path: Path) -> None:
    for name in ("typer", "rich", "inspect"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this ran: ' + __name__)")
    done = longseq(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"longseq {__version__}\n", "")


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "from rich import nothing"])
def test_a_broken_module_that_hides_another_is_named(tmp_path: Path, code: str) -> None:
    named = tmp_path / "tools"
    named.mkdir()
    (named / "typer.py").write_text(code)
    done = longseq(tmp_path, named)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"; {named}/typer.py hides the module typer of " in line


@pytest.mark.parametrize(
    ("module", "code"),
    [("psutil", "exit(0)"), ("yaml", "exit(0)"), ("json", "exit(0)"), ("pydantic_core", "exit(0)"),
     ("annotated_types", "x = 1"), ("yaml", "1 / 0"), ("torch", "exit(0)")],
)  # fmt: skip
def test_a_module_that_is_hidden_until_a_command_needs_it_is_named(
    tmp_path: Path, module: str, code: str
) -> None:
    hiding = tmp_path / "tools" / f"{module}.py"
    hiding.parent.mkdir()
    hiding.write_text(f"from sys import exit\n{code}\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = longseq(tmp_path, hiding.parent, command=["sweep", "tiny.yaml", "--dry-run"])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{hiding} hides the module {module} of " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hidden_module_of_the_charts_is_named(tmp_path: Path) -> None:
    hiding = tmp_path / "tools" / "altair.py"
    hiding.parent.mkdir()
    hiding.write_text("raise SystemExit")
    write_records(tmp_path / "r", [record()])
    done = longseq(tmp_path, hiding.parent, command=["report", "r", "--format", "html,md"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"longseq: {hiding} ended the program when it was imported; ")


def test_a_module_that_ends_the_program_is_named_if_it_hides_none(tmp_path: Path) -> None:
    """Such as a broken installation."""
    (tmp_path / "tools").mkdir()
    lazy = tmp_path / "tools" / "sitecustomize.py"
    lazy.write_text(
        "import sys\nclass Finder:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'psutil':\n            import ender\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    ender = tmp_path / "tools" / "ender.py"
    ender.write_text("exit(0)")  # by a function of another module, Python's own site
    done = longseq(tmp_path, ender.parent, command=["doctor"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"longseq: {ender} ended the program when it was imported\n"


def test_an_empty_item_of_pythonpath_may_stand_for_a_deleted_folder(tmp_path: Path) -> None:
    script = f"import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); {CONSOLE_SCRIPT}"
    done = longseq(tmp_path, path=f":{ROOT}", starter=["-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"longseq {__version__}\n", "")


def test_an_empty_item_of_pythonpath_is_not_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('this ran')")
    (tmp_path / "typer.py").write_text("raise SystemExit('this ran')")
    path = f":{ROOT}"
    done = longseq(tmp_path, path=path, command=["list"], starter=["-c", CONSOLE_SCRIPT])
    assert (done.returncode, done.stderr) == (0, "")
    done = longseq(tmp_path, path=f".{path}", command=["list"], starter=["-c", CONSOLE_SCRIPT])
    assert (done.returncode, done.stdout) == (2, "")
    assert "hides the module typer" in done.stderr
