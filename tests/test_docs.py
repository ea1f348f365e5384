"""The documents: links lead somewhere, and the plug-in example runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    asked = {name for page in PAGES for name in MARKER.findall(page.read_text(encoding="utf-8"))}
    assert asked == set(GENERATORS)


def test_every_command_is_in_the_command_reference() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generate import generate_commands
    finally:
        sys.path.pop(0)
    reference = generate_commands()
    for command in ("sweep", "maxlen", "plan", "report", "show", "compare", "list", "doctor"):
        assert f"## longseq {command}\n" in reference
    assert "| `--memory-budget TEXT` |" in reference


@pytest.mark.slow
def test_the_plug_in_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the two files of *Extending* by hand, as pip would, and search with them."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    module = re.search(r"`nearby\.py`\n\n```python\n(.*?)```", page, re.DOTALL)
    points = re.search(r'"longseq_bench\.implementations"\]\n(nearby = .*?)\n', page)
    assert module
    assert points
    (tmp_path / "nearby.py").write_text(module[1])
    info = tmp_path / "nearby-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nearby\nVersion: 0.1\n")
    point = points[1].replace('"', "")
    (info / "entry_points.txt").write_text(f"[longseq_bench.implementations]\n{point}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for options in ([], ["--mode", "train", "--causal", "--heads", "4", "--kv-heads", "2"]):
        done = subprocess.run(
            [sys.executable, "-m", "longseq_bench", "maxlen", "--impl", "nearby",
             "-o", "window=64", "--memory-budget", "64MiB", "--ceiling", "256",
             "--out", str(tmp_path / "out"), *options],
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert re.search(r"nearby\s+256\s", done.stdout), done.stdout
