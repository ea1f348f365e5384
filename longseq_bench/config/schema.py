"""The keys of a sweep file, as pydantic models, and its JSON Schema.

The settings of a workload and a trial are declared in core/settings.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Le, MinLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
)

from longseq_bench.core import units
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.model import DTYPE_ALIASES, canonical_dtype
from longseq_bench.core.options import OptionSpec
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


def _one_or_more(schema: dict[str, Any]) -> None:
    """Make the JSON Schema of an axis that of one value, or a list of values."""
    array = {key: schema.pop(key) for key in ("type", "items", "minItems")}
    schema["anyOf"] = [array["items"], array]
    if default := schema.get("default"):
        schema["default"] = default[0]


# types that are put together at run time
_annotated: Any = Annotated
_dict: Any = dict
_tuple: Any = tuple
_create_model: Any = create_model


def axis(kind: Any) -> Any:
    """Return the type of an axis of the grid: one value, or a list of values."""
    one = _annotated[kind, BeforeValidator(_check_scalar)]
    return _annotated[_tuple[one, ...], MinLen(1), BeforeValidator(_to_list)]


_NONE = {"enum": ["none", None]}
_NUMBER = r"^\s*[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?\s*"
_parse_bytes = partial(parse_memory_budget, name="bytes")
UNITS: dict[str, tuple[Callable[[Any], Any], str, str, float]] = {
    "tokens": (parse_tokens, "4k", "[kKmMgG]?$", units.MAX_TOKENS),
    "bytes": (_parse_bytes, "512MiB", "([kKMGT]i?)?B?$", units.MAX_BYTES),
    "s": (parse_seconds, "500ms", "(s|ms|us|min|m|h)?$", units.MAX_SECONDS),
}
"""For each unit of a setting: parser, an example, the end of the pattern of a text, the maximum."""


def _number(setting: Setting) -> Any:
    """Return the type of a number; "none" is one of its values if it is the default."""
    parse: Callable[[Any], Any] | None = None
    forms: list[dict[str, Any]]
    kind = setting.type
    if setting.unit:
        parse, example, end, maximum = UNITS[setting.unit]
        text = {"type": "string", "pattern": _NUMBER + end, "examples": [example]}
        forms = [{"type": "number", "exclusiveMinimum": 0, "maximum": maximum}, text]
    else:
        kind = _annotated[kind, Ge(setting.low), Le(setting.high)]
        forms = [{"type": "integer", "minimum": setting.low, "maximum": setting.high}]
    may_be_none = setting.default is None and not setting.is_required

    def read(value: Any) -> Any:
        if may_be_none and str(value).lower() == "none":
            return None
        return parse(value) if parse else value

    if may_be_none:
        kind, forms = kind | None, [*forms, _NONE]
    schema: dict[str, Any] = {"anyOf": forms} if len(forms) > 1 else forms[0]
    return _annotated[kind, BeforeValidator(read), WithJsonSchema(schema)]


def _value_type(name: str, setting: Setting) -> Any:
    """Return the type of one value of a setting, as pydantic takes it."""
    if setting.unit or setting.high:
        return _number(setting)
    if setting.type is DTypeName:
        return _annotated[DTypeName, AfterValidator(canonical_dtype)]
    return str | None if name == "mask" else setting.type


def _axis(name: str, setting: Setting) -> tuple[Any, Any]:
    """Return the field of a model for a setting that may have several values."""
    kind = axis(_value_type(name, setting))
    default: Any = ... if setting.is_required else () if name == "model" else (setting.default,)
    extra: Any = _one_or_more
    return kind, Field(default=default, description=setting.text, json_schema_extra=extra)


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
    __doc__="Shape of q, k, v and the kind of pass; every list is an axis of the grid.",
    **{name: _axis(name, setting) for name, setting in WORKLOAD.items()},
)


SweepFile: Any = _create_model(
    "SweepFile",
    __base__=_Section,
    __doc__="A longseq sweep: every list is an axis of the grid, and every combination is one "
    "trial.",
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
        Field(
            default=WorkloadSection(),
            description="Shape of q, k, v and the kind of pass.",
            json_schema_extra={"default": {}},
        ),
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


# ---- JSON Schema -------------------------------------------------------------------------------


def config_schema(catalogue: Catalogue) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a sweep file with these implementations."""
    schema: dict[str, Any] = SweepFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "longseq sweep"
    entries = sorted(catalogue.implementations.items())
    names = [{"const": name, "description": entry.summary} for name, entry in entries]
    one = {"additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    own = {"type": "string", "pattern": _OWN_FUNCTION, "description": _OWN_HELP}
    options = {
        name: {
            "description": entry.summary,
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {spec.name: _option_schema(spec) for spec in entry.options},
        }
        for name, entry in entries
    }
    mapping = {"type": "object", "properties": options, **one}
    mapping["patternProperties"] = {_OWN_FUNCTION: {"type": ["object", "null"]}}
    reference = {"$ref": "#/$defs/Implementation"}
    schema["$defs"]["Implementation"] = {"anyOf": [*names, own, mapping]}
    schema["properties"]["implementations"] = {
        "title": "Implementations",
        "description": SweepFile.model_fields["implementations"].description,
        "anyOf": [reference, {"type": "array", "minItems": 1, "items": reference}],
    }
    return schema


_OWN_FUNCTION = r"^.+:[A-Za-z_][A-Za-z0-9_]*$"
_OWN_HELP = "A function of your own: path/to/file.py:function or module:function."
_COUNT_TEXT = {"type": "string", "pattern": _NUMBER + "[kKmMgG]?$"}
_OPTION_TYPES: dict[str, dict[str, Any]] = {
    "int": {"anyOf": [{"type": "integer"}, _COUNT_TEXT]},
    "ints": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "float": {"type": "number", "minimum": 0},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
}


def _option_schema(spec: OptionSpec) -> dict[str, Any]:
    one = dict(_OPTION_TYPES[spec.kind])
    if "float32" in spec.choices:
        one["enum"] = [*spec.choices, *DTYPE_ALIASES]
    elif spec.choices:
        one["enum"] = list(spec.choices)
    if spec.optional:
        one = {"anyOf": [one, _NONE]}
    default = ",".join(map(str, spec.default)) if isinstance(spec.default, tuple) else spec.default
    return {
        "description": spec.help,
        "default": default,
        "anyOf": [one, {"type": "array", "minItems": 1, "items": one}],
    }
