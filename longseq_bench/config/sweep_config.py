"""A sweep as a file: YAML -> Trials, and every mistake named with its file and line.

A list anywhere is an axis of the grid; a value that is itself several numbers is written with
commas, `segments: ["1024,2048", "4096,8192"]`. What is not written is left to Trial's defaults,
and the budgets to the caller.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import ConfigError, UnitError, UnknownNameError, UserError, nearest
from longseq_bench.core.model import (
    Allocator,
    Device,
    DType,
    Keep,
    Mode,
    OptionValue,
    Trial,
    Workload,
)
from longseq_bench.core.options import OptionSpec, unknown_option
from longseq_bench.core.units import parse_bytes, parse_seconds, parse_tokens

MAX_TRIALS = 100_000
DEFAULT_ROUNDS = 3

_NULL, _INT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:int"
_EXAMPLE = "configs/quickstart.yaml is one to start from"


@dataclass(frozen=True)
class SweepConfig:
    """What a config asks for.

    trials: every combination once, round 0, options complete; what is compared is adjacent.
    baseline: the implementation that the others are set against; None where none is named.
    rounds: visits of each trial, interleaved.  text, place: the config and where it came from.
    """

    trials: tuple[Trial, ...]
    baseline: str | None
    rounds: int
    text: str
    place: str


def load(path: str | Path, catalogue: Catalogue, ranks: int = 1) -> SweepConfig:
    """The sweep that a YAML file asks for. ranks: world_size where the file has none.

    Raises ConfigError or UnknownNameError, one sentence with file, line and the nearest right one.
    """
    return parse(_read(Path(path)), str(path), catalogue, ranks)


def parse(text: str, place: str, catalogue: Catalogue, ranks: int = 1) -> SweepConfig:
    """The sweep that YAML text asks for; `place` is what messages call it. Raises as `load`."""
    source = _Source(place)
    top = source.mapping(source.compose(text), "the config")
    source.check_keys(top, "key", _TOP, _MISPLACED_AT_TOP)
    for key in ("tokens", "implementations"):
        if key not in top:
            raise ConfigError(f"{place}: {key} is missing; {_EXAMPLE}")
    inner = source.mapping(top["workload"][1], "workload") if "workload" in top else {}
    source.check_keys(inner, "workload key", _WORKLOAD, _MISPLACED_IN_WORKLOAD)

    shape = {"seq_len": source.axis(top["tokens"][1], "tokens", _TOKENS)}
    shape |= {key: source.axis(node, key, _WORKLOAD[key]) for key, (_, node) in inner.items()}
    settings = {k: source.axis(top[k][1], k, read) for k, read in _SETTINGS.items() if k in top}
    choices = [_choice(source, n, catalogue) for n in source.items(top["implementations"][1])]
    _check_devices(source, settings.get("device"), shape.get("dtype"), catalogue)
    _check_ranks(source, settings, catalogue)
    _check_size(place, shape, settings, choices)
    return SweepConfig(
        trials=tuple(_trials(_workloads(source, shape), settings, choices, catalogue, ranks)),
        baseline=_baseline(source, top, choices),
        rounds=source.single(top["rounds"][1], "rounds", _whole(1))
        if "rounds" in top
        else DEFAULT_ROUNDS,
        text=text,
        place=place,
    )


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """["sparsity=0.99", "segments=1024,2048"] as a dict; the values stay text.

    Raises UserError where there is no "=", no name, or one name twice.
    """
    found: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name:
            wanted = f"{name or 'NAME'}=VALUE"
            raise UserError(f"option {assignment!r} can't be read; write {wanted}")
        if name in found:
            raise UserError(f"option {name} is given twice, as {found[name]!r} and {value!r}")
        found[name] = value
    return found


# ---- reading one value -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reader:
    """How the text of one key becomes a value; `read` raises UserError without a place."""

    read: Callable[[str, str], Any]
    optional: bool = False


@dataclass(frozen=True)
class _Axis:
    """The values of one key, and the node of each for the line in a message."""

    values: tuple[Any, ...]
    nodes: tuple[yaml.ScalarNode, ...]

    def node_of(self, value: Any) -> yaml.ScalarNode:
        return self.nodes[self.values.index(value)]


def _whole(least: int) -> _Reader:
    def read(key: str, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise UserError(f"{key} {text!r} is not a whole number")
        if int(text) < least:
            raise UserError(f"{key} {text} is too small; the least is {least}")
        return int(text)

    return _Reader(read)


def _quantity(parse_it: Callable[[str], Any], optional: bool = False) -> _Reader:
    def read(key: str, text: str) -> Any:
        try:
            return parse_it(text)
        except UnitError as error:
            said = str(error)
            hint = f" (for several values write a list, [{text}])" if "," in text else ""
            raise UserError((said if said.startswith(key) else f"{key}: {said}") + hint) from None

    return _Reader(read, optional)


def _word(known: tuple[str, ...]) -> _Reader:
    def read(key: str, text: str) -> str:
        if text not in known:
            raise UnknownNameError(key, text, known)
        return text

    return _Reader(read)


def _device(key: str, text: str) -> str:
    if text.lower() in {"gpu", "nvidia"}:  # spelt like cpu, which it does not mean
        raise UserError(f"unknown device {text!r}; did you mean 'cuda'?")
    return str(_word(get_args(Device)).read(key, text))


def _truth(key: str, text: str) -> bool:
    if text.lower() not in {"true", "false", "yes", "no", "on", "off"}:
        raise UserError(f"{key} {text!r} is neither true nor false")
    return text.lower() in {"true", "yes", "on"}


_TOKENS = _quantity(parse_tokens)
_WORKLOAD: dict[str, _Reader] = {
    "batch": _whole(1),
    "heads": _whole(1),
    "kv_heads": _whole(0),
    "head_dim": _whole(1),
    "dtype": _word(get_args(DType)),
    "causal": _Reader(_truth),
    "mode": _word(get_args(Mode)),
}
_SETTINGS: dict[str, _Reader] = {
    "device": _Reader(_device),
    "world_size": _whole(1),
    "memory_budget": _quantity(parse_bytes, optional=True),
    "time_budget": _quantity(parse_seconds, optional=True),
    "repeats": _whole(0),
    "time_cap": _quantity(parse_seconds),
    "threads": _Reader(_whole(1).read, optional=True),
    "seed": _whole(0),
    "keep": _word(get_args(Keep)),
    "allocator": _word(get_args(Allocator)),
}
_TOP = (*_SETTINGS, "workload", "tokens", "baseline", "implementations", "rounds")
_MISPLACED_AT_TOP = {
    key: f"belongs under workload, as in workload: {{{key}: ...}}" for key in _WORKLOAD
}
_MISPLACED_IN_WORKLOAD = dict.fromkeys(_TOP, "belongs at the top level, not under workload")
_LENGTHS = "is not a key; write tokens, at the top level"
_MISPLACED_AT_TOP["seq_len"] = _MISPLACED_IN_WORKLOAD["seq_len"] = _LENGTHS


# ---- nodes of the file, and where they are -----------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Reads YAML nodes and says where each one stands."""

    place: str

    def at(self, node: yaml.Node) -> str:
        return f"{self.place}:{node.start_mark.line + 1}"

    def error(self, node: yaml.Node, what: str) -> ConfigError:
        return ConfigError(f"{self.at(node)}: {what}")

    def compose(self, text: str) -> yaml.Node:
        try:
            node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            said = ", ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError(f"{self.place}:{line}: not valid YAML: {said}") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(f"{self.place}:{line}: not valid YAML: {error.reason}") from None
        except RecursionError:
            raise ConfigError(f"{self.place}: not valid YAML: nested too deeply") from None
        if node is None or node.tag == _NULL:
            raise ConfigError(f"{self.place} is empty; {_EXAMPLE}")
        return node

    def mapping(self, node: yaml.Node, what: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key -> (its node, the node of its value)."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping of keys to values, not {_form(node)}")
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(key, f"a key of {what} is {_form(key)}, not a word")
            if key.value in found:
                first = found[key.value][0].start_mark.line + 1
                raise self.error(key, f"{key.value} is written twice, first in line {first}")
            found[key.value] = (key, value)
        return found

    def check_keys(
        self,
        found: dict[str, tuple[yaml.Node, yaml.Node]],
        kind: str,
        known: Iterable[str],
        misplaced: dict[str, str],
    ) -> None:
        known = tuple(known)
        for key, (node, _) in found.items():
            if key not in known and key in misplaced:
                raise self.error(node, f"{key} {misplaced[key]}")
            if key not in known:
                raise UnknownNameError(kind, key, known, place=self.at(node))

    def items(self, node: yaml.Node) -> list[yaml.Node]:
        """The items of the list of implementations; one name alone is a list of one."""
        if isinstance(node, yaml.MappingNode):
            what = "implementations is a mapping; write a list, one '- name' a line"
            raise self.error(node, what)
        found = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not found:
            raise self.error(node, "implementations is an empty list, so there is nothing to run")
        return list(found)

    def scalars(self, node: yaml.Node, key: str) -> tuple[yaml.ScalarNode, ...]:
        """One value, or the values of a list."""
        if isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{key} is a mapping; write one value or a list of values")
        found = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not found:
            raise self.error(node, f"{key} is an empty list, so there is nothing to run")
        for item in found:
            if not isinstance(item, yaml.ScalarNode):
                hint = 'write numbers that belong together with commas, "1024,2048"'
                raise self.error(item, f"{key} has {_form(item)} inside its list; {hint}")
        return tuple(found)

    def axis(self, node: yaml.Node, key: str, reader: _Reader) -> _Axis:
        first: dict[Any, yaml.ScalarNode] = {}
        for item in self.scalars(node, key):
            first.setdefault(self._value(item, key, reader), item)
        return _Axis(tuple(first), tuple(first.values()))

    def single(self, node: yaml.Node, key: str, reader: _Reader) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"{key} takes one value, not {_form(node)}")
        return self._value(node, key, reader)

    def _value(self, node: yaml.ScalarNode, key: str, reader: _Reader) -> Any:
        if node.tag == _NULL or (reader.optional and node.value.lower() == "none"):
            if reader.optional:
                return None
            raise self.error(node, f"{key} has no value")
        with self.placed(node):
            return reader.read(key, node.value)

    @contextmanager
    def placed(self, node: yaml.Node, inside: str = "") -> Iterator[None]:
        """Adds file and line to a user's error raised within."""
        at = self.at(node)
        try:
            yield
        except UnknownNameError as error:
            place = f"{inside} at {at}" if inside else at
            raise UnknownNameError(error.kind, error.name, error.known, place) from None
        except UserError as error:
            raise ConfigError(f"{at}: {error}") from None


