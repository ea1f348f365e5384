"""Make the trials of a sweep file: the product of its axes, checked against this machine."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longseq_bench.config.loader import SourceFile
from longseq_bench.config.models import load_model
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import ConfigError, UserError
from longseq_bench.core.model import Device, OptionValue, Trial, Workload
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.core.options import unknown_option
from longseq_bench.core.registry import canonical_name
from longseq_bench.core.settings import TRIAL

MAX_TRIALS = 100_000

Axis = tuple[Any, ...]
Axes = dict[str, Axis]


@dataclass(frozen=True)
class SweepConfig:
    """A sweep that is ready to run.

    trials: every combination once, round 0, with all options; rows to compare are adjacent.
    baseline: implementation or label that the others are compared to, or None.
    rounds: repetitions of the grid, interleaved.  text: the file's content.
    models: those that the workload names.
    """

    trials: tuple[Trial, ...]
    baseline: str | None
    rounds: int
    text: str
    models: tuple[ModelShape, ...] = ()


def make_sweep(
    source: SourceFile,
    catalogue: Catalogue,
    ranks: int = 1,
    default_memory: Callable[[Device, int], int] | None = None,
) -> SweepConfig:
    """Make the trials of a sweep file on a machine. Raises as `load_config` does.

    ranks: world_size where the file has none.  default_memory: bytes of each of so many ranks on
    such a device, for trials without a memory budget; None: these stay without. All get that of
    the most ranks.
    """
    file = source.keys
    keys = {"device", *source.data}
    settings: Axes = {key: getattr(file, key) for key in TRIAL if key in keys}
    max_ranks = max(settings.get("world_size", (ranks,)))
    devices = tuple(catalogue.resolve_device(choice, max_ranks) for choice in settings["device"])
    shape: Axes = {key: getattr(file.workload, key) for key in source.data.get("workload", ())}
    default = catalogue.default_dtype("cuda") if set(devices) == {"cuda"} else None
    models = _load_models(shape, source)
    if models:
        shape["model"] = models
    elif "dtype" not in shape and default:
        shape["dtype"] = (default,)
    choices = [
        (canonical_name(name), _option_axes(source, catalogue, index, name))
        for index, item in enumerate(file.implementations)
        for name in item
    ]
    _check_devices(source, catalogue, devices, shape, settings)
    settings.setdefault("world_size", (ranks,))
    shape = {key: _distinct(values) for key, values in {**shape, "seq_len": file.tokens}.items()}
    settings = {key: _distinct(v) for key, v in {**settings, "device": devices}.items()}
    options = [math.prod(map(len, axes.values())) for _, axes in choices]
    count = math.prod(map(len, [*shape.values(), *settings.values()])) * sum(options)
    if count > MAX_TRIALS:  # before it is built
        raise ConfigError(f"{source.name}: the grid has {count:,} trials, more than {MAX_TRIALS:,}")
    workloads = _workloads(source, shape, default)
    kinds = _one_of_each(workloads[0], settings, choices, catalogue)
    if default_memory and not all(trial.memory_budget for trial in kinds):
        # so that no trial exhausts the machine
        sizes = {device: default_memory(device, max_ranks) for device in settings["device"]}
        kinds = [t.replace(memory_budget=t.memory_budget or sizes[t.device]) for t in kinds]
    # workload by workload, so that rows to compare are adjacent
    trials = tuple(
        trial.model_copy(update={"workload": workload}) for workload in workloads for trial in kinds
    )
    return SweepConfig(trials, file.baseline, file.rounds, source.text, models)


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _option_axes(source: SourceFile, catalogue: Catalogue, index: int, name: str) -> Axes:
    """Return the distinct values of each option that is written for one implementation."""
    path = ("implementations", index, name)
    with source.located(*path):
        specs = {spec.name: spec for spec in catalogue.entry(name).options}
    axes = {}
    for option, raw in source.keys.implementations[index][name].items():
        with source.located(*path, option):
            if option not in specs:
                raise unknown_option(option, specs, name)
        values = []
        for i, value in enumerate(raw):
            with source.located(*path, option, i):
                values.append(specs[option].coerce(value, name))
        axes[option] = _distinct(values)
    return axes


def _load_models(shape: Axes, source: SourceFile) -> tuple[ModelShape, ...]:
    """Return the models of the workload. Raises ConfigError for one that can't be read."""
    models = []
    layers = shape.pop("layer", (None,))
    for i, name in enumerate(shape.get("model", ())):
        with source.located("workload", "model", i):
            model = load_model(name, Path(source.name).parent)
            models += [model.of_layer(layer) for layer in layers]
    if layers != (None,) and not models:
        raise source.error("workload", "layer", message="layer is of a model; name it with model")
    return _distinct(models)


def _check_devices(
    source: SourceFile, catalogue: Catalogue, devices: Axis, shape: Axes, settings: Axes
) -> None:
    """Raise ConfigError for a device, a dtype on it or a number of ranks that can't be used."""
    located, key, dtypes = source.located, "dtype", shape.get("dtype")
    if dtypes is None and "model" in shape:
        key, dtypes = "model", tuple(model.dtype for model in shape["model"])
    for i, device in enumerate(devices):
        with located("device", i):
            catalogue.check_device(device)
        for j, dtype in enumerate(dtypes or ("float32",)):
            with located("workload", key, j):
                if dtype:  # else the model has that of the device
                    catalogue.check_dtype(device, dtype)
        for j, ranks in enumerate(settings.get("world_size", ())):
            with located("world_size", j):
                catalogue.check_ranks(device, ranks, "world_size")


def _product(axes: Axes) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _workloads(source: SourceFile, shape: Axes, default_dtype: str | None) -> list[Workload]:
    """Return every workload of the grid, lengths innermost.

    default_dtype: of a model that has none; None: that of a workload.
    """
    workloads = []
    for written in _product(shape):
        model: ModelShape | None = written.pop("model", None)
        fields = model.workload_fields(written) if model else written
        if model and default_dtype:
            fields.setdefault("dtype", default_dtype)
        try:
            workload = Workload(**fields)
            workload.visibility.check_tokens(workload.seq_len)
        except (ValidationError, UserError) as error:
            message = str(error)
            if isinstance(error, ValidationError):
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
            keys = "latent", "kv_dtype", "mask", "new_tokens"
            named = [n for n in keys if f" {n} " in f" {message}"]
            # a shape that no key sets is that of the model
            key = next((k for k in (*named, "kv_heads", "heads") if k in written), "model")
            raise source.error("workload", key, message=message) from None
        workloads.append(workload)
    return list(dict.fromkeys(workloads))


def _one_of_each(
    workload: Workload, settings: Axes, choices: list[tuple[str, Axes]], catalogue: Catalogue
) -> list[Trial]:
    """Return the trials of one workload."""
    variants: dict[tuple[Any, ...], dict[str, OptionValue]] = {}
    for name, axes in choices:
        for values in _product(axes):
            options = catalogue.options(name, values)
            variants.setdefault((name, *options.values()), options)
    return [
        Trial(
            implementation=name,
            options=options,
            workload=workload,
            source=catalogue.entry(name).hash,
            **values,
        )
        for values in _product(settings)
        for (name, *_), options in variants.items()
    ]
