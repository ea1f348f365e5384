"""`longseq plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from longseq_bench.cli import options
from longseq_bench.core import bounds
from longseq_bench.core.errors import UserError

if TYPE_CHECKING:
    from longseq_bench.api.planning import Plan
    from longseq_bench.core.hardware import Hardware
    from longseq_bench.search.prediction import Prediction


@options.expand_options
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
    workload: options.WorkloadOptions,
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
    sbatch: Annotated[
        Path | None,
        typer.Option(
            help="File to write with a Slurm job that checks the answer. Default: none.",
        ),
    ] = None,
    output: Annotated[
        Literal["terminal", "md"],
        typer.Option("--format", help="md: print the answer as Markdown."),
    ] = "terminal",
    as_json: options.AsJson = False,
) -> int:
    """Predict the longest sequence, its memory, time and communication. No trial is run.

    Memory comes from a dry run of the implementation without data, for one rank of the world. Time
    comes from records of this machine if there are any, else from a profile of the hardware.
    """
    from longseq_bench.api import planning
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments

    if accuracy:
        return _print_accuracy(records, as_json)
    if not impl:
        raise UserError("--impl is missing; name an implementation of `longseq list`")
    found = planning.plan(
        impl, options=parse_assignments(option or []), gpu=gpu, memory=memory, target=target,
        world_size=world_size, gpus_per_node=gpus_per_node, sharding=sharding, hardware=hardware,
        records=records, progress=session.ConsoleReporter(), **asdict(workload),
    )  # fmt: skip
    _print(found, as_json, output)
    if sbatch:
        _write_sbatch(sbatch, found.best, found.hardware, option or [])
    found.check_target(may_grow=bool(gpus_per_node) and world_size is None)
    return 0


def _print_accuracy(folder: Path | None, as_json: bool) -> int:
    """Print the errors of past predictions. Raises UserError if no record has a prediction."""
    from longseq_bench.api.machine import past_records
    from longseq_bench.api.plan_document import accuracy_document, accuracy_json
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
        lambda: accuracy_json(accuracies),
        lambda: accuracy_document(accuracies),
        "--json has it",
    )


def _print(found: Plan, as_json: bool, output: str) -> None:
    """Print the predictions on stdout: as JSON, as Markdown or for a terminal."""
    from longseq_bench.api.plan_document import with_titles
    from longseq_bench.cli import session
    from longseq_bench.reports.render import markdown

    if output == "md" and not as_json:
        print(markdown.render(with_titles(found.table()))["plan.md"], end="")
        return
    session.print_answer(as_json, found.as_json, found.table, "--json has it")


def _write_sbatch(
    path: Path, best: Prediction | None, profile: Hardware, assignments: list[str]
) -> None:
    """Write the job that checks the best prediction. Raises UserError if it can't be written."""
    from longseq_bench.cli.sbatch import format_sbatch

    if best is None:
        raise UserError(f"--sbatch {path}: nothing fits, so there is no job to write")
    own = [one for one in assignments if one.partition("=")[0] in best.trial.options]
    try:
        path.write_text(format_sbatch(best, profile.per_node, own), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--sbatch {path} can't be written: {error.strerror}") from None
