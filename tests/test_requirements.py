"""What an installation needs and holds: `pyproject.toml`, the files of versions, the sdist."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools.command.egg_info import FileList

from tests.test_repository import committed

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements-lock.txt").read_text()
LOCKED_EXTRAS = ("transports", "ring-attention-pytorch", "transformers")
OWN_BUILDS = re.compile(r"(torch|triton|cuda-\w+|nvidia-(?!ml-py).*)")
"""torch has a build per platform, and these come with one of them."""


def parse(texts: Iterable[str]) -> list[Requirement]:
    """Return requirements, without those on our own extras."""
    found = map(Requirement, texts)
    return [one for one in found if canonicalize_name(one.name) != PROJECT["name"]]


def direct(*extras: str) -> list[Requirement]:
    """Return the requirements of the package and of some extras."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return parse(texts)


def lower_bounds(requirement: Requirement) -> list[Version]:
    return [Version(s.version) for s in requirement.specifier if s.operator in {">=", "=="}]


def read_pins(text: str) -> list[tuple[str, Version]]:
    """Return the name and version of each line `name==version`."""
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return [(canonicalize_name(name), Version(version)) for name, version in pins]


def test_every_requirement_has_one_lower_bound() -> None:
    assert [
        str(one) for one in direct(*PROJECT["optional-dependencies"]) if len(lower_bounds(one)) != 1
    ] == []


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    pins = read_pins((ROOT / "constraints-oldest.txt").read_text())
    bounds = {
        canonicalize_name(one.name): lower_bounds(one)[0]
        for one in direct(*PROJECT["optional-dependencies"])
    }
    assert pins == sorted(bounds.items())


def test_the_lock_holds_every_requirement_in_its_range() -> None:
    pins = read_pins(LOCK)
    for one in direct(*LOCKED_EXTRAS):
        name = canonicalize_name(one.name)
        # several versions where Python versions need them
        versions = [version for pinned, version in pins if pinned == name]
        if name == "torch":
            assert not versions
            versions = [Version(*re.findall(r"^# .*torch==([\d.]+)", LOCK, re.MULTILINE))]
        assert versions, f"{one} is not in the lock: make lock"
        assert all(v in one.specifier for v in versions), f"{one}, but the lock has {versions}"


def test_the_lock_leaves_torch_to_the_platform_and_has_hashes() -> None:
    names = [name for name, _ in read_pins(LOCK)]
    assert [name for name in names if OWN_BUILDS.fullmatch(name)] == []
    entries = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(names)
    assert [entry[:40] for entry in entries if "--hash=sha256:" not in entry] == []
    assert LOCK.startswith("# Made by `make lock`")


def test_the_source_distribution_holds_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = FileList()
    for line in Path("MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            files.process_template_line(line)
    # setuptools adds the package and these by itself
    held = {*files.files, "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    names = {str(path.relative_to(ROOT)) for path in committed()}
    missing = {name for name in names - held if not name.startswith("longseq_bench/")}
    assert missing == set()
    assert not [name for name in files.files if name.endswith((".pyc", ".lock"))]
