"""The house: who imports whom, what a command may load, and what no file may hold."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from longseq_bench.store import RECORDS
from tests.make import record

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "longseq_bench"

EVERYWHERE = {"", "model", "units", "errors", "registry", "cost", "places"}
PARENT_MAY = {
    "options": set(),
    "catalogue": {"options"},
    "config": {"catalogue", "options"},
    "environment": set(),
    "stats": set(),
    "yardsticks": set(),
    "search": set(),
    "hardware": set(),
    "predict": {"hardware", "table"},
    "plan": {"search", "predict", "table"},
    "lean": set(),
    "store": {"lean"},
    "table": {"store", "stats", "yardsticks", "lean"},
    "scaling": {"table"},
    "significance": set(),
    "matching": {"table"},
    "compare": {"table", "matching", "significance"},
    "reports": {"table", "stats", "scaling", "compare", "lean", "hardware"},
    "doctor": {"catalogue", "environment"},
    "launchers": {"catalogue"},
    "runner": {"plan", "launchers", "store", "environment"},
}
CHILD_MAY = {
    "dry": set(),
    "patterns": set(),
    "kernels": {"dry", "patterns"},
    "comm": {"dry", "patterns"},
    "meters": {"dry"},
    "attention": {"dry", "patterns", "kernels", "comm"},
    "probe": {
        "dry",
        "meters",
        "attention",
        "patterns",
        "kernels",
        "comm",
        "catalogue",
        "options",
        "stats",
    },
}
MAY: dict[str, set[str]] = {
    **{layer: seen | EVERYWHERE for layer, seen in (PARENT_MAY | CHILD_MAY).items()},
    **{layer: EVERYWHERE - {layer} for layer in EVERYWHERE},
    "cli": set(PARENT_MAY) | EVERYWHERE,
    "__main__": {"cli"},
}
"""Who imports whom: a layer sees itself and these. A new module has to be written in here."""

DOORS = {"launchers._child": "probe.worker", "launchers._agent": "probe.elastic"}
"""Where the parent's side ends: the modules that may name the probe, inside their function."""

LONGEST_FUNCTION = 60


def modules() -> dict[str, Path]:
    """Every module of the package, by its name below it ("" is the package itself)."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()
PARENTS = [name for name in MODULES if name.split(".")[0] not in CHILD_MAY]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imported(name: str, inside: ast.AST | None = None) -> Iterator[str]:
    """Full names of what a module imports anywhere, in functions and for types too."""
    for node in ast.walk(inside or tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                below = f"{base}.{alias.name}".removeprefix("longseq_bench.")
                yield f"{base}.{alias.name}" if below in MODULES else base


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = ["longseq_bench", *filter(None, name.split("."))]
    if MODULES[name].name != "__init__.py":
        package.pop()
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def ours(name: str) -> set[str]:
    """Modules of the package that a module imports, named below it."""
    return {
        found.removeprefix("longseq_bench").removeprefix(".")
        for found in imported(name)
        if found.split(".")[0] == "longseq_bench"
    }


def libraries(name: str, inside: ast.AST | None = None) -> set[str]:
    return {found.split(".")[0] for found in imported(name, inside)}


def functions(name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree(name)) if isinstance(node, kinds)]


# ---- who imports whom --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_a_module_sees_the_layers_below_it_only(name: str) -> None:
    layer = name.split(".")[0]
    assert layer in MAY, f"{name}: say in this test what {layer} may import"
    seen = {other.split(".")[0] for other in ours(name)}
    allowed = MAY[layer] | {layer}
    if name in DOORS:
        allowed = {*allowed, "probe"}
    assert seen <= allowed, f"{name} imports {', '.join(sorted(seen - allowed))}"


@pytest.mark.parametrize("name", PARENTS)
def test_the_parent_never_imports_torch(name: str) -> None:
    assert not libraries(name) & {"torch", "triton", "misbehaving"}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_to_the_probe_opens_in_the_child_only(door: str) -> None:
    at_top = [node for node in tree(door).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {found for node in at_top for found in imported(door, ast.Module([node], []))}
    below = {name.removeprefix("longseq_bench.") for name in names if "longseq_bench" in name}
    assert below <= set(DOORS)
    assert DOORS[door] in ours(door)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("patterns")])
def test_patterns_are_index_arithmetic(name: str) -> None:
    assert "torch" not in libraries(name)


def test_the_entry_point_imports_nothing_of_ours_at_its_top() -> None:
    """Each trial's process imports it again."""
    at_top = ast.Module([node for node in tree("__main__").body if _is_import(node)], [])
    assert libraries("__main__", at_top) == {"sys"}


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


