"""The keys of a sweep file, as pydantic models: types, units, defaults and descriptions.

The JSON Schema and the configuration reference are generated from these models.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Le, MinLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from longseq_bench.core import bounds
from longseq_bench.core.catalogue import Catalogue, Entry
from longseq_bench.core.model import (
    DTYPE_ALIASES,
    Allocator,
    DeviceChoice,
    Keep,
    Mode,
    Trial,
    Workload,
    canonical_dtype,
)
from longseq_bench.core.options import OptionSpec
from longseq_bench.core.units import parse_memory_budget, parse_seconds, parse_tokens

DEFAULT_ROUNDS = 3

T = TypeVar("T")


# ---- types of values ---------------------------------------------------------------------------


def _to_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        raise ValueError("is a mapping; write one value or a list of values")
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_scalar(value: Any) -> Any:
    if isinstance(value, list | dict):
        form = "a list" if isinstance(value, list) else "a mapping"
        hint = 'write numbers that belong together with commas, "1024,2048"'
        raise ValueError(f"has {form} inside its list; {hint}")
    return value


def _unless_none(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if str(value).lower() == "none" else parse(value)


class _OneOrMore:
    """JSON Schema of an axis: one value, or a list of values."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        array = handler(core)
        return {"anyOf": [array["items"], array]}


Axis = Annotated[
    tuple[Annotated[T, BeforeValidator(_check_scalar)], ...],
    MinLen(1), BeforeValidator(_to_list), _OneOrMore(),
]  # fmt: skip
"""One value or a list of values; every list is an axis of the grid."""


_NONE = {"enum": ["none", None]}


def _quantity_schema(
    example: str, pattern: str, maximum: float, *, optional: bool = False
) -> WithJsonSchema:
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": maximum}
    text = {"type": "string", "pattern": pattern, "examples": [example]}
    return WithJsonSchema({"anyOf": [number, text, *([_NONE] * optional)]})


_NUMBER = r"^\s*[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?\s*"
_TIME = _NUMBER + "(s|ms|us|min|m|h)?$"
Batch = Annotated[int, Ge(1), Le(bounds.MAX_BATCH)]
Heads = Annotated[int, Ge(1), Le(bounds.MAX_HEADS)]
HeadsOrZero = Annotated[int, Ge(0), Le(bounds.MAX_HEADS)]
HeadDim = Annotated[int, Ge(1), Le(bounds.MAX_HEAD_DIM)]
HeadDimOrZero = Annotated[int, Ge(0), Le(bounds.MAX_HEAD_DIM)]
NewTokens = Annotated[int, Ge(0), Le(bounds.MAX_NEW_TOKENS)]
Ranks = Annotated[int, Ge(1), Le(bounds.MAX_RANKS)]
Rounds = Annotated[int, Ge(1), Le(bounds.MAX_ROUNDS)]
Repeats = Annotated[int, Ge(0), Le(bounds.MAX_REPEATS)]
Seed = Annotated[int, Ge(0), Le(bounds.MAX_SEED)]
_Threads = Annotated[int, Ge(1), Le(bounds.MAX_THREADS)]
Threads = Annotated[
    _Threads | None,
    BeforeValidator(_unless_none(lambda value: value)),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": bounds.MAX_THREADS}, _NONE]}
    ),
]
Tokens = Annotated[
    int,
    BeforeValidator(parse_tokens),
    _quantity_schema("4k", _NUMBER + "[kKmMgG]?$", bounds.MAX_TOKENS),
]
Bytes = Annotated[
    int | None,
    BeforeValidator(_unless_none(partial(parse_memory_budget, name="bytes"))),
    _quantity_schema("512MiB", _NUMBER + "([kKMGT]i?)?B?$", bounds.MAX_BYTES, optional=True),
]
Seconds = Annotated[
    float, BeforeValidator(parse_seconds), _quantity_schema("500ms", _TIME, bounds.MAX_SECONDS)
]
SecondsOrNone = Annotated[
    float | None,
    BeforeValidator(_unless_none(parse_seconds)),
    _quantity_schema("60s", _TIME, bounds.MAX_SECONDS, optional=True),
]
DTypeName = Annotated[
    Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"],
    AfterValidator(canonical_dtype),
]


