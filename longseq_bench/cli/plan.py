"""`longseq plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from longseq_bench.cli import options
from longseq_bench.core.errors import UserError
from longseq_bench.core.units import format_bytes, format_tokens, parse_bytes

if TYPE_CHECKING:
    from longseq_bench.cli.plan_model import ModelPlan
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.hardware import Hardware
    from longseq_bench.core.model import OptionValue, Trial
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Accuracy, Prediction, RateModel

MAX_RANKS = 2**16  # largest world size to try for a target
DRY_RUN_LIMIT_S = 300.0
CHECKED_TOKENS = 2**17  # a length at which every valid combination of options is valid


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
            help="Number of ranks; each has a device. Default: 1, or a node with --gpus-per-node.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
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
    from longseq_bench.cli import predictions, session
    from longseq_bench.cli.plan_answer import answer_sentence, find_best
    from longseq_bench.cli.plan_model import ModelPlan
    from longseq_bench.core.hardware import LOCAL_CPU
    from longseq_bench.search.prediction import RateModel, find_accuracy

    if records and not records.is_dir():
        raise UserError(f"--records {records}: no such folder")
    past = session.past_records(records or Path("results"))
    accuracies = find_accuracy(past)
    if accuracy:
        return predictions.print_accuracy(accuracies, as_json)
    if not impl:
        raise UserError("--impl is missing; name an implementation of `longseq list`")
    found = workload.model_shape()
    model = ModelPlan(found, sharding) if found else None
    budget, tokens = parse_bytes(memory) if memory else None, options.parse_target(target)
    with session.open_launcher() as (launcher, catalogue):
        profile = _find_hardware(catalogue, gpu, hardware, gpus_per_node)
        chosen = options.parse_options(catalogue, impl, option)
        trials = _build_trials(chosen, workload, profile, world_size or gpus_per_node or 1, budget)
        rates = RateModel(profile, past if gpu.lower() == LOCAL_CPU else [])
        with session.console(stderr=True).status("dry runs …"):
            _check_options(launcher, trials)
            results = [_predict(one, launcher, rates, tokens, gpus_per_node or 1) for one in trials]
    answer = answer_sentence(results, profile, tokens, gpus_per_node is not None)
    _print(results, trials, profile, accuracies, answer, as_json, output, model)
    if sbatch:
        _write_sbatch(sbatch, find_best(results, tokens), profile, option or [])
    if tokens is not None:
        _check_target(results, trials, tokens, may_grow=bool(gpus_per_node) and world_size is None)
    return 0


def _build_trials(
    chosen: dict[str, dict[str, OptionValue]], workload: options.WorkloadOptions,
    profile: Hardware, world_size: int, budget: int | None,
) -> list[Trial]:  # fmt: skip
    """Return a trial of one token for each implementation with its options."""
    from longseq_bench.core.model import Trial
    from longseq_bench.core.own_functions import source_of

    has_bfloat16 = profile.device == "cuda" and "bfloat16" in profile.flops
    shape = workload.workload("bfloat16" if has_bfloat16 else "float32")
    profile.rate(shape.dtype, shape.mode)
    return [
        Trial(
            implementation=name, options=values, workload=shape, device=profile.device,
            world_size=world_size, memory_budget=budget or profile.memory, repeats=0,
            keep=workload.keep, source=source_of(name),
        )
        for name, values in chosen.items()
    ]  # fmt: skip


def _print(
    results: list[Prediction | str], trials: list[Trial], profile: Hardware,
    accuracies: list[Accuracy], answer: str, as_json: bool, output: str, model: ModelPlan | None,
) -> None:  # fmt: skip
    """Print the predictions on stdout: as JSON, as Markdown or for a terminal."""
    from longseq_bench.cli import predictions, session
    from longseq_bench.reports.render import markdown

    document = predictions.predictions_document(results, trials, profile, accuracies, answer, model)
    if output == "md" and not as_json:
        typer.echo(markdown.render(predictions.with_titles(document))["plan.md"], nl=False)
        return
    session.print_answer(
        as_json,
        lambda: predictions.predictions_json(results, trials, profile, accuracies, answer, model),
        lambda: document,
        "--json has it",
    )


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


def _check_options(launcher: Launcher, trials: list[Trial]) -> None:
    """Raise UserError for options that are wrong on one rank and on the given number of ranks.

    An implementation that only lacks support for the ranks or the length is a note of the result.
    """
    for trial in trials:
        checked = trial.at(CHECKED_TOKENS * trial.world_size)
        try:
            launcher.check([checked])
        except UserError:
            launcher.check([checked.replace(world_size=1)])


def _find_hardware(
    catalogue: Catalogue, name: str, file: Path | None, per_node: int | None
) -> Hardware:
    """Return the profile of that name, from the built-in ones and those of a file.

    per_node: devices of a node; None: those of the profile.
    """
    from longseq_bench.cli.session import hardware_here
    from longseq_bench.core.hardware import LOCAL_CPU, profile, profiles

    if name.lower() != LOCAL_CPU:
        found = profile(name, file)
    else:
        if file is not None:
            profiles(file)  # check the file
        found = hardware_here(catalogue, "cpu")
    return found.model_copy(update={"per_node": per_node}) if per_node else found


def _predict(
    trial: Trial, launcher: Launcher, rates: RateModel, tokens: int | None, unit: int
) -> Prediction | str:
    """Predict a trial at the target, on more ranks if it does not fit; else its longest length.

    unit: more ranks are added this many at a time.
    """
    from longseq_bench.search.memory_curve import add_outside
    from longseq_bench.search.prediction import find_longest_fit, find_smallest_world, predict
    from longseq_bench.search.strategy import CEILING_TOKENS

    of_device = rates.hardware.dry_run_options
    on_launcher = partial(launcher.dry_run, limit=DRY_RUN_LIMIT_S, **of_device)
    dry_run = add_outside(on_launcher, rates.hardware)
    if tokens is None:
        return find_longest_fit(trial, dry_run, rates, CEILING_TOKENS * trial.world_size)
    result = predict(trial.at(tokens), dry_run, rates)
    if isinstance(result, str) or result.fits:
        return result
    return find_smallest_world(trial.at(tokens), dry_run, rates, MAX_RANKS, unit) or result


def _check_target(
    results: list[Prediction | str], trials: list[Trial], tokens: int, may_grow: bool
) -> None:
    """Raise UserError if the target does not fit on the given ranks with any implementation.

    may_grow: the number of ranks is part of the answer, so more of them are no error.
    """
    from longseq_bench.search.prediction import Prediction

    predictions = [result for result in results if isinstance(result, Prediction)]
    if not predictions:
        reason = results[0]
        raise UserError(f"{format_tokens(tokens)} tokens: nothing could be predicted; {reason}")
    ranks = trials[0].world_size
    fitting = [prediction for prediction in predictions if prediction.fits]
    if any(may_grow or prediction.trial.world_size == ranks for prediction in fitting):
        return
    budget = format_bytes(trials[0].memory_budget or 0)
    problem = f"{format_tokens(tokens)} tokens don't fit in {budget} on {ranks} rank(s)"
    if not fitting:
        max_ranks = max(ranks, MAX_RANKS)
        raise UserError(f"{problem}; by prediction, up to {max_ranks:,} ranks are not enough")
    best = min(fitting, key=lambda prediction: prediction.trial.world_size)
    raise UserError(
        f"{problem}; {best.trial.implementation} fits them with "
        f"--world-size {best.trial.world_size}"
    )
