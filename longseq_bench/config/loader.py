"""Read a sweep file: YAML with line numbers; each mistake is one sentence with file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from longseq_bench.config.schema import SweepFile, WorkloadSection
from longseq_bench.core.errors import (
    ConfigError,
    UnitError,
    UnknownNameError,
    UserError,
    nearest,
    one_line,
    quote,
)
from longseq_bench.core.files import read_text_file

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXAMPLE = "start from configs/quickstart.yaml of the repository"
MAX_BYTES = 256 << 10
"""Largest sweep file: about 3 s of reading. Its grid may have 100,000 trials."""

YamlPath = tuple[str | int, ...]


@dataclass
class SourceFile:
    """A valid sweep file, and the lines of its values; nothing of this machine is in it.

    name: the file in messages.  data: dicts, lists, int, str and None; other scalars are text.
    lines: of each key and item; empty for the keywords of a call.
    """

    name: str
    text: str = ""
    data: Any = None
    lines: dict[YamlPath, int] = field(default_factory=dict)

    @cached_property
    def keys(self) -> Any:
        """The validated values. Raises ConfigError for the first mistake, in the file's order."""
        try:
            return SweepFile.model_validate(self.data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            # a key is missing because another is misspelt; a list is too short without bad items
            follows = ("missing", "too_short")
            first = min(details, key=lambda e: (e["type"] in follows, self.find_line(e["loc"])))
            raise self.error(*first["loc"], message=_explain(first)) from None

    @property
    def names(self) -> list[str]:
        """The implementations."""
        return [name for item in self.keys.implementations for name in item]

    def find_line(self, path: YamlPath) -> int:
        """Return the line of a value, or of the innermost part with a line; or 0."""
        prefixes = [path[:length] for length in range(len(path), 0, -1)] or [()]
        return next((self.lines[part] for part in prefixes if part in self.lines), 0)

    def error(self, *path: str | int, message: str) -> ConfigError:
        """Return an error that begins with the location of a value."""
        line, message = self.find_line(path), one_line(message)
        return ConfigError(f"{self.name}:{line}: {message}" if line else f"{self.name}: {message}")

    @contextmanager
    def located(self, *path: str | int) -> Iterator[None]:
        """Add file and line to a UserError raised within the block."""
        try:
            yield
        except UserError as error:
            raise self.error(*path, message=str(error)) from None


def load_config(config: str | Path, **keys: Any) -> SourceFile:
    """Read a sweep file. Raises ConfigError: one sentence with file and line.

    keys: replace those of the file.
    """
    path = Path(config)
    if not path.exists():
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        close = nearest(path.name, names)
        hint = f"did you mean {path.parent / close}?" if close else EXAMPLE
        raise ConfigError(f"there is no config {path}; {hint}")
    text = read_text_file(path, encoding="utf-8-sig", max_bytes=MAX_BYTES)
    source = parse_config(text, str(config))
    return replace(source, data=source.data | keys) if keys else source


def read_values(data: dict[str, Any], name: str) -> SourceFile:
    """Return the config that has these values; messages call it `name`. Raises ConfigError."""
    source = SourceFile(name, data=data)
    written = source.keys.model_dump(mode="json", exclude_unset=True)
    source.text = yaml.safe_dump(written, sort_keys=False)
    return source


# ---- YAML --------------------------------------------------------------------------------------


def parse_config(text: str, name: str) -> SourceFile:
    """Parse YAML, keeping lines. Raises ConfigError for bad syntax or a repeated key."""
    source = SourceFile(name, text)
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        source.data = _read_node(node, (), source) if node else None
    except yaml.YAMLError as error:
        part = vars(error).get
        mark = part("problem_mark") or part("context_mark")
        line = 1 + (mark.line if mark else text.count("\n", 0, part("position", 0)))
        problem = ", ".join(filter(None, map(part, ("context", "problem", "reason"))))
        raise ConfigError(f"{name}:{line}: not valid YAML: {problem}") from None
    if source.data is None:
        raise ConfigError(f"{name} is empty; {EXAMPLE}")
    return source


def _read_node(node: yaml.Node, path: YamlPath, source: SourceFile) -> Any:
    """Return dicts, lists, null and decimal whole numbers; other scalars as they are written."""
    source.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_read_node(item, (*path, i), source) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag.endswith(":int") and re.fullmatch(r"[+-]?[0-9]{1,20}", node.value)
        value = int(node.value) if is_number else str(node.value)
        return None if node.tag.endswith(":null") else value
    mapping: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{source.name}:{line}: a key of {_label(path)} is not a word")
        child_path = (*path, key.value)
        if key.value in mapping:
            first = f"first in line {source.lines[child_path]}; remove one"
            raise ConfigError(f"{source.name}:{line}: {key.value} is written twice, {first}")
        source.lines[child_path] = line
        mapping[key.value] = _read_node(value, child_path, source)
    return mapping


# ---- mistakes ----------------------------------------------------------------------------------

_MAPPING = "{label} must be a mapping of keys to values, not {form}"
_SENTENCES = {
    "too": "{label} is an empty list, so there is nothing to run",
    "greater": "{label} {input} is too small; the minimum is {ge}",
    "less": "{label} {input} is too large; the maximum is {le:,}",
    "int": "{label} {input} is not a whole number",
    "bool": "{label} {input} is neither true nor false",
    "string": "{label} takes one value, not {form}",
} | {"dict": _MAPPING, "model": _MAPPING}
"""By the first word of pydantic's type of an error."""


def _explain(error: ErrorDetails) -> str:
    path, kind, value = error["loc"], error["type"], error["input"]
    label, context = _label(path), error.get("ctx", {})
    if kind == "missing":
        return f"{label} is missing; {EXAMPLE}"
    if kind == "extra_forbidden":
        return _explain_key(path)
    if value is None and kind != "too_short":
        return f"{label} has no value"
    if kind == "literal_error":
        if str(value).lower() in {"gpu", "nvidia"}:  # spelt like cpu, but cuda is meant
            return f"unknown device {value!r}; did you mean 'cuda'?"
        known = re.findall("'([^']+)'", context["expected"])
        return str(UnknownNameError(label, str(value), known))
    if kind == "value_error":
        text = str(context["error"])
        if not isinstance(context["error"], UnitError):
            return f"{label} {text}"
        hint = f" (for several values write a list, [{value}])" if "," in str(value) else ""
        return (text if text.startswith(label) else f"{label}: {text}") + hint
    parts = {"label": label, "input": quote(value), "form": _describe(value), **context}
    sentence = _SENTENCES.get(kind.partition("_")[0], "{label} {input} can't be used")
    return sentence.format(**parts)


def _explain_key(path: YamlPath) -> str:
    key, in_workload = str(path[-1]), len(path) > 1
    if key == "seq_len":
        return "seq_len is not a key; write tokens, at the top level"
    if in_workload and key in SweepFile.model_fields:
        return f"{key} belongs at the top level, not under workload"
    if not in_workload and key in WorkloadSection.model_fields:
        return f"{key} belongs under workload, as in workload: {{{key}: ...}}"
    known: Mapping[str, Any] = (WorkloadSection if in_workload else SweepFile).model_fields
    return str(UnknownNameError("workload key" if in_workload else "key", key, known))


def _label(path: YamlPath) -> str:
    match path:
        case ():
            return "the config"
        case ("implementations", _):
            return "an item of implementations"
        case ("implementations", _, name):
            return f"{name}'s options"
        case ("implementations", _, name, option, *_):
            return f"{name}'s {option}"
        case ("workload", key, *_):
            return str(key)
    return str(path[0])


def _describe(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else quote(value)
