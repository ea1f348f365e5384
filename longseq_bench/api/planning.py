"""`longseq_bench.plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from collections.abc import Mapping
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
from longseq_bench.search.rates import RateModel

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
    model = _model(given, asked)
    budget = parse_memory_budget(asked["memory"]) if asked["memory"] else None
    tokens, unit = parse_target(asked["target"]), asked["gpus_per_node"]
    tp = asked["tp"]
    if (asked["world_size"] or tp) % tp:
        raise UserError(f"--tp {tp} does not divide --world-size {asked['world_size']}")
    gpu, reporter = asked["gpu"].lower(), make_reporter(progress)
    chosen = read_implementations(implementations, None)
    with machine.open_launcher(reporter, dict(chosen)) as (launcher, catalogue):
        whole_device = _device(gpu, profiles_file, catalogue, unit)
        device = whole_device.of_tensor_parallel(tp)
        has_bfloat16 = device.device == "cuda" and "bfloat16" in device.flops
        workload = build_workload(given, "bfloat16" if has_bfloat16 else "float32")
        device.rate(workload.dtype, workload.mode)  # a dtype without a rate is a mistake
        trials = [
            make_trial(
                implementation=name,
                options=values,
                workload=model.split(workload) if model else workload,
                device=device.device,
                world_size=(asked["world_size"] or unit or tp) // tp,
                memory_budget=budget or device.memory,
                repeats=0,
                keep=given.get("keep", "all"),
                source=catalogue.entry(name).hash,
            )
            for name, values in choose_options(catalogue, chosen, options or {})
        ]
        rest = (lambda one: model.memory(one).known) if model else None
        per_node = unit and unit // tp
        past = machine.past_records(Path("results")) if gpu == LOCAL_CPU else []
        rates = RateModel(device, past)
        with reporter.waiting("dry runs …"):
            _check_options(launcher, trials)
            results = [
                prediction.predict_best(one, launcher.dry_run, rates, tokens, per_node, rest)
                for one in trials
            ]
    return Plan(trials, results, whole_device, workload, tokens, model)


def _model(given: Mapping[str, Any], asked: Mapping[str, Any]) -> ModelPlan | None:
    """Return the model to plan for; None for one layer. Raises UserError for unused options."""
    shape, chunk = model_of(given), parse_target(asked["prefill_chunk"], "--prefill-chunk")
    modes = {"tp": None, "checkpoint": "train", "prefill_chunk": "decode"}
    whole = shape if shape and not given.get("layer") else None
    for name in [name for name in modes if name in given]:
        option = f"--{name.replace('_', '-')}"
        if whole is None:
            raise UserError(f"{option} is of a whole model; give --model, and no --layer")
        if modes[name] not in (None, given.get("mode")):
            raise UserError(f"{option} is of --mode {modes[name]}")
    if whole is None:
        return None
    return ModelPlan(whole, asked["sharding"], asked["tp"], asked["checkpoint"], chunk or 0)


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
            launcher.check([trial.at(CHECKED_TOKENS).replace(world_size=1)])
