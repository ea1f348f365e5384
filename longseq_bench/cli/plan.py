"""`longseq plan`: how long a sequence goes on hardware that need not be here, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longseq_bench.cli import options as asked

if TYPE_CHECKING:
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.hardware import Hardware
    from longseq_bench.core.model import Keep, Record, Trial
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Pace, Prediction

MOST_RANKS = 2**16
"""No larger world is looked at for a target."""

WALK_LIMIT_S = 300.0
TOKENS_CHECKED = 2**17
"""A length at which all options make sense that make any."""


def plan(
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementation; give it again for more.")
    ] = None,
    option: asked.Options = None,
    gpu: Annotated[
        str, typer.Option(help="A profile of hardware; cpu: this machine's processor.")
    ] = "cpu",
    memory: Annotated[
        str | None, typer.Option(help="A rank's: 139GiB. Default: all that the profile has.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Tokens to plan for: 10M. Default: as many as fit.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks, a device each.")] = 1,
    dtype: Annotated[asked.DTypeName, typer.Option()] = asked.DTypeName.float32,
    heads: asked.Heads = 8,
    kv_heads: asked.KvHeads = None,
    head_dim: Annotated[int, typer.Option()] = 64,
    batch: Annotated[int, typer.Option()] = 1,
    causal: asked.Causal = False,
    mode: asked.Mode = asked.ModeName.forward,
    keep: asked.Keep = asked.KeepName.all,
    hardware: Annotated[Path | None, typer.Option(help="A YAML file of your own profiles.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Folder whose records tell rates and errors. Default: results."),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="How far past predictions were off, and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Predict the longest sequence, its memory, its time and its communication. Nothing is run.

    Memory comes from walking through the implementation itself without data, for one rank of the
    world; time from a profile of the hardware, or from records of this machine where it has any.
    """
    from longseq_bench.cli.session import past_records
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import parse_bytes

    if records and not records.is_dir():
        raise UserError(f"--records {records}: there is no such folder")
    past = past_records(records or Path("results"))
    if accuracy:
        return _show_accuracy(past, as_json)
    if not impl:
        raise UserError("--impl: name an implementation to plan for; longseq list names them")
    asked.check_keep(keep, mode)
    shape = asked.workload(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, causal=causal,
        mode=mode,
    )  # fmt: skip
    wanted = _Asked(
        impl, option or [], gpu, hardware, parse_bytes(memory) if memory else None,
        asked.tokens("--target", target), world_size, keep.value,
    )  # fmt: skip
    return _predict_all(wanted, shape, past, as_json)


@dataclass(frozen=True)
class _Asked:
    """What is to be planned for, and on what."""

    names: list[str]
    assignments: list[str]
    gpu: str
    own: Path | None
    memory: int | None
    target: int | None
    ranks: int
    keep: Keep


def _predict_all(wanted: _Asked, shape: dict[str, Any], past: list[Record], as_json: bool) -> int:
    from longseq_bench.cli.session import console, make_launcher
    from longseq_bench.core.hardware import HERE
    from longseq_bench.search.prediction import Pace

    with make_launcher() as launcher, console(stderr=True).status("walking through it …"):
        catalogue = launcher.catalogue()
        there = _hardware(catalogue, wanted.gpu, wanted.own)
        there.rate(shape["dtype"], shape["mode"])
        trials = _trials(catalogue, wanted, there, shape)
        _check(launcher, trials)
        pace = Pace(there, past if wanted.gpu.lower() == HERE else [])
        made = [_predict(trial, launcher, pace, wanted.target) for trial in trials]
    _show(made, trials, there, past, as_json)
    if wanted.target is not None:
        _refuse_what_fits_nowhere(made, trials, wanted.target)
    return 0


def _check(launcher: Launcher, trials: list[Trial]) -> None:
    """Raises UserError for options that are wrong on one rank and on those asked for: what a world
    or a length can't be is said beside what can."""
    from longseq_bench.core.errors import UserError

    for trial in trials:
        there = trial.at(TOKENS_CHECKED * trial.world_size)
        try:
            launcher.check([there])
        except UserError:
            launcher.check([there.but(world_size=1)])


