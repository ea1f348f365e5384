"""Command-line options that several commands share, and the checks of their values."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.model import OptionValue

MOST_TOKENS = 2**40


class DTypeName(StrEnum):
    """Element types, each with a short name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ModeName(StrEnum):
    """Kinds of pass."""

    forward = "forward"
    train = "train"


class KeepName(StrEnum):
    """Tensors that a pass keeps."""

    all = "all"
    inputs = "inputs"
    nothing = "nothing"


class AllocatorName(StrEnum):
    """Settings of CUDA's caching allocator."""

    default = "default"
    expandable = "expandable"


class DeviceName(StrEnum):
    """Kinds of device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Implementations = Annotated[
    list[str],
    typer.Option(
        "--impl", help="Implementation to run (repeatable); `longseq list` names them. Required."
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
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        help="Memory that a rank may allocate, in bytes: 7.9GiB, 512MiB. Default: 80 % of what is "
        "free, shared by the ranks of a host."
    ),
]
TimeBudget = Annotated[
    str | None, typer.Option(help="Time limit of one pass, in seconds: 60s, 2min. Default: 10s.")
]
DType = Annotated[
    DTypeName | None,
    typer.Option(
        help="Element type of q, k, v and the output. Default: bfloat16 on cuda, else float32.",
        show_default=False,
    ),
]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[
    int | None,
    typer.Option(help="Key and value heads, a divisor of --heads. Default: as many as --heads."),
]
HeadDim = Annotated[int, typer.Option(help="Elements per head.")]
Batch = Annotated[int, typer.Option(help="Sequences per batch.")]
Causal = Annotated[
    bool, typer.Option("--causal", help="Mask keys after the query's position. Default: no mask.")
]
Mode = Annotated[ModeName, typer.Option(help="Kind of pass; train: forward and backward.")]
Keep = Annotated[
    KeepName,
    typer.Option(
        help="Tensors kept by a pass. all: as autograd keeps them. inputs: train by "
        "recomputation, keeping q, k, v alone. nothing: outputs overwrite inputs (in place)."
    ),
]
Device = Annotated[
    DeviceName,
    typer.Option(help="Kind of device; auto: cuda where it works with one per rank, else cpu."),
]
Allocator = Annotated[
    AllocatorName,
    typer.Option(help="Allocator of a cuda device; expandable: segments that grow."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads per rank. Default: the cores, shared by the ranks."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for records and report. Default: a new one under results/."),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document on stdout, progress on stderr. Default: a table."
    ),
]


def check_keep(keep: KeepName, mode: ModeName) -> None:
    """Raise UserError for a combination of --keep and --mode that no trial can have."""
    from longseq_bench.core.errors import UserError

    if keep is KeepName.inputs and mode is ModeName.forward:
        raise UserError("--keep inputs is for --mode train; a forward alone keeps nothing more")


def parse_target(name: str, text: str | None) -> int | None:
    """Return the tokens of an option, if given.

    Raises UserError for an unreadable number, or more tokens than any machine could hold.
    """
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import format_tokens, parse_tokens

    tokens = parse_tokens(text) if text else None
    if tokens is not None and tokens > MOST_TOKENS:
        raise UserError(f"{name} {text} is more than {format_tokens(MOST_TOKENS)}, the most")
    return tokens


def workload_fields(
    *, kv_heads: int | None, dtype: DTypeName | None, mode: ModeName, **shape: Any
) -> dict[str, Any]:
    """Return the checked fields of a workload of one token; no dtype if none is given.

    Raises UserError with the first mistake.
    """
    from pydantic import ValidationError

    from longseq_bench.core.errors import UserError
    from longseq_bench.core.model import Workload, canonical_dtype

    if kv_heads == 0:
        raise UserError("--kv-heads: 0 heads can't hold keys; leave it out for as many as heads")
    shared = shape["heads"] if kv_heads is None else kv_heads
    fields = {"seq_len": 1, **shape, "kv_heads": shared, "mode": mode.value}
    if dtype is not None:
        fields["dtype"] = canonical_dtype(dtype.value)
    try:
        Workload(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + "-".join(str(p) for p in first["loc"]).replace("_", "-")
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{name}: {message}" if first["loc"] else message) from None
    return fields


def parse_options(
    catalogue: Catalogue, names: list[str], assignments: list[str]
) -> dict[str, dict[str, OptionValue]]:
    """Return all options of each implementation named.

    An option goes to every implementation that has it. Raises UserError for one that none has.
    """
    from longseq_bench.core.options import parse_assignments, unknown_option

    given = parse_assignments(assignments)
    known = {n: {s.name for s in catalogue.entry(n, "--impl").options} for n in names}
    for name in given:
        if not any(name in options for options in known.values()):
            every = {o for options in known.values() for o in options}
            raise unknown_option(name, given[name], every, ", ".join(names))
    return {
        name: catalogue.options(name, {k: v for k, v in given.items() if k in known[name]})
        for name in dict.fromkeys(names)
    }