def _form(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a mapping" if isinstance(node, yaml.MappingNode) else repr(node.value)


# ---- implementations ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """One item of `implementations`: a name, and the values of each option that is written."""

    name: str
    axes: dict[str, tuple[OptionValue, ...]]

    @property
    def count(self) -> int:
        return math.prod(len(values) for values in self.axes.values())

    def variants(self) -> Iterator[dict[str, OptionValue]]:
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))


def _choice(source: _Source, item: yaml.Node, catalogue: Catalogue) -> _Choice:
    if item.tag == _NULL:
        raise source.error(item, "an item of implementations has no value")
    if isinstance(item, yaml.ScalarNode):
        with source.placed(item):
            catalogue.entry(item.value)
        return _Choice(item.value, {})
    named = list(source.mapping(item, "an item of implementations").items())
    if len(named) != 1:
        names = ", ".join(name for name, _ in named) or "nothing"
        what = f"an item of implementations names {names}; write one name, its options indented"
        raise source.error(item, f"{what} under it")
    name, (key, options) = named[0]
    with source.placed(key):
        entry = catalogue.entry(name)
    if options.tag == _NULL:
        return _Choice(name, {})
    specs = {spec.name: spec for spec in entry.options}
    axes = {}
    for option, (node, values) in source.mapping(options, f"{name}'s options").items():
        if option not in specs and not specs:
            raise source.error(node, f"{name} takes no options, but {option!r} was given")
        if option not in specs:
            raise unknown_option(option, values.value, specs, f"{name} at {source.at(node)}")
        nodes = source.scalars(values, f"{name}'s {option}")
        axes[option] = tuple(_option(source, specs[option], n, name) for n in nodes)
    return _Choice(name, axes)


