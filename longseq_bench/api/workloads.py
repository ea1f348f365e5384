"""The keywords of the Python API for the shape of q, k, v and the kind of pass.

They have the names of the options of the command line, which passes its own options here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import ValidationError
from typing_extensions import TypedDict

from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.model import Keep, Mode, Trial, Workload
from longseq_bench.core.models import ModelShape, load_model
from longseq_bench.core.plain_text import quote

F = TypeVar("F", bound=Callable[..., Any])


class WorkloadArguments(TypedDict, total=False):
    """Shape of q, k, v and the kind of pass; a keyword that is left out has its default.

    model: sets heads, KV heads, head_dim and dtype: a name of `longseq models`, or the path of a
        Hugging Face config.json. Other keywords override it.
    dtype: element type; default: that of the model, else bfloat16 on cuda and float32 on cpu.
    heads: query heads; default: 8, or those of the model.
    kv_heads: key and value heads, a divisor of heads; default: as many as heads.
    head_dim: elements per head; default: 64, or those of the model.
    v_head_dim: elements per head of v and the output; default: as head_dim.
    batch: sequences per batch; default: 1.
    causal: mask keys after the query's position.
    mask: keys that a query sees: full, causal, sliding-window:4k, prefix:8k, documents:4k,
        full-documents:4k; default: full.
    mode: kind of pass: forward, train for forward and backward, or decode for new tokens against a
        KV cache; default: forward.
    new_tokens: tokens that a step of decoding adds, the last ones of the cache; default: 1.
    keep: tensors kept by a pass: all, inputs or nothing; default: all.
    """

    model: str | None
    dtype: str | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    batch: int
    causal: bool
    mask: str | None
    mode: Mode
    new_tokens: int | None
    keep: Keep


def show_keywords(function: F) -> F:
    """Give a function with `**workload: Unpack[WorkloadArguments]` a signature with each keyword.

    `help()` and the completion of a notebook show it.
    """
    hints = get_type_hints(WorkloadArguments)
    own = inspect.signature(function).parameters.values()
    kept = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint)
        for name, hint in hints.items()
    ]
    function.__signature__ = inspect.Signature([*kept, *more])  # type: ignore[attr-defined]
    return function


def check_keywords(given: Mapping[str, object], function: str) -> None:
    """Raise UnknownNameError for a keyword that is no part of a workload."""
    for name in given:
        if name not in WorkloadArguments.__annotations__:
            known = WorkloadArguments.__annotations__
            raise UnknownNameError("keyword", name, known, f"{function}()")


def model_of(given: WorkloadArguments) -> ModelShape | None:
    """Return the model that is named; None without one. Raises UserError for an unknown one."""
    name = given.get("model")
    return load_model(name) if name else None


def build_workload(given: WorkloadArguments, default_dtype: str) -> Workload:
    """Return the workload with a length of one token.

    Raises UserError for values that can't be used or combined.
    """
    mode, keep, new_tokens = (
        given.get("mode", "forward"), given.get("keep", "all"), given.get("new_tokens"),
    )  # fmt: skip
    if keep == "inputs" and mode != "train":
        raise UserError("--keep inputs needs --mode train: only a backward pass recomputes")
    if keep == "nothing" and mode == "decode":
        raise UserError("--keep nothing can't be used with --mode decode: the cache stays")
    if new_tokens and mode != "decode":
        raise UserError(f"--new-tokens {new_tokens} needs --mode decode, not --mode {mode}")
    fields: dict[str, Any] = {
        n: value for n, value in given.items() if n not in ("keep", "model") and value is not None
    }
    if model := model_of(given):
        fields = model.workload_fields(fields)
    try:
        return Workload(**{"dtype": default_dtype, **fields, "seq_len": new_tokens or 1})
    except ValidationError as error:
        raise UserError(describe_invalid(error)) from None


def make_trial(**fields: Any) -> Trial:
    """Return a trial. Raises UserError for a field that can't have its value."""
    try:
        return Trial(**fields)
    except ValidationError as error:
        raise UserError(describe_invalid(error)) from None


def describe_invalid(error: ValidationError) -> str:
    """Return the first mistake that pydantic found, with the field and its value."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    name = ".".join(str(part) for part in first["loc"])
    return f"{name}={quote(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
