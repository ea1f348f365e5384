"""Command-line options that several commands share, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from longseq_bench.core import bounds

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


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of commands that search for lengths: implementations, budgets, device."""

    impl: Annotated[
        list[str],
        typer.Option(
            help="Implementation to run (repeatable): a name of `longseq list`, or a function of "
            "your own as path/to/file.py:function or module:function."
        ),
    ]
    option: ImplementationOptions = None
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="Memory that a rank may allocate beyond the idle process with torch loaded, in "
            "bytes: 7.9GiB, 512MiB; on cuda the context and NCCL count, too. Default: 80 % of the "
            "free memory, on cpu divided by the ranks of a host."
        ),
    ] = None
    time_budget: Annotated[
        str, typer.Option(help="Time limit of one pass, in seconds: 60s, 2min.")
    ] = "10s"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Kind of device; auto: cuda where it works with one per rank, else cpu."),
    ] = "auto"
    allocator: Annotated[
        Literal["default", "expandable", "fresh"],
        typer.Option(
            help="expandable: expandable segments of torch (CUDA); fresh: timed passes write to "
            "memory that the process has not used yet (CPU), by default to warm memory."
        ),
    ] = "default"
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_THREADS,
            help="CPU threads per rank. Default: cores of a host / its ranks.",
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=bounds.MAX_SEED, help="Seed of the random inputs.")
    ] = 0

    def settings(self) -> dict[str, Any]:
        """Return budgets and device: all but the implementations and their options."""
        names = [f.name for f in fields(self) if f.name not in ("impl", "option")]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Options for the shape of q, k, v and the kind of pass."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose attention sets heads, KV heads, head_dim and dtype: a name of "
            "`longseq models`, or the path of a Hugging Face config.json. Options that are given "
            "override it. Default: none."
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None,
        typer.Option(
            help="Element type of q, k, v and the output. Default: that of --model; without one "
            "bfloat16 on cuda, else float32.",
            show_default=False,
        ),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(
            min=1, max=bounds.MAX_HEADS, help="Query heads. Default: 8, or those of --model."
        ),
    ] = None
    kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_HEADS,
            help="Key and value heads, a divisor of --heads. Default: as many as --heads, or those "
            "of --model.",
        ),
    ] = None
    head_dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_HEAD_DIM,
            help="Elements per head. Default: 64, or those of --model.",
        ),
    ] = None
    v_head_dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_HEAD_DIM,
            help="Elements per head of v and the output. Default: as --head-dim, or as --model.",
        ),
    ] = None
    batch: Annotated[
        int, typer.Option(min=1, max=bounds.MAX_BATCH, help="Sequences per batch.")
    ] = 1
    causal: Annotated[
        bool,
        typer.Option("--causal", help="Mask keys after the query's position: --mask causal."),
    ] = False
    mask: Annotated[
        str | None,
        typer.Option(
            help="Keys that a query sees: full, causal, sliding-window:4k, prefix:8k, documents:4k "
            "(packed, causal; or lengths with commas, or chatqa2), full-documents:4k. "
            "Default: full.",
            show_default=False,
        ),
    ] = None
    mode: Annotated[
        Literal["forward", "train", "decode"],
        typer.Option(
            help="Kind of pass. train: forward and backward. decode: new tokens against a KV cache."
        ),
    ] = "forward"
    new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_NEW_TOKENS,
            help="Tokens that a step of --mode decode adds, the last ones of the cache. "
            "Default: 1 with --mode decode.",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        Literal["all", "inputs", "nothing"],
        typer.Option(
            help="Tensors kept by a pass. all: as autograd keeps them. inputs: train by "
            "recomputation; only q, k, v are kept. nothing: outputs overwrite inputs (in place)."
        ),
    ] = "all"


def expand_options(command: Callable[..., int]) -> Callable[..., int]:
    """Replace each parameter of a command that is a dataclass by one option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        own = signature(groups[name]).parameters.values() if name in groups else [parameter]
        types = get_type_hints(groups.get(name, command), include_extras=True)
        parameters += [p.replace(annotation=types[p.name], kind=p.KEYWORD_ONLY) for p in own]

    @wraps(command)
    def expanded(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def split_names(text: str | None) -> list[str]:
    """Return the distinct names in a text with commas between them."""
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
