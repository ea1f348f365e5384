"""`longseq compare A B`: report changes of times, memory, lengths and failures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from longseq_bench.cli import options
from longseq_bench.core.errors import UserError
from longseq_bench.core.registry import canonical_name, is_path
from longseq_bench.core.settings import TRIAL, WORKLOAD
from longseq_bench.core.units import MAX_ROUNDS, parse_share

if TYPE_CHECKING:
    from longseq_bench.core.model import Record

RUN_DEFAULTS = {"tokens": "2k", "rounds": 20, "time_cap": "0.5s"}
"""Twenty short rounds find 3 % if a process varies by 1.5 % (benchmarks/compare.py --simulate)."""
RUN_SETTINGS = ("device", "world_size", "threads", "memory_budget", "time_cap")


@options.declare(WORKLOAD | {name: TRIAL[name] for name in RUN_SETTINGS})
def compare(
    a: str,
    b: str,
    formats: options.Formats = None,
    out: Path | None = None,
    fail_on: str | None = None,
    inconclusive: Literal["fail", "warn"] | None = None,
    across_machines: bool = False,
    run: bool = False,
    tokens: str | None = None,
    rounds: Annotated[int | None, typer.Option(min=2, max=MAX_ROUNDS)] = None,
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Compare two sets of results, trial by trial: times, memory, longest lengths.

    A trial is slower or faster only if its processes differ by more than their noise, tested for
    all trials together. Use three or more rounds per side. Where both sides hold a control, such as
    sdpa, times are compared as ratios to it.

    The first line is PASS, FAIL (something is worse) or TOO NOISY (the change asked for could hide
    in the noise). With --fail-on, FAIL is exit code 4 and TOO NOISY exit code 5.

    Trials of both sides that ran on different machines are listed, not compared; with --fail-on
    they are an error (exit code 2). --across-machines compares them.

    --run measures two implementations in turn and compares them round by round. A and B are names
    or path/to/file.py:function; options of the workload belong to it.

    Options:
        a: Results folder or records.jsonl file. With --run: a name.
        b: Results to compare with A; with --run a name.
        formats: Formats of files to write, separated by commas: md,json,html,csv. Default: none.
        out: Folder for these files and the records of --run. Default: the current folder; none.
        fail_on: End with exit code 4 if anything is worse by this share: 5% or 0.05. Default: no
            check.
        inconclusive: If the runs are too noisy to show the change: end with exit code 5, or only
            warn. Default: fail with --fail-on, else warn.
        across_machines: Also compare trials of different machines. Default: one machine only.
        run: Measure A and B now, in turn. Default: they are results.
        tokens: Sequence lengths for --run, separated by commas. Default: 2k.
        rounds: Rounds of --run, each in fresh processes. Default: 20.
    """
    from longseq_bench.api.results import read_results
    from longseq_bench.cli import REGRESSED, TOO_NOISY
    from longseq_bench.cli.session import print_answer, print_lines
    from longseq_bench.comparison.compare import LEVEL, MIN_CHANGE
    from longseq_bench.comparison.compare import compare as compare_records
    from longseq_bench.comparison.document import comparison_document, json_document
    from longseq_bench.comparison.verdict import decide
    from longseq_bench.reports.kinds import write_documents

    format_names = options.split_names(formats)
    settings = {"tokens": tokens, "rounds": rounds} | given
    written = {name: value for name, value in settings.items() if value is not None}
    if written and not run:
        raise UserError(f"--{next(iter(written)).replace('_', '-')} needs --run")
    if out is not None and not format_names and not run:
        raise UserError("--out needs --format; write --format md,json,html")
    gate = parse_share(fail_on, "--fail-on") if fail_on is not None else None
    notes: list[str] = []
    if run:
        old, new = _measure(a, b, out, RUN_DEFAULTS | written)
    else:
        (old, notes_a), (new, notes_b) = (read_results([Path(side)]) for side in (a, b))
        notes = [*notes_a, *notes_b]
    least = min(MIN_CHANGE, gate or MIN_CHANGE)
    result = compare_records(old, new, (a, b), LEVEL, least, across_machines, run)
    verdict = decide(result, gate)
    if verdict.word == "TOO NOISY" and inconclusive == "warn":
        notes.append(f"warning: {verdict}")
    print_lines(notes, "yellow")
    if format_names:
        report = comparison_document(result, gate)
        paths = write_documents([report], out or Path(), format_names)
        print_lines(f"wrote {path}" for path in paths)
    noise_fails = inconclusive == "fail" or (gate is not None and inconclusive is None)
    codes = {"FAIL": REGRESSED if gate else 0, "TOO NOISY": TOO_NOISY if noise_fails else 0}
    return print_answer(
        as_json,
        lambda: json_document(result, gate),
        lambda: comparison_document(result, gate, is_terminal=True),
        "a wider terminal, --json or --format md has them",
        codes.get(verdict.word, 0),
    )


def _measure(old: str, new: str, out: Path | None, settings: dict[str, Any]) -> list[list[Record]]:
    """Return the records of two implementations that take turns; the old one's get the new name.

    Raises UserError if they are the same, or can't be used.
    """
    from longseq_bench.api.grid import sweep
    from longseq_bench.cli.session import make_reporter

    names = [canonical_name(old), canonical_name(new)]
    if _identity(names[0]) == _identity(names[1]):
        raise UserError(f"{old} and {new} are the same; --run compares two implementations")
    tokens = options.split_names(settings.pop("tokens"))
    settings |= {"tokens": tokens, "implementations": names, "progress": make_reporter()}
    records = sweep(out=out, **settings).records
    sides = [[r for r in records if r.trial.implementation == name] for name in names]
    of_new = sides[1][0].trial
    as_new = {name: getattr(of_new, name) for name in ("implementation", "options", "source")}
    trials = [r.trial.model_copy(update=as_new) for r in sides[0]]
    pairs = zip(sides[0], trials, strict=True)
    return [[r.model_copy(update={"trial": trial}) for r, trial in pairs], sides[1]]


def _identity(name: str) -> tuple[str, str | bytes]:
    """Return what identifies a function, its name and the content of its file; else the name."""
    place, _, function = name.rpartition(":")
    is_file = is_path(place) and Path(place).is_file()
    return function, Path(place).read_bytes() if is_file else place
