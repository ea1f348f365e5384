"""Function objects as implementations: which file names them, and what is sent as source."""

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longseq_bench.api.functions import name_function
from longseq_bench.core.errors import UserError
from longseq_bench.core.own_functions import read_own_function

SCALE = 0.5
BLOCK = torch.zeros(1)


def attend(q, k, v, *, causal=False):  # type: ignore[no-untyped-def]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Holder:
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q


def run_file(name: str) -> Callable[..., Any]:
    """Import the file of a name as the processes that measure do, and return its function."""
    own = read_own_function(name)
    spec = importlib.util.spec_from_file_location("sent", own.file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, own.function)
    assert isinstance(found, FunctionType)
    return found


def is_exact(function: Callable[..., Any], **options: Any) -> bool:
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    exact = F.scaled_dot_product_attention(q, k, v)
    return torch.allclose(function(q, k, v, **options), exact, atol=1e-5)


def from_main(source: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **names: Any) -> Any:
    """Define a function in a file that stands for `__main__`, as a script or a notebook does."""
    file = folder / "script.py"
    file.write_text(source)
    scope = {"__name__": "__main__", "torch": torch, "F": F, **names}
    exec(compile(source, str(file), "exec"), scope)
    return scope["mine"]


def test_a_function_of_a_module_is_named_by_its_module() -> None:
    name = name_function(attend, None)
    assert read_own_function(name).file.samefile(__file__)
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


SCRIPT = """
def mine(q: Tensor, k, v, *, chunk: int = 4) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) * torch.tensor(1.0)
    return F.softmax(scores, 3) @ v * ONE ** SIZES[0]
raise_if_imported = None
"""


def test_a_function_of_a_script_takes_modules_and_plain_values_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"math": math, "ONE": 1.0, "SIZES": (2, "a"), "Tensor": Tensor}
    function = from_main("from torch import Tensor\n" + SCRIPT, monkeypatch, tmp_path, **given)
    name = name_function(function, tmp_path)
    own = read_own_function(name)
    assert own.file.parent == tmp_path / "functions"
    assert [option.name for option in own.signature.options] == ["chunk"]
    assert is_exact(run_file(name), chunk=2)
    text = own.file.read_text()
    assert "import torch.nn.functional as F\n" in text
    assert "raise_if_imported" not in text


def test_equal_source_has_one_file_and_other_source_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(body: str) -> str:
        source = f"def mine(q, k, v):\n    return {body}\n"
        return name_function(from_main(source, monkeypatch, tmp_path), tmp_path)

    import linecache

    first = named("v")
    assert named("v") == first
    linecache.clearcache()
    assert named("v * 1") != first


def test_a_function_inside_another_one_is_sent() -> None:
    small, root = 3, functools.reduce

    def mine(q, k, v):  # type: ignore[no-untyped-def]
        chunks = [F.scaled_dot_product_attention(one, k, v) for one in q.split(small, 2)]
        return root(lambda a, b: torch.cat([a, b], 2), chunks)

    assert is_exact(run_file(name_function(mine, None)))


def test_a_pattern_goes_with_its_function() -> None:
    def window(q, k, v):  # type: ignore[no-untyped-def]
        return v

    def seen(q_positions, k_positions, head):  # type: ignore[no-untyped-def]
        return q_positions[:, None] == k_positions

    window.pattern = seen  # type: ignore[attr-defined]
    sent: Any = run_file(name_function(window, None))
    assert sent.pattern.__name__ == "seen"


def test_a_decorator_goes_with_its_function() -> None:
    def mine(q, k, v):  # type: ignore[no-untyped-def]
        return v

    @functools.lru_cache(None)
    def cached(q, k, v):  # type: ignore[no-untyped-def]
        return v

    text = read_own_function(name_function(cached, None)).file.read_text()
    assert "@functools.lru_cache(None)\ndef cached" in text
    wrapped = functools.lru_cache(None)(mine)
    with pytest.raises(UserError, match=r"^mine is wrapped, .* write it as a decorator"):
        name_function(wrapped, None)


def test_what_can_not_be_sent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def helper() -> None: ...

    def mine(q, k, v):  # type: ignore[no-untyped-def]
        helper()
        return q * BLOCK * missing  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(UserError) as refused:
        name_function(mine, None)
    assert str(refused.value) == (
        "mine uses `BLOCK`, which is defined in tests.api.test_functions and `helper`, which is "
        "defined in the function around it and `missing`, which is not defined; put them inside "
        "the function, or all of it in a file and name it file.py:mine"
    )
    source = "def helper(x):\n    return x\ndef mine(q, k, v):\n    return helper(v)\n"
    for place, names in (("the script", {}), ("the notebook", {"get_ipython": None})):
        with pytest.raises(UserError) as refused:
            name_function(from_main(source, monkeypatch, tmp_path, **names), None)
        assert str(refused.value) == (
            f"mine uses `helper`, which is defined in {place}; put it inside the function, or all "
            "of it in a file and name it file.py:mine"
        )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda q, k, v: v, "a lambda can't be sent"),
        (Holder, "is a class; give a function"),
        (Holder().attend, "is a method; give a function"),
        (functools.partial(attend), "is a partial; give a function"),
        (Holder.attend, "Holder.attend is not at the top level of a Python file"),
    ],
)
def test_other_callables_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        name_function(given, None)


def test_a_function_without_source_is_refused() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def mine(q, k, v):\n    return v\n", "<stdin>", "exec"), scope)
    with pytest.raises(UserError) as refused:
        name_function(scope["mine"], None)
    assert str(refused.value) == (
        "the source of mine can't be found (<stdin>); write it to a file and name it file.py:mine"
    )
