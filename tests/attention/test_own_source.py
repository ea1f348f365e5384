"""Own functions as a child finds and describes them, and what is said of those it can't use."""

import sys
from pathlib import Path

import pytest

from longseq_bench.attention.own_function import describe_own_function
from longseq_bench.attention.own_source import find_file
from longseq_bench.core.catalogue import Entry
from longseq_bench.core.errors import UserError
from longseq_bench.core.options import OptionSpec

HEAD = "import torch\nfrom typing import *\nimport typing as t\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files of one second look alike
    return tmp_path


def describe(text: str) -> Entry:
    Path("own.py").write_text(text)
    return describe_own_function("own.py:f")


def options(parameters: str) -> dict[str, OptionSpec]:
    found = describe(f"{HEAD}def f(q, k, v, {parameters}):\n    pass\n").options
    return {spec.name: spec for spec in found}


def test_an_option_has_its_type_default_and_help() -> None:
    found = options(
        "chunk: Annotated[int, 'tokens a step'] = 512, *, ratio: float = 1, fast=True, "
        "order: Literal['a', 'b'] = 'a', sizes: tuple[int, ...] = (1, 2), top: int | None = None, "
        "end: 'Optional[int]' = None, far: t.Annotated[int, 'x'] = None, "
        "width: Literal[64, 128] = 64, twice=2 * 3"
    )
    assert {name: (spec.kind, spec.default) for name, spec in found.items()} == {
        "chunk": ("int", 512), "ratio": ("float", 1), "fast": ("bool", True), "order": ("str", "a"),
        "sizes": ("ints", (1, 2)), "top": ("int", None), "end": ("int", None), "far": ("int", None),
        "width": ("int", 64), "twice": ("int", 6),
    }  # fmt: skip
    assert (found["chunk"].help, found["far"].help) == ("tokens a step", "x")
    assert found["order"].choices == ("a", "b")
    assert [name for name, spec in found.items() if spec.optional] == ["top", "end", "far"]


def test_a_default_of_0_allows_0() -> None:
    assert options("*, n=0")["n"].coerce("0") == 0
    assert options("*, n=1")["n"].least == 1


@pytest.mark.parametrize("parameter", ["dtype=torch.float32", "n=None", "n=[1]", "n=('a',)"])
def test_what_no_option_can_have_keeps_its_default(parameter: str) -> None:
    assert options(f"*, {parameter}") == {}


def test_an_annotation_that_is_not_defined_is_ignored() -> None:
    assert options("*, n: 'Missing' = 3")["n"].kind == "int"


def test_parameters_that_longseq_passes_are_no_options() -> None:
    text = "def f(q, k, v, causal, scale=None, *, group, enable_gqa, sinks, **more): pass"
    found = describe(text)
    assert found.options == ()
    assert [reason.split("`")[1] for reason in found.missing] == [
        "attn_mask",
        "new_tokens",
        "soft_cap",
    ]


def test_a_decorated_function_is_described_by_its_definition() -> None:
    found = describe(
        "import functools\n"
        "def log(g):\n"
        "    @functools.wraps(g)\n"
        "    def inner(*a, **k): return g(*a, **k)\n"
        "    return inner\n"
        "@log\n"
        "def f(q, k, v, *, n=1):\n    'Sum it.'\n"
    )
    assert found.source == "own.py:6"
    assert ([spec.name for spec in found.options], found.summary) == (["n"], "Sum it")


MISTAKES = [
    ("def f(:", "own.py: SyntaxError: invalid syntax (own.py, line 1)"),
    ("x = 1", "own.py has no function 'f'; it defines no function"),
    ("def ff(): pass", "own.py has no function 'f'; did you mean 'ff'?"),
    ("class f: pass",
     "own.py:1: f is no function made with def; name one, or make a plug-in (docs/extending.md)"),
    ("def f(q, k): pass",
     "own.py:1: f has 2 positional parameters (q, k); the first three must take q, k and v"),
    ("def f(*args): pass",
     "own.py:1: f has 0 positional parameters (none); the first three must take q, k and v"),
    ("def f(q, k, v, bias): pass",
     "own.py:1: f needs an argument `bias`, which longseq does not pass; give it a default (it "
     "passes causal, is_causal, attn_mask, mask_mod, new_tokens, enable_gqa, grouped_heads, sinks, "
     "soft_cap, group, scale, rank, world_size)"),
    ("\nimport no_such", "own.py:2: ModuleNotFoundError: No module named 'no_such'"),
    ("\nraise ValueError('one\\ntwo')", "own.py:2: ValueError: one two"),
    ("import sys\nsys.exit(3)", "own.py:2: SystemExit: 3"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), MISTAKES)
def test_what_can_t_be_used_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        describe(text)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("min.py:mine", "min.py (implementation min.py:mine) can't be read: No such file or "
                        "directory; did you mean mine.py?"),
        ("mine.py", "implementation 'mine.py' names no function; write mine.py:FUNCTION"),
        (":f", "implementation ':f' names no function; write path/to/file.py:FUNCTION"),
        ("./empty:f", "empty (implementation ./empty:f) can't be read: Is a directory"),
        ("sys:f", "there is no module sys with Python source (implementation sys:f) on Python's "
                  "path or in {cwd}; write path/to/file.py:function or module:function"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_sentence(folder: Path, name: str, sentence: str) -> None:
    (folder / "mine.py").write_text("def mine(q, k, v): return v\n")
    (folder / "empty").mkdir()
    with pytest.raises(UserError) as raised:
        describe_own_function(name)
    assert str(raised.value) == sentence.format(cwd=folder)


def test_the_hash_is_that_of_the_bytes(folder: Path) -> None:
    before = describe("def f(q, k, v): return v\n").hash
    assert before is not None
    assert len(before) == 16
    assert find_file(f"{folder}/own.py:f").source == before
    assert describe("def f(q, k, v): return v\n# a comment\n").hash != before


def test_a_module_of_a_package_is_found_in_the_current_folder(folder: Path) -> None:
    package = folder / "attentions_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mod.py").write_text("\ndef mine(q, k, v): return v\n")
    found = describe_own_function("attentions_of_a_test.mod:mine")
    assert found.source == f"{package}/mod.py:2"
