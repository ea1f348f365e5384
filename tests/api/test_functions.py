"""Function objects as implementations: which file names them, and what is pickled."""

import functools
import linecache
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longseq_bench.api.implementations import name_function
from longseq_bench.attention.own_source import OwnFunction, find_file, import_function
from longseq_bench.core.errors import UserError

BLOCK = torch.ones(1)
LOCK = threading.Lock()


def attend(q, k, v, *, causal=False):  # type: ignore[no-untyped-def]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Holder:
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q


def sent(function: Callable[..., Any], folder: Path | None = None) -> OwnFunction:
    """Import the file of a function as the processes that measure do."""
    return import_function(find_file(name_function(function, folder)))


def is_exact(function: OwnFunction, **options: Any) -> bool:
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    exact = F.scaled_dot_product_attention(q, k, v)
    return torch.allclose(function.call(q, k, v, **options), exact, atol=1e-5)


def from_main(source: str, folder: Path, **names: Any) -> Any:
    """Define a function in a file that stands for `__main__`, as a script or a notebook does."""
    file = folder / "script.py"
    file.write_text(source)
    linecache.clearcache()
    scope = {"__name__": "__main__", "torch": torch, "F": F, **names}
    exec(compile(source, str(file), "exec"), scope)
    return scope["mine"]


def test_a_function_of_a_module_is_named_by_its_module() -> None:
    name = name_function(attend, None)
    assert find_file(name).file.samefile(__file__)
    assert name == "tests.api.test_functions:attend"


def test_a_function_of_a_single_file_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone_here.py").write_text("def mine(q, k, v):\n    return v\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("alone_here")
    monkeypatch.chdir(tmp_path)
    assert name_function(module.mine, None) == "alone_here.py:mine"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert name_function(module.mine, None) == f"{tmp_path}/alone_here.py:mine"


def test_a_function_of_a_script_takes_what_it_uses_along(tmp_path: Path) -> None:
    source = (
        "def scaled(x):\n    return x * ONE\n"
        "def mine(q: Tensor, k, v, *, chunk: int = 4) -> Tensor:\n"
        "    'Attend.'\n"
        "    return scaled(F.scaled_dot_product_attention(q, k, v)) * BLOCK\n"
    )
    function = from_main(source, tmp_path, ONE=1.0, BLOCK=BLOCK, Tensor=Tensor)
    own = sent(function, tmp_path)
    assert [path.parent for path in tmp_path.rglob("*.pkl")] == [tmp_path / "functions"]
    assert ([option.name for option in own.options], own.summary) == (["chunk"], "Attend")
    assert own.place == f"{tmp_path}/script.py:3"
    assert is_exact(own, chunk=2)


def test_equal_source_has_one_name_and_other_source_another(tmp_path: Path) -> None:
    def named(body: str, **names: Any) -> str:
        source = f"def mine(q, k, v):\n    return {body}\n"
        return name_function(from_main(source, tmp_path, **names), tmp_path)

    first = named("v * one", one=1)
    assert named("v * one", one=2) == first  # the identity is that of the source
    other = named("v * 1")
    assert other != first
    assert find_file(other).source == Path(other.rpartition(":")[0]).stem.rpartition("-")[2]


def test_a_function_inside_another_one_is_sent() -> None:
    small, root = 3, functools.reduce

    def mine(q, k, v):  # type: ignore[no-untyped-def]
        chunks = [F.scaled_dot_product_attention(one, k, v) for one in q.split(small, 2)]
        return root(lambda a, b: torch.cat([a, b], 2), chunks)

    assert is_exact(sent(mine))


def test_a_pattern_goes_with_its_function_and_is_part_of_its_identity() -> None:
    def window(q, k, v):  # type: ignore[no-untyped-def]
        return v

    def seen(q_positions, k_positions, head):  # type: ignore[no-untyped-def]
        return q_positions[:, None] == k_positions

    plain = name_function(window, None)
    window.pattern = seen  # type: ignore[attr-defined]
    pattern: Any = sent(window).pattern
    assert pattern.__name__ == "seen"
    assert name_function(window, None) != plain


def test_what_can_not_be_sent_is_one_sentence() -> None:
    def mine(q, k, v):  # type: ignore[no-untyped-def]
        with lock:
            return q

    lock = LOCK
    with pytest.raises(UserError) as refused:
        name_function(mine, None)
    assert str(refused.value) == (
        "mine can't be sent to another process (cannot pickle '_thread.lock' object); write it to "
        "a file and name it file.py:mine"
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda q, k, v: v, "is no function with a name; give one"),
        (Holder, "is no function with a name; give one"),
        (Holder().attend, "is no function with a name; give one"),
        (functools.partial(attend), "is no function with a name; give one"),
        (Holder.attend, "Holder.attend is not at the top level of a Python file"),
    ],
)
def test_other_callables_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        name_function(given, None)