def _named_options(item: Any) -> Any:
    """Turn an item of `implementations` into {name: {option: values}}."""
    if item is None:
        raise ValueError("has no value")
    if isinstance(item, list):
        raise ValueError("is a list; write one name, one '- name' a line")
    if not isinstance(item, dict):
        return {item: {}}
    if len(item) != 1:
        names = ", ".join(item) or "nothing"
        raise ValueError(f"names {names}; write one name, its options indented under it")
    return {name: options or {} for name, options in item.items()}


def _to_items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        raise ValueError("is a mapping; write a list, one '- name' a line")
    return _to_list(value)


Implementation = Annotated[
    dict[str, dict[str, Axis[bool | int | float | str | None]]], BeforeValidator(_named_options)
]


# ---- the file ----------------------------------------------------------------------------------


def _axis(model: type[BaseModel], name: str, description: str, unit: str = "") -> Any:
    """Declare an axis whose default is that of a field of Workload or Trial."""
    default = model.model_fields[name].default
    text = "none" if default is None else f"{str(default).lower()}{unit}"
    return Field(
        default=(default,),
        description=f"{description} Default: {text}.",
        json_schema_extra={"default": default},
    )


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkloadSection(_Section):
    """Shape of q, k, v and the kind of pass; every list is an axis of the grid."""

    model: Axis[str] = Field(
        default=(),
        description="Model whose attention sets heads, kv_heads, head_dim, v_head_dim and dtype: a "
        "name of `longseq models`, or the path of a Hugging Face config.json, from the folder of "
        "this file. Keys that are written here override it. Default: none.",
        json_schema_extra={"default": []},
    )
    batch: Axis[Batch] = _axis(Workload, "batch", "Sequences per batch.")
    heads: Axis[Heads] = _axis(Workload, "heads", "Query heads.")
    kv_heads: Axis[HeadsOrZero] = _axis(
        Workload, "kv_heads", "Key and value heads, a divisor of heads; 0: as many as heads."
    )
    head_dim: Axis[HeadDim] = _axis(Workload, "head_dim", "Elements per head.")
    v_head_dim: Axis[HeadDimOrZero] = _axis(
        Workload, "v_head_dim", "Elements per head of v and the output; 0: as many as head_dim."
    )
    dtype: Axis[DTypeName] = _axis(
        Workload,
        "dtype",
        "Element type of q, k, v and the output; fp32, bf16 and fp16 are short names. "
        "On cuda the default is bfloat16.",
    )
    causal: Axis[bool] = _axis(
        Workload, "causal", "true: a query sees no key after its own position."
    )
    mask: Axis[str | None] = _axis(
        Workload,
        "mask",
        "Keys that a query sees: full, causal, sliding-window:4k, prefix:8k, documents:4k (packed, "
        "causal; or lengths with commas, or chatqa2), full-documents:4k; none: as causal says.",
    )
    mode: Axis[Mode] = _axis(
        Workload,
        "mode",
        "forward: one forward pass; train: forward and backward; decode: new tokens against a KV "
        "cache of `tokens`.",
    )
    new_tokens: Axis[NewTokens] = _axis(
        Workload,
        "new_tokens",
        "Tokens that a step of mode decode adds, the last ones of the cache; a few for speculative "
        "decoding. 0: 1 in decode, none in other modes.",
    )


