"""Own functions by name: where they are found, their hash, and what is said if they are not."""

import sys
from pathlib import Path

import pytest

from longseq_bench.core.errors import UserError
from longseq_bench.core.own_functions import (
    canonical_name,
    is_own,
    read_own_function,
    short_names,
    source_of,
)

SOUND = "def mine(q, k, v):\n    return v\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOUND)
    return tmp_path


def test_a_name_with_a_colon_is_an_own_function() -> None:
    assert [is_own(name) for name in ("ring", "mine.py:f", "pkg.mod:f", "mine.py")] == [
        False, True, True, True,
    ]  # fmt: skip


def test_one_file_has_one_name() -> None:
    assert canonical_name("./a/../mine.py:mine") == "mine.py:mine"
    assert canonical_name("pkg.mod:mine") == "pkg.mod:mine"
    assert canonical_name("ring") == "ring"


def test_short_names_are_functions_with_their_file_where_two_are_the_same() -> None:
    assert short_names(["a/x.py:f", "ring", "pkg.mod:g"]) == {
        "a/x.py:f": "f", "ring": "ring", "pkg.mod:g": "g",
    }  # fmt: skip
    assert list(short_names(["a/x.py:f", "b/y.py:f"]).values()) == ["x.py:f", "y.py:f"]
    assert list(short_names(["a/x.py:f", "b/x.py:f"]).values()) == ["a/x.py:f", "b/x.py:f"]
    # a function with the name of a built-in is not taken for it
    assert short_names(["sdpa", "x.py:sdpa"]) == {"sdpa": "sdpa", "x.py:sdpa": "x.py:sdpa"}


def test_the_hash_is_that_of_the_bytes(folder: Path) -> None:
    before = source_of("mine.py:mine")
    assert before is not None
    assert len(before) == 16
    assert source_of(f"{folder}/mine.py:mine") == before
    (folder / "mine.py").write_text(SOUND + "# a comment\n")
    assert source_of("mine.py:mine") != before
    assert source_of("ring") is None


def test_a_module_is_found_without_being_imported(folder: Path) -> None:
    package = folder / "attentions_of_a_test" / "sub"
    package.mkdir(parents=True)
    trap = "raise RuntimeError('imported')\n"
    (package.parent / "__init__.py").write_text(trap)
    (package / "mod.py").write_text(trap + SOUND)
    (package / "__init__.py").write_text(trap + SOUND)
    found = read_own_function("attentions_of_a_test.sub.mod:mine")
    assert (found.file, found.signature.line) == (package / "mod.py", 2)
    assert read_own_function("attentions_of_a_test.sub:mine").file == package / "__init__.py"
    assert "attentions_of_a_test" not in sys.modules


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("min.py:mine", "there is no file min.py (implementation min.py:mine); did you mean "
                        "mine.py?"),
        ("no/mine.py:mine", "there is no file no/mine.py (implementation no/mine.py:mine); there "
                            "is no folder no in {cwd} either"),
        ("empty/x.py:f", "there is no file empty/x.py (implementation empty/x.py:f); empty has no "
                         ".py file"),
        ("mine.py", "implementation 'mine.py' names no function; write mine.py:FUNCTION"),
        ("mine.py:", "implementation 'mine.py:' names no function; write mine.py:FUNCTION"),
        (":f", "implementation ':f' names no function; write path/to/file.py:FUNCTION"),
        ("./empty:f", "empty is a folder (implementation ./empty:f); write "
                      "path/to/file.py:function or module:function"),
        ("no_such_module:f", "there is no module no_such_module (implementation "
                             "no_such_module:f) on Python's path or in {cwd}; install it, or "
                             "write path/to/file.py:function"),
        *[(f"{module}:f", f"module {module} (implementation {module}:f) has no Python source that "
                          "can be found without importing it; write path/to/file.py:function")
          for module in ("math", "sys")],
        ("my-mod:f", "implementation 'my-mod:f' can't be read; write path/to/file.py:function or "
                     "module:function"),
        ("mine.py:main", "mine.py has no function 'main'; did you mean 'mine'?"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_sentence(folder: Path, name: str, sentence: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError) as raised:
        read_own_function(name)
    assert str(raised.value) == sentence.format(cwd=folder)
