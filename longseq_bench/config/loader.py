"""Read a sweep file: YAML with line numbers; each mistake is one sentence with file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from longseq_bench.config.schema import SweepFile, WorkloadSection
from longseq_bench.core.errors import ConfigError, UnitError, UnknownNameError, UserError, nearest
from longseq_bench.core.plain_text import has_surrogate, one_line, quote
from longseq_bench.core.user_files import read_text_file

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXAMPLE = "start from configs/quickstart.yaml of the repository"
MAX_DEPTH = 8
MAX_VALUES = 400_000
"""Values of a file: an alias repeats those that it names."""
LONG_TEXT = 20_000
"""Characters of a text for which the choice of the parser counts."""
_YAML = "tag:yaml.org,2002:"
_DIGITS = re.compile(r"[+-]?[0-9]{1,20}")
"""Whole numbers; a longer one stays text, which the key then refuses."""
_RESOLVER = yaml.resolver.Resolver()

YamlPath = tuple[str | int, ...]


@dataclass
class SourceFile:
    """A parsed YAML file with the line of every key and value.

    name: the name of the file in messages.  data: dicts, lists, int, str and None; other scalars
    are text.
    """

    name: str
    data: Any = None
    values: dict[YamlPath, int] = field(default_factory=dict)
    keys: dict[YamlPath, int] = field(default_factory=dict)

    def find_line(self, path: YamlPath, *, key: bool = False) -> int:
        """Return the line of a value (or its key), or of the innermost part with a line; or 0."""
        lines = {**self.values, **self.keys} if key else self.values
        prefixes = [path[:length] for length in range(len(path), 0, -1)] or [()]
        return next((lines[part] for part in prefixes if part in lines), 0)

    def error(self, *path: str | int, message: str, key: bool = False) -> ConfigError:
        """Return an error that begins with the location of a value."""
        line, message = self.find_line(path, key=key), one_line(message)
        return ConfigError(f"{self.name}:{line}: {message}" if line else f"{self.name}: {message}")

    @contextmanager
    def located(self, *path: str | int, key: bool = False) -> Iterator[None]:
        """Add file and line to a UserError raised within the block."""
        try:
            yield
        except UserError as error:
            raise self.error(*path, message=str(error), key=key) from None


def read_text(path: Path) -> str:
    """Return the text of a config. Raises ConfigError, naming a similar file where there is one."""
    try:
        return read_text_file(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no config {path}; {_suggest_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a config; {_suggest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None


def parse_yaml(text: str, name: str) -> SourceFile:
    """Parse YAML, keeping lines. Raises ConfigError for bad syntax or a repeated key."""
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.reason}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None
    except OverflowError:
        raise ConfigError(f"{name}: the file has more than {MAX_VALUES:,} values") from None
    source = SourceFile(name)
    source.data = _read_node(node, (), source) if node else None
    if source.data is None:
        raise ConfigError(f"{name} is empty; {EXAMPLE}")
    return source


def find_scalar(text: str, key: str) -> str | None:
    """Return the text of a key at the top of a YAML file, as it is written.

    None for a key without one value, and for a file that is not valid. No alias is expanded: a few
    of them can stand for more values than memory holds.
    """
    try:
        root = _compose(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return None
    items = root.value if isinstance(root, yaml.MappingNode) else []
    values = [value for name, value in items if name.value == key]
    if not values or not isinstance(values[-1], yaml.ScalarNode):
        return None
    return None if values[-1].tag == f"{_YAML}null" else str(values[-1].value)


def _compose(text: str) -> yaml.Node | None:
    """Return the root of a text; of a long one by libyaml, in a tenth of the time.

    Its messages are less clear, and it does not guard the stack against nesting. Raises
    OverflowError for more than MAX_VALUES keys and as many values, without the aliases.
    """
    fast: Any = getattr(yaml, "CSafeLoader", None)
    if fast and len(text) > LONG_TEXT:
        with suppress(yaml.YAMLError):
            depth = nodes = 0
            for event in yaml.parse(text, Loader=fast):
                nodes += isinstance(event, yaml.NodeEvent)
                if nodes > 2 * MAX_VALUES:  # a key and a value
                    raise OverflowError
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH + 1:
                    raise RecursionError
            return yaml.compose(text, Loader=fast)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def validate(source: SourceFile) -> SweepFile:
    """Validate a parsed file. Raises ConfigError for the first mistake, in the file's order."""
    try:
        return SweepFile.model_validate(source.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # report a misspelt key before the key that is missing because of it
        first = min(details, key=lambda e: (e["type"] == "missing", source.find_line(e["loc"])))
        raise _explain(first, source) from None


def _read_node(node: yaml.Node, path: YamlPath, source: SourceFile) -> Any:
    """Return dicts, lists, null and decimal whole numbers; other scalars as they are written."""
    source.values[path] = node.start_mark.line + 1
    if len(path) > MAX_DEPTH:  # an alias may contain itself
        raise source.error(*path, message="not valid YAML: nested too deeply")
    if len(source.values) > MAX_VALUES:
        raise source.error(*path, message=f"the file has more than {MAX_VALUES:,} values")
    if isinstance(node, yaml.SequenceNode):
        _check_tag(node, path, source, {f"{_YAML}seq"})
        return [_read_node(item, (*path, i), source) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _read_scalar(node, path, source)
    _check_tag(node, path, source, {f"{_YAML}map"})
    mapping: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            form = _describe(_read_node(key, (*path, ""), source))
            raise ConfigError(
                f"{source.name}:{line}: a key of {_label(path)} is {form}, not a word"
            )
        child_path = (*path, key.value)
        if key.value in mapping:
            first = f"first in line {source.keys[child_path]}; remove one"
            raise ConfigError(f"{source.name}:{line}: {key.value} is written twice, {first}")
        source.keys[child_path] = source.values[child_path] = line
        _read_scalar(key, child_path, source)
        mapping[key.value] = _read_node(value, child_path, source)
    return mapping


def _read_scalar(node: yaml.Node, path: YamlPath, source: SourceFile) -> int | str | None:
    if node.tag == f"{_YAML}int" and _DIGITS.fullmatch(node.value):
        return int(node.value)
    if has_surrogate(node.value):
        message = f"{_label(path)} has half of a character (a surrogate); remove it"
        raise source.error(*path, message=message)
    # a tag that is written may only say what the value is anyway
    implicit = _RESOLVER.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    _check_tag(node, path, source, {implicit, f"{_YAML}str"})
    return None if node.tag == f"{_YAML}null" else str(node.value)


def _check_tag(node: yaml.Node, path: YamlPath, source: SourceFile, known: Collection[str]) -> None:
    """Raise ConfigError for a tag that asks for anything but a plain value."""
    if node.tag not in known:
        tag = node.tag.replace(_YAML, "!!")
        message = f"{_label(path)} has the tag {tag}, which is not supported; remove it"
        raise source.error(*path, message=message)


# ---- sentences ---------------------------------------------------------------------------------

_SENTENCES = {
    "too_short": "{label} is an empty list, so there is nothing to run",
    "greater_than_equal": "{label} {input} is too small; the minimum is {ge}",
    "less_than_equal": "{label} {input} is too large; the maximum is {le:,}",
    "int_parsing": "{label} {input!r} is not a whole number",
    "int_parsing_size": "{label} {input} is too large",
    "int_type": "{label} {input!r} is not a whole number",
    "bool_parsing": "{label} {input!r} is neither true nor false",
    "bool_type": "{label} {input!r} is neither true nor false",
    "dict_type": "{label} must be a mapping of keys to values, not {form}",
    "model_type": "{label} must be a mapping of keys to values, not {form}",
    "string_type": "{label} takes one value, not {form}",
}


def _explain(error: ErrorDetails, source: SourceFile) -> ConfigError:
    path, kind, value = error["loc"], error["type"], error["input"]
    label, context = _label(path), error.get("ctx", {})
    if kind == "missing":
        return ConfigError(f"{source.name}: {label} is missing; {EXAMPLE}")
    if kind == "extra_forbidden":
        return source.error(*path, message=_explain_key(path), key=True)
    if isinstance(value, list | dict) and len(path) == 1 and path[0] == "rounds":
        kind = "string_type"
    if value is None and kind != "too_short":
        message = f"{label} has no value"
    elif kind == "literal_error":
        known = re.findall("'([^']+)'", context["expected"])
        message = str(UnknownNameError(label, str(value), known))
        if str(value).lower() in {"gpu", "nvidia"}:  # spelt like cpu, but cuda is meant
            message = f"unknown device {value!r}; did you mean 'cuda'?"
    elif kind == "value_error":
        cause = context["error"]
        has_value = isinstance(cause, UnitError)  # its text quotes the value
        message = str(cause) if has_value and str(cause).startswith(label) else f"{label}: {cause}"
        message = message if has_value else f"{label} {cause}"
        if has_value and "," in str(value):
            message += f" (for several values write a list, [{value}])"
    else:
        parts = {"label": label, "input": value, "form": _describe(value), **context}
        message = _SENTENCES.get(kind, "{label} {input!r} can't be used").format(**parts)
    return source.error(*path, message=message)


def _explain_key(path: YamlPath) -> str:
    key, in_workload = str(path[-1]), len(path) > 1
    if key == "seq_len":
        return "seq_len is not a key; write tokens, at the top level"
    if in_workload and key in SweepFile.model_fields:
        return f"{key} belongs at the top level, not under workload"
    if not in_workload and key in WorkloadSection.model_fields:
        return f"{key} belongs under workload, as in workload: {{{key}: ...}}"
    known = WorkloadSection.model_fields if in_workload else SweepFile.model_fields
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


def _suggest_file(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    files = sorted(n for n in os.listdir(folder) if (folder / n).is_file())
    close = nearest(path.name, files)
    if close:
        return f"did you mean {folder / close}?"
    configs = [name for name in files if name.endswith((".yaml", ".yml"))]
    return f"{folder} has {', '.join(configs)}" if configs else f"{folder} has no .yaml file"
