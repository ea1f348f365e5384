"""Command-line options that several commands share; those of settings are in core/settings.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from longseq_bench.core.settings import Setting

Implementations = Annotated[
    list[str],
    typer.Option(
        "--impl",
        help="Implementation to run (repeatable): a name of `longseq list`, or a function of "
        "your own as path/to/file.py:function or module:function.",
    ),
]
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
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout. Default: a table.")
]


def accept(settings: Mapping[str, Setting]) -> Callable[[Callable[..., int]], Callable[..., int]]:
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


def split_names(text: str | None) -> list[str]:
    """Return the distinct names in a text with commas between them."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
