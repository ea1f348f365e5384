"""Libraries that commands may load, and texts that no file may contain."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longseq_bench.store import RECORDS
from tests.make import record, write_records

ROOT = Path(__file__).parents[1]

# ---- what a command loads ----------------------------------------------------------------------


LOADED = """
import json, sys
from longseq_bench.cli import run
codes = [run(arguments) for arguments in json.loads(sys.argv[1])]
heavy = [name for name in ("torch", "pandas", "yaml", "psutil", "scipy") if name in sys.modules]
print(json.dumps([codes, heavy]), file=sys.stderr)
"""


def loads(*lines: list[str | Path]) -> set[str]:
    """Return the libraries that one new process has loaded after it ran some command lines."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(lines, default=str)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    codes, heavy = json.loads(done.stderr.splitlines()[-1])
    assert codes == [0] * len(lines), done.stderr
    return set(heavy)


COMMANDS = (
    "sweep", "maxlen", "plan", "scaling", "launch", "report", "show", "compare", "list",
    "schema", "doctor",
)  # fmt: skip


def test_help_and_version_load_nothing_heavy() -> None:
    assert loads(["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)) == set()


IMPORTED = """
import sys
import longseq_bench
light = {"torch", "pandas", "pydantic", "rich", "altair", "yaml"} & set(sys.modules)
from longseq_bench import load, maxlen, plan, sweep
print(sorted(light), sorted({"torch", "pandas", "altair"} & set(sys.modules)))
"""


def test_importing_the_package_and_its_functions_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[] []\n", "")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    write_records(tmp_path, [record()])
    assert "torch" not in loads(["report", tmp_path])
    assert (tmp_path / "report.md").exists()


def test_commands_on_records_load_nothing_heavy(tmp_path: Path) -> None:
    write_records(tmp_path, [record()])
    lines = ["show", tmp_path], ["report", tmp_path, "--format", "terminal"]
    assert not loads(*lines) & {"torch", "pandas", "psutil"}


@pytest.mark.slow
def test_the_parent_of_a_sweep_never_loads_torch(tmp_path: Path) -> None:
    config = tmp_path / "one.yaml"
    config.write_text(
        "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\ntokens: 64\n"
        "implementations: sdpa\nrounds: 1\nrepeats: 1\n"
    )
    assert "torch" not in loads(["sweep", config, "--out", tmp_path / "out"])
    assert '"status":"ok"' in (tmp_path / "out" / RECORDS).read_text()


# ---- what no file holds ------------------------------------------------------------------------

MACHINE_PATH = re.compile(rf"(?<![\w.~}}])/({'|'.join(['home', 'work', 'root', 'tmp'])})/")
UNFINISHED = re.compile(rf"\b({'|'.join(['TO' + 'DO', 'FIX' + 'ME', 'X' * 3])})\b")


def committed() -> list[Path]:
    """Every file under version control; without a checkout, everything except caches."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [p for p in ROOT.rglob("*") if not _is_cache(p.relative_to(ROOT))]
    return [path for path in found if path.is_file()]


def _is_cache(path: Path) -> bool:
    return any(p.startswith(".") or p == "__pycache__" or "egg-info" in p for p in path.parts)


def places(pattern: re.Pattern[str]) -> list[str]:
    """Lines of text files that match; images are left out."""
    found = []
    for path in committed():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    return found


def test_no_file_contains_a_path_of_one_machine() -> None:
    assert places(MACHINE_PATH) == []


def test_no_file_contains_unfinished_work() -> None:
    assert places(UNFINISHED) == []


def test_the_patterns_match() -> None:
    assert len(committed()) > 50
    assert MACHINE_PATH.search("cd " + "/".join(["", "home", "me", "longseq"]))
    assert UNFINISHED.search("# " + "TO" + "DO: later")