def _hardware(catalogue: Catalogue, name: str, own: Path | None) -> Hardware:
    from longseq_bench.cli.session import hardware_here
    from longseq_bench.core.hardware import HERE, profile, profiles

    if name.lower() != HERE:
        return profile(name, own)
    if own is not None:
        profiles(own)
    return hardware_here(catalogue, "cpu")


def _trials(
    catalogue: Catalogue, wanted: _Asked, there: Hardware, shape: dict[str, Any]
) -> list[Trial]:
    from longseq_bench.core.model import Trial

    return [
        Trial(
            implementation=name, options=options, workload=shape, device=there.device,
            world_size=wanted.ranks, memory_budget=wanted.memory or there.memory, repeats=0,
            keep=wanted.keep,
        )
        for name, options in asked.chosen(catalogue, wanted.names, wanted.assignments).items()
    ]  # fmt: skip


def _predict(trial: Trial, launcher: Launcher, pace: Pace, tokens: int | None) -> Prediction | str:
    from functools import partial

    from longseq_bench.search.prediction import longest_fit, predicted, smallest_world
    from longseq_bench.search.strategy import CEILING_TOKENS

    foresee = partial(launcher.dry_run, limit=WALK_LIMIT_S)
    if tokens is None:
        return longest_fit(trial, foresee, pace, CEILING_TOKENS * trial.world_size)
    made = predicted(trial.at(tokens), foresee, pace)
    if isinstance(made, str) or made.fits:
        return made
    return smallest_world(trial.at(tokens), foresee, pace, MOST_RANKS) or made


def _refuse_what_fits_nowhere(
    made: list[Prediction | str], trials: list[Trial], tokens: int
) -> None:
    """Raises UserError where a target fits with no implementation in the world asked for."""
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import format_bytes, format_tokens
    from longseq_bench.search.prediction import Prediction

    known = [one for one in made if isinstance(one, Prediction)]
    if not known:
        raise UserError(f"{format_tokens(tokens)} tokens: nothing could be predicted; {made[0]}")
    asked = trials[0].world_size
    if any(one.fits and one.trial.world_size == asked for one in known):
        return
    fitting = [one for one in known if one.fits]
    budget = format_bytes(trials[0].memory_budget or 0)
    said = f"{format_tokens(tokens)} tokens don't fit in {budget} on {asked} rank(s)"
    if not fitting:
        most = max(asked, MOST_RANKS)
        raise UserError(f"{said}; no world of up to {most:,} ranks was predicted to hold them")
    best = min(fitting, key=lambda one: one.trial.world_size)
    raise UserError(
        f"{said}; {best.trial.implementation} fits them with --world-size {best.trial.world_size}"
    )


def _show(
    made: list[Prediction | str], trials: list[Trial], there: Hardware, past: list[Record],
    as_json: bool,
) -> None:  # fmt: skip
    from longseq_bench.cli.predictions import predictions_document, predictions_json
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.reports.render.terminal import print_document
    from longseq_bench.search.prediction import accuracy

    known = accuracy(past)
    if as_json:
        print_json(predictions_json(made, trials, there, known))
    else:
        document = predictions_document(made, trials, there, known)
        print_document(document, console(), "--json has it")


def _show_accuracy(past: list[Record], as_json: bool) -> int:
    from longseq_bench.cli.predictions import accuracy_document, accuracy_json
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.core.errors import UserError
    from longseq_bench.reports.render.terminal import print_document
    from longseq_bench.search.prediction import accuracy

    known = accuracy(past)
    if not known:
        raise UserError(
            "no record of this machine keeps what was predicted for it; run longseq maxlen or "
            "sweep, or name their folder with --records"
        )
    if as_json:
        print_json({"schema": 1, "accuracy": accuracy_json(known)})
    else:
        print_document(accuracy_document(known), console(), "--json has it")
    return 0
