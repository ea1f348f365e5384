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

LOADED = """
import json, sys
import longseq_bench
HEAVY = "torch", "pandas", "yaml", "psutil", "scipy", "altair", "pydantic", "rich"
def note(code):
    heavy = [name for name in HEAVY if name in sys.modules]
    print("loaded", json.dumps([code, heavy]), file=sys.stderr)
note(0)
from longseq_bench.cli import run
for arguments in json.loads(sys.argv[1]):
    note(run(arguments))
    if arguments[-1] == "terminal":
        from longseq_bench import load, maxlen, plan, sweep
        note(0)
"""

COMMANDS = "sweep maxlen plan scaling launch report show compare list doctor"


@pytest.mark.slow
def test_a_command_loads_only_what_it_needs(tmp_path: Path) -> None:
    """One process: help, commands that read, imported functions, and those that start trials."""
    records, config, swept = tmp_path / "records", tmp_path / "one.yaml", tmp_path / "out"
    write_records(records, [record()])
    config.write_text(
        "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\ntokens: 64\n"
        "implementations: sdpa\nrounds: 1\nrepeats: 1\n"
    )
    help_ = [["--version"], *([name, "--help"] for name in COMMANDS.split()), ["--help"]]
    read = [["show", str(records)], ["report", str(records), "--format", "terminal"]]
    rest = [["report", str(records)], ["sweep", str(config), "--out", str(swept)], ["doctor"]]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps([*help_, *read, *rest])],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    noted = [json.loads(text) for text in re.findall("^loaded (.*)$", done.stderr, re.MULTILINE)]
    assert [code for code, _ in noted] == [0] * (2 + len(help_) + len(read) + len(rest)), done
    package, *_, helped, _, read_, functions, _, _, last = [set(heavy) for _, heavy in noted]
    assert package == set()
    assert not functions & {"torch", "pandas", "altair"}
    assert not helped & {"torch", "pandas", "yaml", "psutil", "scipy"}
    assert not read_ & {"torch", "pandas", "psutil"}
    assert "torch" not in last
    assert (records / "report.md").exists()
    assert '"status":"ok"' in (swept / RECORDS).read_text()


# ---- what no file holds ------------------------------------------------------------------------

MACHINE_PATH = re.compile(rf"/(?<![\w.~}}]/)({'|'.join(['home', 'work', 'root', 'tmp'])})/")
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


def test_no_file_contains_a_path_of_one_machine_or_unfinished_work() -> None:
    texts = ((path, path.read_bytes()) for path in committed())
    assert [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path, data in texts
        if b"\0" not in data  # an image
        for pattern in (MACHINE_PATH, UNFINISHED)
        for found in pattern.finditer(data.decode(errors="replace"))
    ] == []


def test_the_patterns_match() -> None:
    assert len(committed()) > 50
    assert MACHINE_PATH.search("cd " + "/".join(["", "home", "me", "longseq"]))
    assert UNFINISHED.search("# " + "TO" + "DO: later")
