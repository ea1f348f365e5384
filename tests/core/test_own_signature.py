"""The signature of an own function, read from its source: options, and what can't be called."""

from typing import Any

import pytest

from longseq_bench.core.errors import UserError
from longseq_bench.core.options import OptionSpec
from longseq_bench.core.own_signature import Signature, read_signature
from longseq_bench.core.workload_arguments import (
    all_missing_reasons,
    missing_reasons,
    passed_values,
)
from tests.make import trial


def read(text: str, function: str = "f") -> Signature:
    return read_signature(text.encode(), "own.py", function)


def options(parameters: str) -> dict[str, OptionSpec]:
    found = read(f"def f(q, k, v, {parameters}):\n    pass\n").options
    return {spec.name: spec for spec in found}


def test_an_option_has_its_type_default_and_help() -> None:
    found = options(
        "chunk: Annotated[int, 'tokens a step'] = 512, *, ratio: float = 1, fast=True, "
        "order: Literal['a', 'b'] = 'a', sizes: tuple[int, ...] = (1, 2), top: int | None = None, "
        "end: 'Optional[int]' = None, far: t.Annotated[int, 'x'] = None"
    )
    assert {name: (spec.kind, spec.default) for name, spec in found.items()} == {
        "chunk": ("int", 512), "ratio": ("float", 1), "fast": ("bool", True), "order": ("str", "a"),
        "sizes": ("ints", (1, 2)), "top": ("int", None), "end": ("int", None), "far": ("int", None),
    }  # fmt: skip
    assert found["chunk"].help == "tokens a step"
    assert found["order"].choices == ("a", "b")
    assert [name for name, spec in found.items() if spec.optional] == ["top", "end", "far"]


@pytest.mark.parametrize(("raw", "value"), [("0", 0), ("4k", 4096)])
def test_a_default_of_0_allows_0(raw: str, value: int) -> None:
    assert options("*, n=0")["n"].coerce(raw) == value
    assert options("*, n=1")["n"].least == 1


@pytest.mark.parametrize(
    "parameter",
    ["dtype=torch.float32", "n=None", "n=2 * 3", "n: 'a b' = None", "n=[1]", "n=('a',)"],
)
def test_what_needs_running_code_keeps_its_default(parameter: str) -> None:
    assert options(f"*, {parameter}") == {}


def test_parameters_that_longseq_passes_are_no_options() -> None:
    found = read("def f(q, k, v, causal, scale=None, *, group, enable_gqa): pass")
    assert found.takes == {"causal", "scale", "group", "enable_gqa"}
    assert found.options == ()


def test_the_last_definition_at_the_top_counts() -> None:
    text = (
        "def f(q, k, v): pass\n"
        "class C:\n    def f(self): pass\n"
        "if True:\n    pass\nelse:\n    @compiled\n    def f(q, k, v, *, n=1):\n        'Sum it.'\n"
    )
    found = read(text)
    assert (found.line, [spec.name for spec in found.options]) == (8, ["n"])
    assert found.summary == "Sum it"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(:", "own.py:1: not valid Python: invalid syntax"),
        ("\0", "own.py:1: not valid Python: source code string cannot contain null bytes"),
        ("x = 1", "own.py has no function 'f'; it defines no function"),
        ("def g(): pass\ndef hh(): pass", "own.py has no function 'f'; it has g, hh"),
        ("class f: pass", "own.py:1: f is a class; name a function, or make a plug-in "
                          "(docs/extending.md)"),
        ("async def f(q, k, v): pass", "own.py:1: f is async; define it with def"),
        ("\nf = g", "own.py:2: f is not defined by def here, so its arguments can't be read; "
                    "define it with def, or name the file that does"),
        ("from x import y as f", "own.py:1: f is not defined by def here, so its arguments can't "
                                 "be read; define it with def, or name the file that does"),
        ("def f(q, k): pass", "own.py:1: f has 2 positional parameters (q, k); the first three "
                              "must take q, k and v"),
        ("def f(*args): pass", "own.py:1: f has 0 positional parameters (none); the first three "
                               "must take q, k and v"),
        ("def f(q, k, v, bias): pass",
         "own.py:1: f needs an argument `bias`, which longseq does not pass; give it a default "
         "(it passes causal, is_causal, attn_mask, mask_mod, new_tokens, enable_gqa, "
         "grouped_heads, group, scale, rank, world_size)"),
        ("def f(q, k, v, w, /): pass",
         "own.py:1: f needs the positional argument `w`; longseq passes only q, k and v by "
         "position, so give it a default"),
    ],
)  # fmt: skip
def test_what_can_t_be_called_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        read(text)
    assert str(raised.value) == sentence


# ---- arguments for properties of the workload --------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "ranks", "reason"),
    [
        ({"causal": True}, 1, "f takes no argument `causal`, needed for a causal mask"),
        ({"kv_heads": 2}, 1,
         "f takes no argument `enable_gqa`, needed for fewer kv_heads than heads"),
        ({}, 2, "f takes no argument `group`, needed for several ranks"),
    ],
)  # fmt: skip
def test_a_property_without_its_parameter_has_a_reason(
    fields: dict[str, Any], ranks: int, reason: str
) -> None:
    workload = trial(**fields).workload
    assert missing_reasons("f", (), workload, ranks) == [reason]
    assert reason in all_missing_reasons("f", ())
    taken = ("is_causal", "grouped_heads", "group")
    assert missing_reasons("f", taken, workload, ranks) == []
    assert missing_reasons("f", (), trial().workload, 1) == []


def test_a_parameter_gets_its_value() -> None:
    workload = trial(causal=True, kv_heads=2, head_dim=16).workload
    taken = ("causal", "grouped_heads", "scale", "rank", "world_size")
    assert passed_values(taken, workload, 1, 4) == {
        "causal": True, "grouped_heads": True, "scale": 0.25, "rank": 1, "world_size": 4,
    }  # fmt: skip
    assert passed_values(("causal",), trial().workload, 0, 1) == {"causal": False}