class SweepFile(_Section):
    """A longseq sweep: every list is an axis of the grid, and every combination is one trial."""

    tokens: Axis[Tokens] = Field(
        description="Sequence lengths in tokens over all ranks; k is 1024, M is 1024 k. Required."
    )
    implementations: Annotated[
        tuple[Implementation, ...], MinLen(1), BeforeValidator(_to_items)
    ] = Field(
        description="What is measured: names, or `name: {option: value}`. `longseq list` shows "
        "every name with its options; path/to/file.py:function and module:function name a "
        "function of your own. Required."
    )
    workload: WorkloadSection = Field(
        default=WorkloadSection(),
        description="Shape of q, k, v and the kind of pass.",
        json_schema_extra={"default": {}},
    )
    baseline: str | None = Field(
        default=None,
        description="Implementation (or label of a row) to which the others are compared. "
        "Default: none.",
    )
    rounds: Rounds = Field(
        default=DEFAULT_ROUNDS,
        description="Repetitions of the whole grid, interleaved so that slow drifts of the "
        f"machine meet every trial alike. Default: {DEFAULT_ROUNDS}.",
    )
    device: Axis[DeviceChoice] = Field(
        default=("auto",),
        description="Kind of device; auto: cuda where it works with a device per rank, else cpu. "
        "Default: auto.",
        json_schema_extra={"default": "auto"},
    )
    world_size: Axis[Ranks] = _axis(
        Trial, "world_size", "Ranks, one process each. `longseq launch` sets another default."
    )
    memory_budget: Axis[Bytes] = _axis(
        Trial,
        "memory_budget",
        "Memory that each rank may allocate beyond the idle process with torch loaded, in bytes, "
        "KiB, MiB, GiB, kB, MB or GB; on cuda the context and NCCL count, too; none: 80 % of what "
        "is free.",
    )
    time_budget: Axis[SecondsOrNone] = _axis(
        Trial, "time_budget", "Time that one pass may take, in s, ms, us, min or h; none: no limit."
    )
    repeats: Axis[Repeats] = _axis(
        Trial, "repeats", "Timed passes at most; 0: only find out if one pass fits."
    )
    time_cap: Axis[Seconds] = _axis(
        Trial,
        "time_cap",
        "Time after which no further timed pass starts, in s, ms, us, min or h.",
        " s",
    )
    threads: Axis[Threads] = _axis(
        Trial, "threads", "CPU threads of each rank; none: the ranks share the cores."
    )
    seed: Axis[Seed] = _axis(Trial, "seed", "Seed of the random inputs.")
    keep: Axis[Keep] = _axis(
        Trial,
        "keep",
        "What stays in memory during a pass. all: what autograd keeps; inputs: only q, k, v, the "
        "rest is recomputed in backward; nothing: outputs overwrite inputs (in place).",
    )
    allocator: Axis[Allocator] = _axis(
        Trial,
        "allocator",
        "expandable: segments that grow (CUDA); fresh: timed passes write to memory that the "
        "process has not used yet (CPU), by default to warm memory.",
    )
    dense_kernel: Axis[str] = _axis(
        Trial,
        "dense_kernel",
        "Kernel of the dense attention with which a sparse one is compared. same: that of the "
        "sparse one; auto: the fastest; sdpa: torch's choice; or a kernel of `longseq list`.",
    )


# ---- JSON Schema -------------------------------------------------------------------------------


def config_schema(catalogue: Catalogue | None = None) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a sweep file.

    catalogue: the implementations to describe with their options; without one, any name and any
    options are accepted.
    """
    schema = SweepFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "longseq sweep"
    item: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "object"}]}
    if catalogue is not None:
        entries = sorted(catalogue.implementations.items())
        names = [{"const": name, "description": entry.summary} for name, entry in entries]
        options = {name: _entry_schema(entry) for name, entry in entries}
        one = {"additionalProperties": False, "minProperties": 1, "maxProperties": 1}
        own = {"type": "string", "pattern": _OWN_FUNCTION, "description": _OWN_HELP}
        mapping = {"type": "object", "properties": options, **one}
        mapping["patternProperties"] = {_OWN_FUNCTION: {"type": ["object", "null"]}}
        item = {"anyOf": [*names, own, mapping]}
    reference = {"$ref": "#/$defs/Implementation"}
    schema["$defs"]["Implementation"] = item
    schema["properties"]["implementations"] = {
        "title": "Implementations",
        "description": SweepFile.model_fields["implementations"].description,
        "anyOf": [reference, {"type": "array", "minItems": 1, "items": reference}],
    }
    return schema


def _entry_schema(entry: Entry) -> dict[str, Any]:
    return {
        "description": entry.summary,
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {spec.name: _option_schema(spec) for spec in entry.options},
    }


_OWN_FUNCTION = r"^.+:[A-Za-z_][A-Za-z0-9_]*$"
_OWN_HELP = "A function of your own: path/to/file.py:function or module:function."
_COUNT_OR_TEXT = {
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": _NUMBER + "[kKmMgG]?$"}]
}
_OPTION_TYPES: dict[str, dict[str, Any]] = {
    "int": _COUNT_OR_TEXT,
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
