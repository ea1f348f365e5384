"""`longseq_bench.plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longseq_bench.api import machine
from longseq_bench.api.arguments import PLAN
from longseq_bench.api.implementations import (
    Implementations,
    Options,
    choose_options,
    read_implementations,
)
from longseq_bench.api.length_search import parse_target
from longseq_bench.api.plan_document import Plan
from longseq_bench.api.progress import Reporter, make_reporter
from longseq_bench.api.workloads import accept, build_workload, make_trial, model_of
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError
from longseq_bench.core.hardware import LOCAL_CPU, Hardware, profile, profiles
from longseq_bench.core.model import Trial
from longseq_bench.core.settings import SHAPE
from longseq_bench.core.units import parse_memory_budget
from longseq_bench.launchers.base import Launcher
from longseq_bench.search import prediction
from longseq_bench.search.model_memory import ModelPlan

CHECKED_TOKENS = 2**17  # a length at which every valid combination of options is valid


@accept(PLAN | SHAPE)
def plan(
    implementations: Implementations,
    *,
    options: Options | None = None,
    progress: bool | Reporter = True,
    **given: Any,
) -> Plan:
    """Predict the longest sequence, its memory, time and communication. No trial is run.

    The keywords have the names and meanings of the options of `longseq plan`.

    Args:
        implementations: A name, a function, a pair (either, {option: value}), or a list of these.
        options: Options for every implementation that has them.
        progress: False prints nothing.
        **given: What to plan for; shape of q, k, v and the kind of pass.

    Raises:
        UserError: a value that can't be used; the sentence names it. A target that does not fit is
            no error: see Plan.check_target.
        LauncherError: processes can't be started.
    """
    asked = {name: setting.default for name, setting in PLAN.items()} | given
    profiles_file = Path(asked["hardware"]) if asked["hardware"] else None
    shape = model_of(given)
    model = ModelPlan(shape, asked["sharding"]) if shape and not given.get("layer") else None
    budget = parse_memory_budget(asked["memory"]) if asked["memory"] else None
    tokens, unit = parse_target(asked["target"]), asked["gpus_per_node"]
    gpu, reporter = asked["gpu"].lower(), make_reporter(progress)
    chosen = read_implementations(implementations, None)
    with machine.open_launcher(reporter, dict(chosen)) as (launcher, catalogue):
        device = _device(gpu, profiles_file, catalogue, unit)
        has_bfloat16 = device.device == "cuda" and "bfloat16" in device.flops
        workload = build_workload(given, "bfloat16" if has_bfloat16 else "float32")
        device.rate(workload.dtype, workload.mode)  # a dtype without a rate is a mistake
        trials = [
            make_trial(
                implementation=name,
                options=values,
                workload=workload,
                device=device.device,
                world_size=asked["world_size"] or unit or 1,
                memory_budget=budget or device.memory,
                repeats=0,
                keep=given.get("keep", "all"),
                source=catalogue.entry(name).hash,
            )
            for name, values in choose_options(catalogue, chosen, options or {})
        ]
        rest = (lambda one: model.memory(one).known) if model else None
        past = machine.past_records(Path("results")) if gpu == LOCAL_CPU else []
        rates = prediction.RateModel(device, past)
        with reporter.waiting("dry runs …"):
            _check_options(launcher, trials)
            results = [
                prediction.predict_best(one, launcher.dry_run, rates, tokens, unit or 1, rest)
                for one in trials
            ]
    return Plan(trials, results, device, tokens, model)


def _device(gpu: str, file: Path | None, catalogue: Catalogue, per_node: int | None) -> Hardware:
    """Return the profile of a GPU, or that of this machine's CPU. Raises UserError."""
    if gpu == LOCAL_CPU:
        profiles(file)  # a mistake in the file is one for any device
        device = machine.hardware_here(catalogue, "cpu")
    else:
        device = profile(gpu, file)
    return device.model_copy(update={"per_node": per_node}) if per_node else device


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
