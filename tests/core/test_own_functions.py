"""Names of own functions."""

from longseq_bench.analysis.labels import short_names
from longseq_bench.core.registry import canonical_name, is_own


def test_a_name_with_a_colon_is_an_own_function() -> None:
    names = "ring", "mine.py:f", "pkg.mod:f", "mine.py"
    assert [is_own(name) for name in names] == [False, True, True, True]


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