def _option(source: _Source, spec: OptionSpec, node: yaml.ScalarNode, owner: str) -> OptionValue:
    with source.placed(node, owner):
        return spec.coerce(_native(node), owner)


def _native(node: yaml.ScalarNode) -> Any:
    """The scalar as YAML means it; words that YAML takes for booleans stay as written."""
    if node.tag == _NULL:
        return None
    if node.tag == _INT and re.fullmatch(r"[+-]?[0-9]+", node.value):
        return int(node.value)
    return node.value


# ---- the grid ----------------------------------------------------------------------------------


def _check_devices(
    source: _Source, devices: _Axis | None, dtypes: _Axis | None, catalogue: Catalogue
) -> None:
    for device in devices.values if devices else ("cpu",):
        at = source.at(devices.node_of(device)) if devices else source.place
        info = catalogue.devices.get(device)
        if info is None or info.unavailable:
            reason = info.unavailable if info else "this machine lists no such device"
            there = [name for name, d in catalogue.devices.items() if not d.unavailable]
            hint = f"; there is {', '.join(there)}" if there else ""
            raise ConfigError(f"{at}: device {device} is not available: {reason}{hint}")
        for dtype in dtypes.values if dtypes else ("float32",):
            if info.dtypes and dtype not in info.dtypes:
                at = source.at(dtypes.node_of(dtype)) if dtypes else at
                has = ", ".join(info.dtypes)
                raise ConfigError(f"{at}: dtype {dtype} is not available on {device}; it has {has}")


