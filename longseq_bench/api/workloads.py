"""Keywords of the Python API that are settings (core/settings.py), and the workload they give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from pydantic import ValidationError

from longseq_bench.config.models import load_model
from longseq_bench.core.errors import UnknownNameError, UserError, quote
from longseq_bench.core.model import Layers, Trial, Workload
from longseq_bench.core.model_files import SHAPE
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.core.settings import Setting
from longseq_bench.core.units import format_bytes

F = TypeVar("F", bound=Callable[..., Any])


def accept(settings: Mapping[str, Setting]) -> Callable[[F], F]:
    """Let a function with `**given` take a keyword for each setting.

    `help()` and the completion of a notebook show them. The function gets those that are not None.
    Any other keyword raises UnknownNameError.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function, eval_str=False).parameters.values()
        kept = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {p.name for p in kept}

        @wraps(function)
        def accepting(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in names and name not in settings:
                    known = [*names, *settings]
                    raise UnknownNameError("keyword", name, known, f"{function.__name__}()")
            written = {n: value for n, value in given.items() if n in names or value is not None}
            return function(*args, **written)

        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=setting.type
            )
            for name, setting in settings.items()
        ]
        accepting.__signature__ = inspect.Signature([*kept, *more])  # type: ignore[attr-defined]
        lines = [f"        {name}: {setting.text}" for name, setting in settings.items()]
        accepting.__doc__ = (function.__doc__ or "").replace(
            "\n\n    Raises:", "\n\n    Settings:\n" + "\n".join(lines) + "\n\n    Raises:"
        )
        return accepting  # type: ignore[return-value]

    return decorate


def model_of(given: Mapping[str, Any]) -> ModelShape | None:
    """Return the model that is named; None without one. Raises UserError for an unknown one."""
    if not given.get("model"):
        if given.get("layer"):
            raise UserError(f"layer {given['layer']} is of a model; name one with --model")
        return None
    return load_model(given["model"]).of_layer(given.get("layer"))


def build_workload(given: Mapping[str, Any], default_dtype: str) -> Workload:
    """Return the workload with a length of one token.

    given: settings, also those of a trial. Raises UserError for values that can't be used or
    combined.
    """
    fields = {n: value for n, value in given.items() if n in Workload.model_fields and n != "model"}
    if model := model_of(given):
        fields = model.workload_fields(fields)
    try:
        tokens = given.get("new_tokens") or 1
        return Workload(**{"dtype": default_dtype, **fields, "seq_len": tokens})
    except ValidationError as error:
        raise UserError(describe_invalid(error)) from None


def with_all_layers(workload: Workload, model: ModelShape) -> Workload:
    """Return a step of decoding over all layers of a model, instead of one.

    Raises UserError for a shape that is not the model's, and if no cache grows with the context.
    """
    shape = model.absorbed
    changed = [name for name in SHAPE if getattr(workload, name) != getattr(shape, name)]
    if changed := [*changed, *(["mask"] if workload.mask else [])]:
        named = f"{', '.join(changed)} can't be set for all layers of model {model.name}"
        raise UserError(f"{named}; name one kind with --layer, or leave out --model")
    first = model.kinds[0]
    if first.window:
        most = f"no layer of model {model.name} keeps more than {first.window:,} tokens"
        raise UserError(f"{most}: any context fits; measure a layer with --layer {first.kind}")
    # all layers of a model have its latent, if it has one
    same = {name: getattr(shape, name) for name in SHAPE} if model.latent else {}
    fields, kinds = set(Layers.model_fields), [one for one in model.kinds if one.cached_elements()]
    layers = [Layers(**one.model_dump(include=fields) | same) for one in kinds]
    count = sum(one.layers for one in layers)
    words = "all" if count == model.layers else f"{count} of"
    weights = (model.parameters or 0) * workload.dtype_bytes
    beside = f"beside {format_bytes(weights)} of weights" if weights else "without its weights"
    label = f"{words} {model.layers} layers of {workload.model}, {beside}"
    return workload.model_copy(update={"layers": tuple(layers), "weights": weights, "model": label})


def make_trial(**fields: Any) -> Trial:
    """Return a trial. Raises UserError for fields that can't have or combine their values."""
    try:
        trial = Trial(**fields)
    except ValidationError as error:
        raise UserError(describe_invalid(error)) from None
    if reason := trial.unsupported_reason:
        raise UserError(reason)
    return trial


def describe_invalid(error: ValidationError) -> str:
    """Return the first mistake that pydantic found, with the field and its value."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    name = ".".join(str(part) for part in first["loc"])
    return f"{name}={quote(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
