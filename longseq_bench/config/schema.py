"""The keys of a sweep file, as pydantic models.

The settings of a workload and a trial are declared in core/settings.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from longseq_bench.core import units
from longseq_bench.core.model import canonical_dtype
from longseq_bench.core.settings import TOKENS, TRIAL, WORKLOAD, DTypeName, Setting
from longseq_bench.core.units import parse_memory_budget, parse_seconds, parse_tokens

DEFAULT_ROUNDS = 3


# ---- types of values ---------------------------------------------------------------------------


def _to_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        raise ValueError("is a mapping; write one value or a list of values")
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_scalar(value: Any) -> Any:
    if isinstance(value, list | dict):
        hint = 'write numbers that belong together with commas, "1024,2048"'
        raise ValueError(f"has a list or a mapping inside its list; {hint}")
    return value


# types that are put together at run time
_annotated: Any = Annotated
_dict: Any = dict
_tuple: Any = tuple
_create_model: Any = create_model


def axis(kind: Any) -> Any:
    """Return the type of an axis of the grid: one value, or a list of values."""
    one = _annotated[kind, BeforeValidator(_check_scalar)]
    return _annotated[_tuple[one, ...], MinLen(1), BeforeValidator(_to_list)]


UNITS: dict[str, tuple[Callable[[Any], Any], str, float]] = {
    "tokens": (parse_tokens, "4k", units.MAX_TOKENS),
    "bytes": (partial(parse_memory_budget, name="bytes"), "512MiB", units.MAX_BYTES),
    "s": (parse_seconds, "500ms", units.MAX_SECONDS),
}
"""For each unit of a setting: parser, an example, the maximum."""


def _number(setting: Setting) -> Any:
    """Return the type of a number; "none" is one of its values if it is the default."""
    may_be_none = setting.default is None and not setting.is_required

    def read(value: Any) -> Any:
        if may_be_none and str(value).lower() == "none":
            return None
        return UNITS[setting.unit][0](value) if setting.unit else value

    kind = setting.type
    if not setting.unit:
        kind = _annotated[kind, Ge(setting.low), Le(setting.high)]
    return _annotated[kind | None if may_be_none else kind, BeforeValidator(read)]


def _value_type(name: str, setting: Setting) -> Any:
    """Return the type of one value of a setting, as pydantic takes it."""
    if setting.unit or setting.high:
        return _number(setting)
    if setting.type is DTypeName:
        return _annotated[DTypeName, AfterValidator(canonical_dtype)]
    return setting.type | None if name in ("mask", "latent", "kv_dtype") else setting.type


def _axis(name: str, setting: Setting) -> tuple[Any, Any]:
    """Return the field of a model for a setting that may have several values."""
    kind = axis(_value_type(name, setting))
    default: Any = (
        ... if setting.is_required else () if name in ("model", "layer") else (setting.default,)
    )
    return kind, Field(default=default)


def _named_options(item: Any) -> Any:
    """Turn an item of `implementations` into {name: {option: values}}."""
    if item is None or isinstance(item, list):
        raise ValueError("is not one name; write one '- name' a line")
    if not isinstance(item, dict):
        return {item: {}}
    if len(item) != 1:
        names = ", ".join(item) or "nothing"
        raise ValueError(f"names {names}; write one name, its options indented under it")
    return {name: options or {} for name, options in item.items()}


_IMPLEMENTATION = _annotated[
    _dict[str, _dict[str, axis(bool | int | float | str | None)]], BeforeValidator(_named_options)
]


# ---- the file ----------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


WorkloadSection: type[BaseModel] = _create_model(
    "WorkloadSection",
    __base__=_Section,
    **{name: _axis(name, setting) for name, setting in WORKLOAD.items()},
)


SweepFile: Any = _create_model(
    "SweepFile",
    __base__=_Section,
    tokens=_axis("tokens", TOKENS),
    implementations=(
        _annotated[_tuple[_IMPLEMENTATION, ...], MinLen(1), BeforeValidator(_to_list)],
        Field(
            description="What is measured: names, or `name: {option: value}`. `longseq list` shows "
            "every name with its options; path/to/file.py:function and module:function name a "
            "function of your own. Required."
        ),
    ),
    workload=(
        WorkloadSection,
        Field(default=WorkloadSection(), description="Shape of q, k, v and the kind of pass."),
    ),
    baseline=(
        str | None,
        Field(
            default=None,
            description="Implementation (or label of a row) to which the others are compared. "
            "Default: none.",
        ),
    ),
    rounds=(
        Annotated[int, Ge(1), Le(units.MAX_ROUNDS)],
        Field(
            default=DEFAULT_ROUNDS,
            description="Repetitions of the whole grid, interleaved so that slow drifts of the "
            f"machine meet every trial alike. Default: {DEFAULT_ROUNDS}.",
        ),
    ),
    **{name: _axis(name, setting) for name, setting in TRIAL.items()},
)
