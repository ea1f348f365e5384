"""Options: read from a signature, coerced from user input."""

from typing import Annotated, Any, Literal

import pytest

from longseq_bench.attention.signature_options import specs_of
from longseq_bench.core.errors import UserError
from longseq_bench.core.options import OptionSpec, fill


class Example:
    def __init__(
        self,
        workload: object,
        group: object,
        *,
        chunk: Annotated[int, "tokens per step"] = 1024,
        sparsity: float = 0.9,
        order: Literal["contiguous", "zigzag"] = "contiguous",
        overlap: bool = True,
        segments: tuple[int, ...] = (2048, 4096),
        backend: Annotated[str | None, "None: torch's own choice"] = None,
    ) -> None:
        """Positional parameters are not options."""


SPECS = specs_of(Example)


def test_specs_come_from_the_signature_in_order() -> None:
    assert [(s.name, s.kind, s.default) for s in SPECS] == [
        ("chunk", "int", 1024),
        ("sparsity", "float", 0.9),
        ("order", "str", "contiguous"),
        ("overlap", "bool", True),
        ("segments", "ints", (2048, 4096)),
        ("backend", "str", None),
    ]
    by_name = {s.name: s for s in SPECS}
    assert by_name["chunk"].help == "tokens per step"
    assert by_name["order"].choices == ("contiguous", "zigzag")
    assert [s.name for s in SPECS if s.optional] == ["backend"]
    defaults = {spec.name: spec.default for spec in SPECS}
    assert fill(SPECS, {"chunk": "2k"}, "ring") == {**defaults, "chunk": 2048}


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("chunk", "1k", 1024), ("chunk", 7, 7),
        ("sparsity", "0.99", 0.99), ("sparsity", 1, 1.0),
        ("overlap", "yes", True), ("overlap", "False", False), ("overlap", True, True),
        ("segments", "1k,2k", (1024, 2048)), ("segments", [1, 2], (1, 2)), ("segments", 8, (8,)),
        ("order", "zigzag", "zigzag"), ("backend", "none", None), ("backend", "flash", "flash"),
    ],
)  # fmt: skip
def test_user_input_becomes_a_value(name: str, raw: Any, value: Any) -> None:
    found = fill(SPECS, {name: raw}, "ring")[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("chunk", "many", "is not a whole number from 1 up (write 1024 or 1k)"),
        ("chunk", True, "is not a whole number"),
        ("sparsity", "most", "is not a number"),
        ("overlap", "maybe", "is neither true nor false"),
        ("segments", "1k,,2k", "is not whole numbers with commas (write 1024,2048 or 1k,2k)"),
    ],
)
def test_the_error_of_invalid_input_names_the_option_and_its_owner(
    name: str, raw: Any, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        fill(SPECS, {name: raw}, "ring")
    assert str(caught.value).startswith(f"option {name}={raw!r} in ring {message}")


def test_zero_as_text_is_allowed_if_the_minimum_is_zero() -> None:
    assert OptionSpec(name="seed", kind="int", least=0).coerce("0", "random") == 0
    assert fill(SPECS, {"chunk": "1"}, "ring")["chunk"] == 1
    with pytest.raises(UserError, match="from 1 up"):
        fill(SPECS, {"chunk": "0"}, "ring")
