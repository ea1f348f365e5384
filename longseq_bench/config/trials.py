"""Make the trials of a sweep file: the product of its axes, checked against this machine."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longseq_bench.config.loader import SourceFile, parse_yaml, read_text, validate
from longseq_bench.config.schema import SweepFile
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import ConfigError, UserError, nearest
from longseq_bench.core.model import Device, OptionValue, Trial, Workload
from longseq_bench.core.models import ModelShape, load_model
from longseq_bench.core.options import unknown_option
from longseq_bench.core.own_functions import canonical_name, short_name, source_of

MAX_TRIALS = 100_000
SETTINGS = (
    "device", "world_size", "memory_budget", "time_budget", "repeats", "time_cap", "threads",
    "seed", "keep", "allocator", "dense_kernel",
)  # fmt: skip
"""Keys of a trial that are axes, slowest first."""

Axes = dict[str, tuple[Any, ...]]


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


@dataclass(frozen=True)
class ParsedConfig:
    """A valid sweep file, and where its values are written; nothing of this machine is in it."""

    text: str
    source: SourceFile
    file: SweepFile


def load_config(path: str | Path) -> ParsedConfig:
    """Read a sweep file. Raises ConfigError: one sentence with file and line."""
    return parse_config(read_text(Path(path)), str(path))


def parse_config(text: str, name: str, has_lines: bool = True) -> ParsedConfig:
    """Parse YAML text; messages call it `name`. Raises as `load_config` does.

    has_lines: messages name the line; False for text that no one wrote.
    """
    source = parse_yaml(text, name)
    if not has_lines:
        source = SourceFile(name, source.data)
    return ParsedConfig(text, source, validate(source))


def make_sweep(
    config: ParsedConfig, catalogue: Catalogue, ranks: int = 1,
    default_memory: Callable[[Device, int], int] | None = None,
) -> SweepConfig:  # fmt: skip
    """Make the trials of a sweep file on a machine. Raises as `load_config` does.

    ranks: world_size where the file has none.  default_memory: bytes of each of so many ranks on
    such a device, for trials without a memory budget; None: these stay without.
    """
    source, file = config.source, config.file
    max_ranks = max(file.world_size) if "world_size" in source.data else ranks
    devices = tuple(catalogue.resolve_device(device, max_ranks) for device in file.device)
    file = file.model_copy(update={"device": devices})
    shape = {key: _distinct(getattr(file.workload, key)) for key in source.data.get("workload", ())}
    default = catalogue.default_dtype("cuda") if set(devices) == {"cuda"} else None
    models = _load_models(file, source, catalogue)
    if models:
        shape["model"] = models
    elif "dtype" not in shape and default:
        shape["dtype"] = (default,)
    shape["seq_len"] = _distinct(file.tokens)
    keys = {"device", *source.data}
    settings = {key: _distinct(getattr(file, key)) for key in SETTINGS if key in keys}
    choices = [
        (canonical_name(name), _option_axes(name, options, catalogue, source, index))
        for index, item in enumerate(file.implementations)
        for name, options in item.items()
    ]
    _check_devices(file, source, catalogue)
    _check_baseline(file, source)
    _check_size(source.name, shape, settings, choices)
    workloads = _workloads(shape, default, file, source)
    kinds = _one_of_each(workloads[0], settings, choices, catalogue, ranks)
    if default_memory:
        kinds = _set_budgets(kinds, default_memory)
    # workload by workload, so that rows to compare are adjacent
    trials = tuple(
        trial.model_copy(update={"workload": workload}) for workload in workloads for trial in kinds
    )
    return SweepConfig(trials, file.baseline, file.rounds, config.text, models)


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _option_axes(
    name: str, options: dict[str, tuple[Any, ...]], catalogue: Catalogue, source: SourceFile,
    index: int,
) -> Axes:  # fmt: skip
    """Return the distinct values of each option that is written for one implementation."""
    path = ("implementations", index, name)
    with source.located(*path, key=True):
        specs = {spec.name: spec for spec in catalogue.entry(name).options}
    axes = {}
    for option, raw in options.items():
        if option not in specs:
            with source.located(*path, option, key=True):
                if not specs:
                    raise UserError(f"{name} takes no options, but {option!r} was given")
                raise unknown_option(option, raw[0] if len(raw) == 1 else raw, specs, name)
        values = []
        for i, value in enumerate(raw):
            with source.located(*path, option, i):
                values.append(specs[option].coerce(value, name))
        axes[option] = _distinct(values)
    return axes


def _check_devices(file: SweepFile, source: SourceFile, catalogue: Catalogue) -> None:
    for i, device in enumerate(file.device):
        with source.located("device", i):
            catalogue.check_device(device)
        for j, dtype in enumerate(file.workload.dtype):
            with source.located("workload", "dtype", j):
                catalogue.check_dtype(device, dtype)
        for j, ranks in enumerate(file.world_size if "world_size" in source.data else ()):
            with source.located("world_size", j):
                catalogue.check_ranks(device, ranks, "world_size")


def _load_models(
    file: SweepFile, source: SourceFile, catalogue: Catalogue
) -> tuple[ModelShape, ...]:
    """Return the models of the workload. Raises ConfigError for one that can't be used here."""
    models = []
    sets_dtype = "dtype" not in source.data.get("workload", ())
    for i, name in enumerate(file.workload.model):
        with source.located("workload", "model", i):
            models.append(load_model(name, Path(source.name).parent))
            if sets_dtype and models[-1].dtype:
                for device in file.device:
                    catalogue.check_dtype(device, models[-1].dtype)
    return tuple(dict.fromkeys(models))


