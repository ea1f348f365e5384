"""What `plan` prints: predictions, labelled so, with how far past ones were off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from longseq_bench.analysis.labels import KEEP_WORDS, settings_suffix
from longseq_bench.cli.tables import NONE, Column, Fitted
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.model import Trial
from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from longseq_bench.search.prediction import Accuracy, Prediction

_SAID = (
    "[dim]predicted, nothing was run · tokens: of all ranks together · peak, sent: of the fullest "
    "rank, a pass · exposed: what communication adds to the pass · past error: of memory and of "
    "time, predicted over measured on this machine, less one, median[/dim]"
)


def predictions_table(
    made: Sequence[Prediction | str], trials: Sequence[Trial], there: Hardware,
    known: Sequence[Accuracy],
) -> RenderableType:  # fmt: skip
    """A row an implementation, and sentences on what is missing."""
    notes, rows = [], []
    for one, trial in zip(made, trials, strict=True):
        name = _name(trial)
        if isinstance(one, str):
            notes.append(f"{name}: {one}")
            continue
        rows.append({"label": name, "one": one})
        notes += _notes(one, name, trial)
    parts: list[RenderableType] = [_heading(trials[0], there)]
    parts += (
        [Fitted(rows, _columns(known), "--json has it", label=itemgetter("label")), ""]
        if rows
        else []
    )
    parts += [escape(note) for note in dict.fromkeys(notes)]
    return Group(*parts, _SAID)


def predictions_json(
    made: Sequence[Prediction | str], trials: Sequence[Trial], there: Hardware,
    known: Sequence[Accuracy],
) -> dict[str, Any]:  # fmt: skip
    """The same as data, SI units."""
    return {
        "schema": 1,
        "predicted": True,
        "hardware": there.model_dump(mode="json"),
        "results": [_row(one, trial) for one, trial in zip(made, trials, strict=True)],
        "accuracy": accuracy_json(known),
    }


def accuracy_table(known: Sequence[Accuracy]) -> RenderableType:
    """Past predictions on this machine, by implementation, mode and ranks."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("past predictions", no_wrap=True)
    for heading in ("mode", "dtype", "ranks", "runs", "memory", "farthest", "time", "farthest",
                    "missed"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for one in known:
        records = max(len(one.memory), len(one.time))
        table.add_row(
            escape(_kind_name(one)), one.mode, one.dtype, str(one.world_size), str(records),
            *_errors(one.memory), *_errors(one.time), str(one.missed),
        )  # fmt: skip
    said = "predicted over measured, less one · missed: predicted to fit, and out of memory"
    return Group(table, "", f"[dim]{said}[/dim]")


def _kind_name(one: Accuracy) -> str:
    name = one.implementation + (f" ({KEEP_WORDS[one.keep]})" if one.keep in KEEP_WORDS else "")
    return name if one.device == "cpu" else f"{name} on {one.device}"


def accuracy_json(known: Sequence[Accuracy]) -> list[dict[str, Any]]:
    """Every error, so that others can be computed."""
    return [
        {
            "implementation": one.implementation, "mode": one.mode, "world_size": one.world_size,
            "device": one.device, "dtype": one.dtype, "keep": one.keep, "missed": one.missed,
            "memory_errors": list(one.memory), "time_errors": list(one.time),
        }
        for one in known
    ]  # fmt: skip


def _heading(trial: Trial, there: Hardware) -> str:
    w = trial.workload
    heads = f"{w.heads} heads" if w.heads == w.kv_heads else f"{w.heads}/{w.kv_heads} heads"
    causal = "causal" if w.causal else "not causal"
    budget = format_bytes(trial.memory_budget or 0)
    return escape(
        f"{there.name}, {budget} a rank: {w.mode}, {w.dtype}, {causal}, batch {w.batch}, {heads} "
        f"of {w.head_dim}"
    )


def _name(trial: Trial) -> str:
    return trial.implementation + settings_suffix(trial)


def _columns(known: Sequence[Accuracy]) -> list[Column]:
    def of(cell: Callable[[Prediction], str]) -> Callable[[dict[str, Any]], str]:
        return lambda row: cell(row["one"])

    def spread(cell: Callable[[Prediction], str]) -> Callable[[dict[str, Any]], str]:
        return of(lambda one: cell(one) if one.trial.world_size > 1 else NONE)

    return [
        Column("ranks", of(lambda one: str(one.trial.world_size))),
        Column("tokens", of(_tokens)),
        Column("of floor", of(_of_floor), 4),
        Column("peak", of(lambda one: format_bytes(one.seen.peak_bytes))),
        Column("a pass", of(lambda one: format_seconds(one.times.total))),
        Column("sent", spread(lambda one: format_bytes(one.seen.bytes_sent)), 3),
        Column("exposed", spread(lambda one: format_seconds(one.times.exposed)), 2),
        Column("limit", of(lambda one: one.times.limit), 5),
        Column("past error", of(lambda one: _past(one, known)), 1),
    ]  # fmt: skip


def _of_floor(one: Prediction) -> str:
    return format_share(one.fraction_of_floor) if one.fits else NONE


def _tokens(one: Prediction) -> str:
    tokens = format_tokens(one.trial.workload.seq_len)
    return f"[bold]{tokens}[/bold]" if one.fits else f"[red]{tokens} don't fit[/red]"


def _past(one: Prediction, known: Sequence[Accuracy]) -> str:
    past = next((p for p in known if p.is_of(one.trial)), None)
    return NONE if past is None else f"{_errors(past.memory)[0]}, {_errors(past.time)[0]}"


def _errors(errors: Sequence[float]) -> tuple[str, str]:
    """The median, and the one farthest from 0."""
    if not errors:
        return NONE, NONE
    return f"{100 * median(errors):+.1f} %", f"{100 * max(errors, key=abs):+.1f} %"


def _notes(one: Prediction, name: str, trial: Trial) -> list[str]:
    notes = [f"{name}: time from {one.rate.source}"]
    if one.trial.world_size != trial.world_size:
        ranks = one.trial.world_size
        notes.append(f"{name}: does not fit on {trial.world_size} rank(s); the row is of {ranks}")
    if one.seen.untabled:
        kernels = ", ".join(one.seen.untabled)
        notes.append(f"{name}: what {kernels} takes inside itself is not in the table: not counted")
    return notes


def _row(one: Prediction | str, trial: Trial) -> dict[str, Any]:
    row = {
        "implementation": trial.implementation, "options": trial.options, "keep": trial.keep,
        "workload": trial.workload.model_dump(mode="json", exclude={"seq_len"}),
        "asked_world_size": trial.world_size,
    }  # fmt: skip
    if isinstance(one, str):
        return row | {"unsupported": one}
    return row | {
        "world_size": one.trial.world_size, "tokens": one.trial.workload.seq_len,
        "fits": one.fits, "memory_budget": one.trial.memory_budget,
        "fraction_of_floor": one.fraction_of_floor, "peak_bytes": one.seen.peak_bytes,
        "inside_bytes": one.seen.inside_bytes, "untabled": list(one.seen.untabled),
        "seconds": one.times.total, "compute_s": one.times.compute, "memory_s": one.times.memory,
        "bytes_sent": one.seen.bytes_sent, "transfers": one.seen.transfers,
        "communication_s": one.times.transfers, "exposed_s": one.times.exposed,
        "limit": one.times.limit, "rate_flops": one.rate.flops, "rate_source": one.rate.source,
    }  # fmt: skip
