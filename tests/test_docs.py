"""The documents: links work, and the plug-in example runs as printed."""

import json
import linecache
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.cli import run
from longseq_bench.config.schema import SweepFile, WorkloadSection
from longseq_bench.launchers.local import LocalLauncher
from tests.simulated import SimulatedLauncher

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "results" / "README.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:\w+/)+\w+\.(?:py|cpp|yaml))`")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    targets = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_source_files_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "longseq_bench")
    missing = [n for n in named if not any((folder / n).exists() for folder in folders)]
    assert missing == []


def test_readme_is_short_and_has_both_set_up_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 8 * 1024
    assert "pip install -e . && longseq maxlen --impl ring\n" in text
    assert 'pip install -e ".[test]" && pytest\n' in text


def test_generated_parts_have_a_generator() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generate import GENERATORS, MARKER
    finally:
        sys.path.pop(0)
    used = {name for page in PAGES for name in MARKER.findall(page.read_text(encoding="utf-8"))}
    assert used == set(GENERATORS)
    reference = GENERATORS["configuration"]()
    keys = [*SweepFile.model_fields, *WorkloadSection.model_fields]
    assert reference.count("\n| `") == len(keys)
    assert all(f"| `{key}` |" in reference for key in keys)
    assert "| `time_cap` | number up to 31,536,000, text such as `500ms`, *list* |" in reference


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: LocalLauncher) -> Path:
    """The current folder: what the documents name of a checkout, and few records to read.

    The implementations are those of this machine; their memory and times come by formula.
    """

    class Formulas(SimulatedLauncher):
        catalogue = staticmethod(launcher.catalogue)
        check = staticmethod(launcher.check)

    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Formulas)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "results" / "xeon2").mkdir(parents=True)
    for name in ("quickstart", "maxlen_forward"):
        (tmp_path / "results" / "xeon2" / name).symlink_to(ROOT / "results" / "xeon2" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(block: str, names: dict[str, Any], number: int = 0) -> None:
    """Run Python code of a document as a notebook does, which keeps the source of functions."""
    file = f"<block {number}>"
    linecache.cache[file] = len(block), None, block.splitlines(keepends=True), file
    exec(compile(block, file, "exec"), names)


def test_the_examples_of_the_python_api_run(checkout: Path) -> None:
    torch = pytest.importorskip("torch")
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    names: dict[str, Any] = dict.fromkeys("qkv", torch.randn(1, 2, 256, 16))
    names |= {"x": torch.randn(256, 1, 512), "padding": torch.zeros(1, 256, dtype=torch.bool)}
    names["__name__"] = "__main__"
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        execute(block, names, number)
    assert names["found"].maxima[0].max_tokens == 256
    assert names["out"].shape == (256, 1, 512)
    assert "time_s" in names["frame"]


def questions() -> list[tuple[str, str]]:
    """The language and the text of each block of code below Questions."""
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    section = page.partition("## Questions\n")[2].partition("\n## ")[0]
    assert section.count("\n**") == 4
    return re.findall(r"```(sh|python)\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize(("language", "block"), questions())
def test_each_question_has_a_short_answer(
    language: str, block: str, checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in block.splitlines() if line]
    assert len(lines) <= 3
    if language == "python":
        names: dict[str, Any] = {}
        execute(block, names)
        assert len(names["frame"]) > 0
        return
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "longseq"
        names_given = [b for a, b in pairwise(arguments) if a == "--impl"]
        assert run([*arguments, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)["results"]
        assert [one["implementation"] for one in found] == names_given
        assert found[0]["max_tokens"] > 0


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of *Extending* in a folder, installed as pip would."""
    folder = tmp_path_factory.mktemp("nearby")
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"`(\w+\.py)`\n\n```python\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(text)
    points = re.search(r'"longseq_bench\.implementations"\]\n(nearby = .*?)\n', page)
    assert points
    info = folder / "nearby-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nearby\nVersion: 0.1\n")
    point = points[1].replace('"', "")
    (info / "entry_points.txt").write_text(f"[longseq_bench.implementations]\n{point}\n")
    return folder


MEASURED = """
from longseq_bench.cli import run
def test_measured(capfd):
    command = "maxlen --impl nearby -o window=64 --mode train --causal --kv-heads 2"
    assert run([*command.split(), "--memory-budget", "64MiB", "--ceiling", "256"]) == 0
    assert " 256 " in capfd.readouterr().out
"""


@pytest.mark.slow
def test_the_plug_in_example_is_measured_and_passes_its_contract_test(plugin: Path) -> None:
    (plugin / "test_measured.py").write_text(MEASURED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        capture_output=True, text=True, cwd=plugin, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{plugin}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d\d passed", done.stdout)