def _check_baseline(file: SweepFile, source: SourceFile) -> None:
    written = _distinct(name for item in file.implementations for name in item)
    names = _distinct([*written, *map(canonical_name, written), *map(short_name, written)])
    if file.baseline is None or file.baseline.split(" ")[0] in names:
        return
    close = nearest(file.baseline, names)
    hint = f"did you mean {close!r}?" if close else f"they are {', '.join(names)}"
    message = f"baseline {file.baseline!r} is not among the implementations; {hint}"
    raise source.error("baseline", message=message)


def _check_size(name: str, shape: Axes, settings: Axes, choices: list[tuple[str, Axes]]) -> None:
    """Raise ConfigError for a grid that is too large, before it is built."""
    sizes = {key.replace("seq_len", "tokens"): len(v) for key, v in {**shape, **settings}.items()}
    sizes["implementations"] = sum(math.prod(map(len, axes.values())) for _, axes in choices)
    count = math.prod(sizes.values())
    if count > MAX_TRIALS:
        largest = sorted(sizes, key=lambda key: -sizes[key])[:3]
        longest_axes = ", ".join(f"{key} {sizes[key]:,}" for key in largest)
        raise ConfigError(
            f"{name}: the grid has {count:,} trials, more than {MAX_TRIALS:,}; "
            f"its longest axes are {longest_axes}"
        )


def _product(axes: Axes) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _workloads(
    shape: Axes, default_dtype: str | None, file: SweepFile, source: SourceFile
) -> list[Workload]:
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
            message = _message(error)
            keys: tuple[str, ...] = ("kv_heads", "heads")
            for name in ("mask", "new_tokens"):
                if f" {name} " in f" {message}":
                    keys = (name,)
            # a shape that no key sets is that of the model
            key = next((k for k in keys if k in written), "model")
            values = getattr(file.workload, key)
            index = values.index(written[key]) if key in written else 0
            raise source.error("workload", key, index, message=message) from None
        workloads.append(workload)
    return list(dict.fromkeys(workloads))


def _message(error: ValidationError | UserError) -> str:
    if isinstance(error, UserError):
        return str(error)
    return error.errors()[0]["msg"].removeprefix("Value error, ")


def _one_of_each(
    workload: Workload, settings: Axes, choices: list[tuple[str, Axes]], catalogue: Catalogue,
    ranks: int,
) -> list[Trial]:  # fmt: skip
    """Return the trials of one workload."""
    variants: dict[tuple[Any, ...], dict[str, OptionValue]] = {}
    sources = {name: source_of(name) for name, _ in choices}
    for name, axes in choices:
        for values in _product(axes):
            options = catalogue.options(name, values)
            variants.setdefault((name, *options.values()), options)
    return [
        Trial(
            implementation=name, options=options, workload=workload, source=sources[name],
            **{"world_size": ranks, **values},
        )
        for values in _product(settings)
        for (name, *_), options in variants.items()
    ]  # fmt: skip


def _set_budgets(trials: list[Trial], default_memory: Callable[[Device, int], int]) -> list[Trial]:
    """Give trials without a memory budget the default one, so that no trial exhausts the machine.

    All get the default of the trial with the most ranks, so that they are comparable.
    """
    max_ranks: dict[Device, int] = {}
    for trial in trials:
        if trial.memory_budget is None:
            max_ranks[trial.device] = max(trial.world_size, max_ranks.get(trial.device, 1))
    budgets = {device: default_memory(device, ranks) for device, ranks in max_ranks.items()}
    return [t if t.memory_budget else t.replace(memory_budget=budgets[t.device]) for t in trials]
