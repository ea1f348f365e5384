"""Registries: scanned modules, plug-ins, and reasons of failed imports."""

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from longseq_bench.core import registry
from longseq_bench.core.errors import UnsupportedError, nearest
from longseq_bench.core.registry import Registry

MODULE = "from {package} import SHAPES\n\n@SHAPES.register('{name}')\nclass Shape: pass\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose modules register shapes; its name is that of its folder."""
    folder = tmp_path / "shapes_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from longseq_bench.core.registry import Registry\n"
        f"SHAPES = Registry('shape', '{folder.name}', 'a.group')\n"
    )
    for name in ("circle", "square"):
        (folder / f"{name}.py").write_text(MODULE.format(package=folder.name, name=name))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield folder
    for module in [m for m in sys.modules if m.split(".")[0] == folder.name]:
        del sys.modules[module]


def shapes(folder: Path) -> Registry[type]:
    found: Registry[type] = importlib.import_module(folder.name).SHAPES
    return found


def plug_in(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = [EntryPoint(name, value, "a.group") for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "a.group" else [])


def test_a_new_file_is_found_without_a_list(package: Path) -> None:
    (package / "hexagon.py").write_text(MODULE.format(package=package.name, name="hexagon"))
    (package / "_draft.py").write_text("raise RuntimeError('private modules are left alone')\n")
    assert shapes(package).names() == ["circle", "hexagon", "square"]
    assert shapes(package).get("hexagon").__name__ == "Shape"


def test_subpackages_are_scanned(package: Path) -> None:
    (package / "solid").mkdir()
    (package / "solid" / "__init__.py").touch()
    (package / "solid" / "cube.py").write_text(MODULE.format(package=package.name, name="cube"))
    (package / "solid" / "open_box.py").write_text("import a_library_that_nobody_has\n")
    assert shapes(package).names() == ["circle", "cube", "open-box", "square"]
    assert "a_library_that_nobody_has" in (shapes(package).unavailable_reason("open-box") or "")


def test_a_failing_plug_in_keeps_its_reason_and_affects_no_other(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, broken="no_such_module:Thing", order="collections:OrderedDict")
    assert shapes(package).names() == ["broken", "circle", "order", "square"]
    assert shapes(package).unavailable_reason("broken") == (
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    with pytest.raises(UnsupportedError, match="shape 'broken' is not available: ModuleNotFound"):
        shapes(package).get("broken")


def test_a_plug_in_can_not_replace_a_built_in(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, circle="collections:OrderedDict")
    assert shapes(package).get("circle").__name__ == "Shape"
    assert "two shapes are called 'circle'" in (shapes(package).unavailable_reason("circle") or "")


@pytest.mark.parametrize(
    ("name", "found"),
    [("rign", "ring"), ("RING", "ring"), ("blocksparse", "block-sparse"), ("zzz", None)],
)
def test_nearest(name: str, found: str | None) -> None:
    assert nearest(name, ["ring", "sdpa", "block-sparse"]) == found
