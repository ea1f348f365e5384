"""`longseq plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from longseq_bench.cli import options
from longseq_bench.core import bounds
from longseq_bench.core.errors import UserError
from longseq_bench.core.settings import SHAPE


@options.accept(SHAPE)
def plan(
    *,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation to plan for (repeatable): a name of `longseq list`, or a "
            "function of your own as path/to/file.py:function or module:function. Required, "
            "except with --accuracy.",
        ),
    ] = None,
    option: options.ImplementationOptions = None,
    gpu: Annotated[
        str,
        typer.Option(help="Hardware profile by name, such as h100; cpu: this machine's processor."),
    ] = "cpu",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the device that a rank may use, in bytes: 139GiB; tensors get what the "
            "CUDA context, cuBLAS and NCCL leave. Default: all memory of the profile."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Tokens to plan for, of all ranks: 10M. Default: as many as fit."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_RANKS,
            help="Number of ranks; each has a device. Default: 1, or a node with --gpus-per-node.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=bounds.MAX_RANKS,
            help="Devices of a node; more ranks are proposed in whole nodes. Default: that of the "
            "profile, and any number of ranks.",
        ),
    ] = None,
    sharding: Annotated[
        Literal["none", "zero1", "zero2", "zero3"],
        typer.Option(
            help="With --model: what is split over all ranks. zero1: optimizer state; zero2: also "
            "gradients; zero3: also weights; none: nothing."
        ),
    ] = "zero3",
    hardware: Annotated[
        Path | None,
        typer.Option(help="YAML file with more hardware profiles. Default: built-in ones only."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Folder of records for rates and past errors. Default: results."),
    ] = None,
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy", help="Print the errors of past predictions and exit. Default: predict."
        ),
    ] = False,
    output: Annotated[
        Literal["terminal", "md"],
        typer.Option("--format", help="md: print the answer as Markdown."),
    ] = "terminal",
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Predict the longest sequence, its memory, time and communication. No trial is run.

    Memory comes from a dry run of the implementation without data, for one rank of the world. Time
    comes from records of this machine if there are any, else from a profile of the hardware.
    """
    from longseq_bench.api import planning
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments
    from longseq_bench.reports.render import markdown

    if accuracy:
        return _print_accuracy(records, as_json)
    if not impl:
        raise UserError("--impl is missing; name an implementation of `longseq list`")
    found = planning.plan(
        impl,
        options=parse_assignments(option or []),
        gpu=gpu,
        memory=memory,
        target=target,
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        sharding=sharding,
        hardware=hardware,
        records=records,
        progress=session.ConsoleReporter(),
        **given,
    )
    if output == "md" and not as_json:
        print(markdown.render(replace(found.table(), title="Plan"))["plan.md"], end="")
    else:
        session.print_answer(as_json, found.as_json, found.table, "--json has it")
    found.check_target(may_grow=bool(gpus_per_node) and world_size is None)
    return 0


def _print_accuracy(folder: Path | None, as_json: bool) -> int:
    """Print the errors of past predictions. Raises UserError if no record has a prediction."""
    from longseq_bench.api.machine import past_records
    from longseq_bench.api.plan_document import accuracy_document
    from longseq_bench.cli.session import print_answer
    from longseq_bench.search.prediction import find_accuracy

    if folder and not folder.is_dir():
        raise UserError(f"--records {folder}: no such folder")
    accuracies = find_accuracy(past_records(folder or Path("results")))
    if not accuracies:
        raise UserError(
            "no record of this machine has a prediction; run longseq maxlen or sweep first, or "
            "give their folder with --records"
        )
    return print_answer(
        as_json,
        lambda: {"schema": 1, "accuracy": [accuracy._asdict() for accuracy in accuracies]},
        lambda: accuracy_document(accuracies),
        "--json has it",
    )
