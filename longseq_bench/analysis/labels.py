"""Labels of rows for programs, and speed relative to a baseline that a label names.

JSON documents and frames have these labels ("ring chunk=1024"); reports have those of
short_labels.py ("ring chunk 1k").
"""

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.model import OptionValue, Trial, options_key
from longseq_bench.core.own_functions import short_name

FILE_HASH = "file_hash"
"""The hash of an own function's file among the options of a label."""

KEEP_WORDS = {"inputs": "recomputed", "nothing": "in place"}

Settings = Trial | Row
"""The implementation, its options and the other settings that a label names."""


Labels = Mapping[Hashable, str]
"""Labels by settings_key."""


def find_labels(settings: Iterable[Settings]) -> Labels:
    """Return labels: the implementation, and those of its options that differ among them.

    A missing option is not a difference: the version of longseq that ran did not have it.
    """
    distinct = {settings_key(one): one for one in settings}
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in distinct.values():
        for name, value in named_options(one).items():
            values[one.implementation, name].add(option_text(value))
    return {key: _label(one, values) for key, one in distinct.items()}


def set_labels(rows: Iterable[R], labels: Labels) -> list[R]:
    """Return copies of the rows with these labels."""
    return [replace(row, label=labels[settings_key(row)]) for row in rows]


def named_options(settings: Settings) -> Mapping[str, OptionValue]:
    """Return what tells settings of one implementation apart: options, and an own file's hash."""
    if settings.source is None:
        return settings.options
    return {**settings.options, FILE_HASH: settings.source[:8]}


def _names(settings: Settings) -> set[str]:
    """Return the names by which a baseline may name settings: an own function also by itself."""
    return {settings.implementation, short_name(settings.implementation)}


def settings_suffix(settings: Settings) -> str:
    """Return the settings that make figures incomparable as a suffix: " (fit only)"."""
    words = []
    if settings.fit_only:
        words.append("fit only")
    if settings.keep != "all":
        words.append(KEEP_WORDS[settings.keep])
    if settings.allocator == "expandable":
        words.append("expandable segments")
    if settings.allocator == "fresh":
        words.append("fresh memory")
    if settings.options.get("offload", "none") != "none":
        words.append("offloaded")
    if settings.requested_dense_kernel is not None:
        words.append(f"against {settings.requested_dense_kernel}")
    return f" ({', '.join(words)})" if words else ""


def settings_key(settings: Settings) -> Hashable:
    """Return a key that is equal for settings that a label does not distinguish.

    An option that is None or "none" is off, as if it did not exist yet when the records were made.
    """
    options = named_options(settings)
    on = {name: value for name, value in options.items() if value not in (None, "none")}
    return settings.implementation, options_key(on), settings_suffix(settings)


def find_baseline_label(settings: Iterable[Settings], labels: Iterable[str], baseline: str) -> str:
    """Return the one label that a baseline means.

    baseline: one of the labels, an implementation that has one label only, or an implementation
    with options that only one label has ("ring chunk=1024").
    Raises UnknownNameError if it matches no label, UserError if it matches several.
    """
    known = dict(zip(labels, settings, strict=True))
    if baseline in known:
        return baseline
    named = [label for label, one in known.items() if baseline in _names(one)]
    named = named or [label for label, one in known.items() if _has_options(one, baseline)]
    if len(named) > 1:
        several = ", ".join(map(repr, named))
        raise UserError(f"baseline {baseline!r} is ambiguous: {several}; name one of them")
    if not named:
        names = {*known, *(name for one in known.values() for name in _names(one))}
        raise UnknownNameError("baseline", baseline, names, place="the results")
    return named[0]


def _has_options(settings: Settings, text: str) -> bool:
    """Return True if the text names the implementation, some of its options, and its settings."""
    suffix = settings_suffix(settings)
    name, *words = text.removesuffix(suffix).split(" ")
    options = {
        f"{option}={option_text(value)}" for option, value in named_options(settings).items()
    }
    return name in _names(settings) and text.endswith(suffix) and options.issuperset(words)


def speeds(rows: Iterable[SweepRow], baseline: str) -> list[float | None]:
    """Return the baseline's time over each row's time: 2.0 is twice as fast.

    baseline: as in find_baseline_label, with the same errors.

    Rows are compared within one workload, device, thread count and environment, with the baseline
    on the same number of ranks, or on the fewest if it did not run there. None if either row is
    not ok or was not timed.
    """
    rows = list(rows)
    label = find_baseline_label(rows, (row.label for row in rows), baseline)
    times: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.label == label and row.is_ok and row.time_s is not None:
            times[row.workload_key].setdefault(row.world_size, row.time_s)
    return [_speed(row, times.get(row.workload_key, {})) for row in rows]


def _speed(row: SweepRow, times: Mapping[int, float]) -> float | None:
    if not row.is_ok or not row.time_s or not times:
        return None
    return times.get(row.world_size, times[min(times)]) / row.time_s


def _label(settings: Settings, values: Mapping[tuple[str, str], set[str]]) -> str:
    name = settings.implementation
    differing = (
        f"{option}={option_text(value)}"
        for option, value in named_options(settings).items()
        if len(values[name, option]) > 1
    )
    return " ".join([name, *differing]) + settings_suffix(settings)


def option_text(value: OptionValue) -> str:
    """Return the value of an option as it is written in labels for programs and in configs."""
    if type(value) is int:  # the most frequent type; JSON gives plain integers
        return str(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
