"""Documents of commands that list something: implementations, planned trials, doctor's findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longseq_bench.api.trial_text import format_option, format_options
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.masks import mode_words
from longseq_bench.core.model import Environment, Trial
from longseq_bench.reports.document import Column, Document, Section, Table
from longseq_bench.reports.groups import capitalize_first

MAX_LISTED = 1_000
"""Trials that a terminal lists: to print a hundred thousand takes longer than to make them."""

if TYPE_CHECKING:
    from longseq_bench.system_state import Finding


def catalogue_document(catalogue: Catalogue) -> Document:
    """Return a section per implementation: summary, options, and the reason if unavailable."""
    sections = []
    for name, entry in catalogue.implementations.items():
        unavailable = [
            f"Not on {device}: {reason}"
            for device, reason in entry.unavailable.items()
            if not catalogue.devices[device].unavailable
        ]
        missing = [f"Not supported: {reason}" for reason in entry.missing]
        rows = [
            (
                f"{spec.name}={format_option(spec.default)}",
                spec.help + (f" ({', '.join(spec.choices)})" if spec.choices else ""),
            )
            for spec in entry.options
        ]
        table = Table("", (Column("Option and default"), Column("Meaning")), tuple(rows))
        summary = [capitalize_first(entry.summary), *unavailable, *missing]
        sections.append(Section(name, summary, tables=[table] if rows else []))
    kernels = tuple(
        (name, one.summary, one.device, one.unavailable) for name, one in catalogue.kernels.items()
    )
    columns = (Column("Kernel"), Column("What it is"), Column("Device"), Column("Not here because"))
    explanation = "One of these computes exact attention on a device; the option kernel names it."
    section = Section("Kernels", [explanation], tables=[Table("", columns, kernels)])
    return Document("list", "", [], [*sections, *([section] if kernels else [])])


def trials_document(trials: Sequence[Trial], rounds: int, heading: str, estimate: str) -> Document:
    """Return the list of the trials that a sweep would run; of a larger one the first MAX_LISTED.

    heading: the device that they would use.  estimate: what they would take, the last line.
    """
    several = any(trial.world_size > 1 for trial in trials)
    columns = (
        Column("Implementation"), Column("Options"), Column("Tokens", "tokens"),
        *([Column("Ranks", "count")] if several else []), Column("Dtype"), Column("Mode"),
        Column("Mask"), Column("Device"), Column("Memory budget", "bytes"),
    )  # fmt: skip
    rows = tuple(
        (
            trial.implementation, format_options(trial) or None, trial.workload.seq_len,
            *([trial.world_size] if several else []), trial.workload.dtype,
            mode_words(trial.workload.mode, trial.workload.new_tokens),
            trial.workload.visibility.label, trial.device, trial.memory_budget,
        )
        for trial in trials[:MAX_LISTED]
    )  # fmt: skip
    times = f"{rounds} rounds" if rounds > 1 else "1 round"
    summary = f"{len(trials)} trials × {times}; nothing was run"
    if len(trials) > MAX_LISTED:
        summary += f"; the first {MAX_LISTED:,} trials are listed, and --json lists all"
    sections = [Section("", tables=[Table("", columns, rows)]), Section("", [summary, estimate])]
    return Document("trials", "", [heading], sections)


def findings_document(machine: Environment, findings: Sequence[Finding]) -> Document:
    """Return the findings of doctor on this machine."""
    columns = (Column("Check"), Column("State"), Column("Found"), Column("What to do"))
    rows = tuple((f.name, f.state, f.found, f.remedy) for f in findings)
    host_line = f"{machine.host}: {machine.cpu}, {machine.os}"
    return Document("doctor", "", [host_line], [Section("", tables=[Table("", columns, rows)])])