def _check_ranks(source: _Source, settings: dict[str, _Axis], catalogue: Catalogue) -> None:
    """Each rank has a CUDA device of its own; on a CPU ranks share the cores, however many."""
    if "world_size" not in settings or "device" not in settings:
        return
    count = catalogue.devices["cuda"].count if "cuda" in settings["device"].values else None
    for ranks in settings["world_size"].values:
        if count is not None and ranks > count:
            what = f"world_size {ranks} is more than the CUDA devices here, of which there "
            what += f"is {count}" if count == 1 else f"are {count}"
            raise source.error(settings["world_size"].node_of(ranks), what)


def _check_size(
    place: str, shape: dict[str, _Axis], settings: dict[str, _Axis], choices: list[_Choice]
) -> None:
    axes = {("tokens" if k == "seq_len" else k): len(a.values) for k, a in shape.items()}
    axes |= {key: len(axis.values) for key, axis in settings.items()}
    axes["implementations"] = sum(choice.count for choice in choices)
    count = math.prod(axes.values())
    if count > MAX_TRIALS:
        longest = sorted(axes, key=lambda key: -axes[key])[:3]
        sizes = ", ".join(f"{key} {axes[key]:,}" for key in longest)
        raise ConfigError(
            f"{place}: the grid has {count:,} trials, more than {MAX_TRIALS:,}; "
            f"its longest axes are {sizes}"
        )


def _workloads(source: _Source, shape: dict[str, _Axis]) -> list[Workload]:
    """Every workload of the grid, lengths innermost."""
    order = [key for key in shape if key != "seq_len"] + ["seq_len"]
    found: dict[Workload, None] = {}
    for values in itertools.product(*(shape[key].values for key in order)):
        fields = dict(zip(order, values, strict=True))
        try:
            found[Workload(**fields)] = None
        except ValidationError as error:
            key = next(k for k in ("kv_heads", "heads", "seq_len") if k in fields)
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise source.error(shape[key].node_of(fields[key]), said) from None
    return list(found)


def _trials(
    workloads: list[Workload],
    settings: dict[str, _Axis],
    choices: list[_Choice],
    catalogue: Catalogue,
    ranks: int,
) -> Iterator[Trial]:
    """Workload-major: what is compared, implementations and their options, is adjacent."""
    how: dict[tuple[Any, ...], dict[str, OptionValue]] = {}
    for choice in choices:
        for given in choice.variants():
            options = catalogue.options(choice.name, given)
            how.setdefault((choice.name, *options.values()), options)
    for workload in workloads:
        for values in itertools.product(*(axis.values for axis in settings.values())):
            fields = {"world_size": ranks, **dict(zip(settings, values, strict=True))}
            for (name, *_), options in how.items():
                yield Trial(implementation=name, options=options, workload=workload, **fields)


def _baseline(
    source: _Source, top: dict[str, tuple[yaml.Node, yaml.Node]], choices: list[_Choice]
) -> str | None:
    if "baseline" not in top:
        return None
    node = top["baseline"][1]
    names = dict.fromkeys(choice.name for choice in choices)
    name: str | None = source.single(node, "baseline", _Reader(lambda _, text: text, optional=True))
    if name is None or name.split(" ")[0] in names:
        return name
    close = nearest(name, names)
    hint = f"did you mean {close!r}?" if close else f"they are {', '.join(names)}"
    raise source.error(node, f"baseline {name!r} is not among the implementations; {hint}")


# ---- the file ----------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no config {path}; {_instead(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a config; {_instead(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}), so no config") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None


def _instead(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    files = sorted(n for n in os.listdir(folder) if (folder / n).is_file())
    close = nearest(path.name, files)
    if close:
        return f"did you mean {folder / close}?"
    configs = [name for name in files if name.endswith((".yaml", ".yml"))]
    return f"{folder} has {', '.join(configs)}" if configs else f"{folder} has no .yaml file"