# ---- what a command loads ----------------------------------------------------------------------


LOADED = """
import json, sys
from longseq_bench.cli import run
code = run(sys.argv[1:])
heavy = [name for name in ("torch", "pandas", "yaml", "psutil") if name in sys.modules]
print(json.dumps([code, heavy]), file=sys.stderr)
"""


def loads(*arguments: str | Path) -> set[str]:
    """Libraries that a command has loaded by its end, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    code, heavy = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(heavy)


COMMANDS = (
    "sweep", "maxlen", "plan", "scaling", "launch", "report", "show", "compare", "list", "doctor",
)  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    assert loads(*filter(None, [command]), "--help") == set()


def test_the_version_loads_nothing_heavy() -> None:
    assert loads("--version") == set()


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text(record().model_dump_json(by_alias=True) + "\n")
    assert "torch" not in loads("report", tmp_path)
    assert (tmp_path / "report.md").exists()


def test_a_look_at_records_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text(record().model_dump_json(by_alias=True) + "\n")
    looks = (["show", tmp_path], ["report", tmp_path, "--format", "terminal"])
    for arguments in looks:
        assert not loads(*arguments) & {"torch", "pandas", "psutil"}


@pytest.mark.slow
def test_the_parent_of_a_sweep_never_loads_torch(tmp_path: Path) -> None:
    config = tmp_path / "one.yaml"
    config.write_text(
        "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\ntokens: 64\n"
        "implementations: sdpa\nrounds: 1\nrepeats: 1\n"
    )
    assert "torch" not in loads("sweep", config, "--out", tmp_path / "out")
    assert '"status":"ok"' in (tmp_path / "out" / RECORDS).read_text()


# ---- how the code is written -------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_says_what_it_does(name: str) -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [n for n in tree(name).body if isinstance(n, kinds) and not n.name.startswith("_")]
    silent = [node.name for node in public if not ast.get_docstring(node)]
    assert ast.get_docstring(tree(name)), f"{name} has no docstring"
    assert not silent, f"no docstring in {name}: {', '.join(silent)}"


@pytest.mark.parametrize("name", MODULES)
def test_no_function_is_long(name: str) -> None:
    long = {f.name: n for f in functions(name) if (n := _lines(f)) > LONGEST_FUNCTION}
    assert not long


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, docstring aside."""
    said = function.body[0] if ast.get_docstring(function) else None
    told = (said.end_lineno or 0) - said.lineno + 1 if said else 0
    return (function.end_lineno or 0) - function.lineno + 1 - told


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_left_for_later(name: str) -> None:
    """What a subclass has to write is abstract, so that it is missed when the object is made."""
    left = [f.name for f in functions(name) if _is_stub(f)]
    assert not left


def _is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    named = {"abstractmethod", "overload"}
    if any(isinstance(d, ast.Name) and d.id in named for d in function.decorator_list):
        return False
    raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
    names = [e.func if isinstance(e, ast.Call) else e for e in raised]
    return any(isinstance(n, ast.Name) and n.id == "NotImplementedError" for n in names)


# ---- what no file holds ------------------------------------------------------------------------

MACHINE_PATH = re.compile(rf"(?<![\w.~}}])/({'|'.join(['home', 'work', 'root', 'tmp'])})/")
UNFINISHED = re.compile(rf"\b({'|'.join(['TO' + 'DO', 'FIX' + 'ME', 'X' * 3])})\b")


def committed() -> list[Path]:
    """Every file under version control, or, without a checkout, everything but caches."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [p for p in ROOT.rglob("*") if not _is_cache(p.relative_to(ROOT))]
    return [path for path in found if path.is_file()]


def _is_cache(path: Path) -> bool:
    return any(p.startswith(".") or p == "__pycache__" or "egg-info" in p for p in path.parts)


def places(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in committed():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    return found


def test_no_file_names_a_place_of_one_machine() -> None:
    assert places(MACHINE_PATH) == []


def test_no_file_holds_unfinished_work() -> None:
    assert places(UNFINISHED) == []


def test_the_search_for_words_would_find_them() -> None:
    assert len(committed()) > 50
    assert MACHINE_PATH.search("cd " + "/".join(["", "home", "me", "longseq"]))
    assert UNFINISHED.search("# " + "TO" + "DO: later")
