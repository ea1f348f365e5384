"""`longseq_bench.plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longseq_bench.api import machine
from longseq_bench.api.implementations import (
    Implementations,
    Options,
    choose_options,
    read_implementations,
)
from longseq_bench.api.length_search import parse_target
from longseq_bench.api.plan_document import (
    ModelPlan,
    answer_sentence,
    find_best,
    predictions_document,
    predictions_json,
)
from longseq_bench.api.progress import Reporter, make_reporter
from longseq_bench.api.results import Printed
from longseq_bench.api.workloads import accept, build_workload, make_trial, model_of
from longseq_bench.core.bounds import MAX_RANKS
from longseq_bench.core.errors import UserError
from longseq_bench.core.hardware import LOCAL_CPU, Hardware, profile, profiles
from longseq_bench.core.model import Trial
from longseq_bench.core.settings import SHAPE
from longseq_bench.core.units import format_bytes, format_tokens, parse_memory_budget
from longseq_bench.launchers.base import Launcher
from longseq_bench.search.memory_curve import add_outside
from longseq_bench.search.model_memory import Sharding
from longseq_bench.search.prediction import (
    Accuracy,
    Prediction,
    RateModel,
    find_accuracy,
    find_longest_fit,
    find_smallest_world,
    predict,
)
from longseq_bench.search.strategy import CEILING_TOKENS

if TYPE_CHECKING:
    import pandas

    from longseq_bench.reports.document import Document

DRY_RUN_LIMIT_S = 300.0
CHECKED_TOKENS = 2**17  # a length at which every valid combination of options is valid


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Printed):
    """Predictions for some implementations. Nothing was run.

    answer: a sentence: how many devices, which implementation, and why.
    trials: what was asked, one for each implementation.
    results: for each trial a prediction, or the reason why there is none.
    hardware: the profile of the devices.  target: tokens to plan for; None: as many as fit.
    accuracies: errors of past predictions on this machine.  model: the model of the shape.
    """

    answer: str
    trials: Sequence[Trial]
    results: Sequence[Prediction | str]
    hardware: Hardware
    target: int | None = None
    accuracies: Sequence[Accuracy] = ()
    model: ModelPlan | None = None

    @property
    def predictions(self) -> list[Prediction]:
        """The predictions, without the implementations that have none."""
        return [result for result in self.results if isinstance(result, Prediction)]

    @property
    def best(self) -> Prediction | None:
        """The prediction with the fewest ranks for a target, else with most tokens."""
        return find_best(self.results, self.target)

    def as_json(self) -> dict[str, Any]:
        """Return the document that `longseq plan --json` prints, in SI units."""
        return predictions_json(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row per implementation; columns as in the JSON."""
        import pandas

        return pandas.DataFrame(self.as_json()["results"])

    def table(self) -> Document:
        """Return the table that the command line prints."""
        return predictions_document(self)

    def check_target(self, may_grow: bool = False) -> None:
        """Raise UserError if the target does not fit on the given ranks with any implementation.

        may_grow: the number of ranks is part of the answer, so more of them are no error.
        """
        if self.target is None:
            return
        tokens, trials, predictions = self.target, self.trials, self.predictions
        if not predictions:
            reason = self.results[0]
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


@accept(SHAPE)
def plan(
    implementations: Implementations,
    *,
    options: Options | None = None,
    gpu: str = LOCAL_CPU,
    memory: str | int | None = None,
    target: str | int | None = None,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    sharding: Sharding = "zero3",
    hardware: str | Path | None = None,
    records: str | Path | None = None,
    progress: bool | Reporter = True,
    **given: Any,
) -> Plan:
    """Predict the longest sequence, its memory, time and communication. No trial is run.

    The keywords have the names and meanings of the options of `longseq plan`.

    Args:
        implementations: A name, a function, a pair (either, {option: value}), or a list of these.
        options: Options for every implementation that has them.
        gpu: Hardware profile by name, such as h100; cpu: this machine's processor.
        memory: Bytes of the device that a rank may use: "139GiB"; default: all of the profile.
        target: Tokens to plan for, of all ranks: "10M"; default: as many as fit.
        world_size: Ranks, a device each; default: 1, or a node with gpus_per_node.
        gpus_per_node: Devices of a node; more ranks are proposed in whole nodes.
        sharding: With model: none, zero1, zero2 or zero3.
        hardware: YAML file with more hardware profiles.
        records: Folder of records for rates and past errors; default: results.
        progress: False prints nothing.
        **given: Shape of q, k, v and the kind of pass.

    Raises:
        UserError: a value that can't be used; the sentence names it. A target that does not fit is
            no error: see Plan.check_target.
        LauncherError: processes can't be started.
    """
    reporter, folder = make_reporter(progress), Path(records) if records else None
    if folder and not folder.is_dir():
        raise UserError(f"--records {folder}: no such folder")
    past = machine.past_records(folder or Path("results"))
    found = model_of(given)
    model = ModelPlan(found, sharding) if found else None
    budget = parse_memory_budget(memory) if memory else None
    tokens = parse_target(target)
    chosen = read_implementations(implementations, None)
    with machine.open_launcher(reporter, [name for name, _ in chosen]) as (launcher, catalogue):
        profiles_file = Path(hardware) if hardware else None
        if gpu.lower() != LOCAL_CPU:
            device = profile(gpu, profiles_file)
        else:
            profiles(profiles_file)  # a mistake in the file is one for any device
            device = machine.hardware_here(catalogue, "cpu")
        if gpus_per_node:
            device = device.model_copy(update={"per_node": gpus_per_node})
        has_bfloat16 = device.device == "cuda" and "bfloat16" in device.flops
        shape = build_workload(given, "bfloat16" if has_bfloat16 else "float32")
        device.rate(shape.dtype, shape.mode)  # a dtype without a rate is a mistake
        trials = [
            make_trial(
                implementation=name,
                options=values,
                workload=shape,
                device=device.device,
                world_size=world_size or gpus_per_node or 1,
                memory_budget=budget or device.memory,
                repeats=0,
                keep=given.get("keep", "all"),
                source=catalogue.entry(name).hash,
            )
            for name, values in choose_options(catalogue, chosen, options or {})
        ]
        rates = RateModel(device, past if gpu.lower() == LOCAL_CPU else [])
        with reporter.waiting("dry runs …"):
            _check_options(launcher, trials)
            results = [_predict(one, launcher, rates, tokens, gpus_per_node or 1) for one in trials]
    answer = answer_sentence(results, device, tokens, gpus_per_node is not None)
    return Plan(answer, trials, results, device, tokens, find_accuracy(past), model)


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


def _predict(
    trial: Trial, launcher: Launcher, rates: RateModel, tokens: int | None, unit: int
) -> Prediction | str:
    """Predict a trial at the target, on more ranks if it does not fit; else its longest length.

    unit: more ranks are added this many at a time.
    """
    of_device = rates.hardware.dry_run_options
    on_launcher = partial(launcher.dry_run, limit=DRY_RUN_LIMIT_S, **of_device)
    dry_run = add_outside(on_launcher, rates.hardware)
    if tokens is None:
        return find_longest_fit(trial, dry_run, rates, CEILING_TOKENS * trial.world_size)
    result = predict(trial.at(tokens), dry_run, rates)
    if isinstance(result, str) or result.fits:
        return result
    return find_smallest_world(trial.at(tokens), dry_run, rates, MAX_RANKS, unit) or result
