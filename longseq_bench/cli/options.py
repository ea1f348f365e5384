"""What commands ask for alike: a workload's shape, how it is run, implementations with options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.model import OptionValue


class DTypeName(StrEnum):
    """Element types, each with a short name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ModeName(StrEnum):
    """What a pass is."""

    forward = "forward"
    train = "train"


class KeepName(StrEnum):
    """What a pass leaves alone."""

    all = "all"
    inputs = "inputs"
    nothing = "nothing"


class AllocatorName(StrEnum):
    """Settings of CUDA's caching allocator."""

    default = "default"
    expandable = "expandable"


class DeviceName(StrEnum):
    """Kinds of device."""

    cpu = "cpu"
    cuda = "cuda"


Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of theirs, NAME=VALUE; more than once."),
]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[
    int | None, typer.Option(help="Key and value heads. Default: as many as heads.")
]
Mode = Annotated[ModeName, typer.Option(help="train: forward and backward.")]
Causal = Annotated[bool, typer.Option("--causal")]
Keep = Annotated[
    KeepName,
    typer.Option(
        help="inputs: train without what forward leaves, computed again. nothing: results go over "
        "inputs that are spent, below the floor."
    ),
]
Allocator = Annotated[AllocatorName, typer.Option(help="Of cuda; expandable: segments that grow.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads a rank; else ranks share the cores.")
]
TimeBudget = Annotated[
    str | None, typer.Option(help="Time limit of one pass: 60s, 2min. Default: 10s.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for records and report. Default: a new one under results/."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, progress on stderr.")
]


def check_keep(keep: KeepName, mode: ModeName) -> None:
    """Raises UserError where no trial could be run so."""
    from longseq_bench.core.errors import UserError

    if keep is KeepName.inputs and mode is ModeName.forward:
        raise UserError("--keep inputs is for --mode train; a forward alone keeps nothing more")


def tokens(name: str, text: str | None) -> int | None:
    """Tokens of an option, if given. Raises UserError for more than any machine could hold."""
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import format_tokens, parse_tokens

    found = parse_tokens(text) if text else None
    if found is not None and found > MOST_TOKENS:
        raise UserError(f"{name} {text} is more than {format_tokens(MOST_TOKENS)}, the most")
    return found


MOST_TOKENS = 2**40


def workload(
    *, kv_heads: int | None, dtype: DTypeName, mode: ModeName, **shape: Any
) -> dict[str, Any]:
    """The fields of a workload of one token, checked. Raises UserError with the first fault."""
    from pydantic import ValidationError

    from longseq_bench.core.errors import UserError
    from longseq_bench.core.model import Workload, canonical_dtype

    if kv_heads == 0:
        raise UserError("--kv-heads: 0 heads can't hold keys; leave it out for as many as heads")
    shared = shape["heads"] if kv_heads is None else kv_heads
    fields = {**shape, "kv_heads": shared, "dtype": canonical_dtype(dtype.value)}
    fields["mode"] = mode.value
    try:
        Workload(seq_len=1, **fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + "-".join(str(p) for p in first["loc"]).replace("_", "-")
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{name}: {said}" if first["loc"] else said) from None
    return {"seq_len": 1, **fields}


def chosen(
    catalogue: Catalogue, names: list[str], assignments: list[str]
) -> dict[str, dict[str, OptionValue]]:
    """All options of each implementation named. An option goes to every one that has it; raises
    UserError for one that none has."""
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
