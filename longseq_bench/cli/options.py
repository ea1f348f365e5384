"""Command-line options that several commands share; those of settings are in core/settings.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from longseq_bench.core.settings import Setting

_annotated: Any = Annotated  # types that are put together at run time
_implementations = typer.Option(
    "--impl",
    help="Implementation to run (repeatable): a name of `longseq list`, or a function of your own "
    "as path/to/file.py:function or module:function.",
)
Implementations = Annotated[list[str], _implementations]
SomeImplementations = Annotated[list[str] | None, _implementations]
ImplementationOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        help="Implementation option NAME=VALUE (repeatable). Default: as in `longseq list`.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for records and report. Default: a new one under results/."),
]
Formats = Annotated[str | None, typer.Option("--format")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout. Default: a table.")
]


def declare(settings: Mapping[str, Setting]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command with `**given` an option for each setting, after its positional parameters.

    The command gets those that are written.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = signature(command, eval_str=True).parameters.values()
        first = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        options = [_option(name, setting) for name, setting in settings.items()]
        parameters = [*first, *options, *last]

        @wraps(command)
        def accepting(**values: Any) -> int:
            absent = {n for n in settings if values[n] is None or values[n] is False}
            return command(**{n: value for n, value in values.items() if n not in absent})

        accepting.__annotations__ = {p.name: p.annotation for p in parameters}
        accepting.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return accepting

    return decorate


def _option(name: str, setting: Setting) -> Parameter:
    flag = f"--{name.replace('_', '-')}"
    if setting.type is bool:
        option = typer.Option(False, flag, help=setting.text)
        return Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=bool)
    low, high = (setting.low, setting.high) if setting.high else (None, None)
    option = typer.Option(None, flag, min=low, max=high, help=setting.text, show_default=False)
    kind = str if setting.unit else setting.type
    return Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def describe(command: Callable[..., int]) -> str:
    """Give options the help texts in the docstring of their command; return the rest of it.

    The last section of the docstring is `Options:`, with `name: help` for each.
    """
    text, _, section = cleandoc(command.__doc__ or "").partition("\n\nOptions:\n")
    found = re.findall(r"^    (\w+): (.+(?:\n     .+)*)", section, re.MULTILINE)
    helps = {name: " ".join(words.split()) for name, words in found}
    parameters = []
    for one in signature(command, eval_str=True).parameters.values():
        parameters.append(one)
        if one.name not in helps:
            continue
        kind, info = one.annotation, None
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)
        elif one.default is one.empty:
            info = typer.Argument()
        else:  # a bool that is True has --no-flag too
            flag = [f"--{one.name.replace('_', '-')}"] if one.default is False else []
            info = typer.Option(*flag)
        info = copy(info)
        info.help = helps[one.name]
        parameters[-1] = one.replace(annotation=_annotated[kind, info])
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return text


def split_names(text: str | None) -> list[str]:
    """Return the distinct names in a text with commas between them."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
