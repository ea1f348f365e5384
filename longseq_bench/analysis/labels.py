"""Labels of rows, such as local-window 95 % or ring chunk 1k, and speed relative to a baseline."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from longseq_bench.analysis.row import R, Row, ranks_mark
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.masks import FULL, parse_mask
from longseq_bench.core.model import DTYPE_ALIASES, OptionValue, Trial, options_key
from longseq_bench.core.units import format_tokens

FILE_HASH = "file_hash"
"""The hash of an own function's file among the options of a label."""

Settings = Trial | Row
"""The implementation, its options and the other settings that a label names."""
Labels = Mapping[Hashable, str]
"""Labels by settings_key."""


def set_labels(rows: Iterable[R], labels: Labels) -> list[R]:
    """Return copies of the rows with these labels."""
    return [replace(row, label=labels[settings_key(row)]) for row in rows]


def named_options(settings: Settings) -> Mapping[str, OptionValue]:
    """Return what tells settings of one implementation apart: options, and an own file's hash."""
    if settings.source is None:
        return settings.options
    return {**settings.options, FILE_HASH: settings.source[:8]}


def _names(settings: Settings) -> set[str]:
    return {settings.implementation, short_name(settings.implementation)}


def settings_suffix(settings: Settings) -> str:
    """Return the settings that make figures incomparable as a suffix: " (fit only)"."""
    dense = settings.requested_dense_kernel
    words = {
        "fit only": settings.fit_only,
        "recomputed": settings.keep == "inputs",
        "in place": settings.keep == "nothing",
        "expandable segments": settings.allocator == "expandable",
        "fresh memory": settings.allocator == "fresh",
        settings.timing: settings.timing != "warm",
        "offloaded": settings.options.get("offload", "none") != "none",
        f"against {dense}": dense is not None,
    }
    named = ", ".join(word for word, applies in words.items() if applies)
    return f" ({named})" if named else ""


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
    with options as in a config that only one label has ("ring chunk=1024").
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


def speeds(rows: Sequence[SweepRow], baseline: str) -> list[float | None]:
    """Return the time of a label, the baseline, over each row's time: 2.0 is twice as fast.

    Rows are compared within one workload, device, thread count and environment, with the baseline
    on the same number of ranks, or on the fewest if it did not run there. None if either row is
    not ok or was not timed.
    """
    times: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.label == baseline and row.is_ok and row.time_s is not None:
            times[row.workload_key].setdefault(row.world_size, row.time_s)
    return [_speed(row, times.get(row.workload_key, {})) for row in rows]


def _speed(row: SweepRow, times: Mapping[int, float]) -> float | None:
    if not row.is_ok or not row.time_s or not times:
        return None
    return times.get(row.world_size, times[min(times)]) / row.time_s


def option_text(value: OptionValue) -> str:
    """Return the value of an option as it is written in configs."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


# ---- the words of a label ------------------------------------------------------------------------

MAX_LABEL = 40
"""Maximum number of characters of a label with its number of ranks: "ring chunk 1k ×4"."""

_TEMPLATES = {
    **dict.fromkeys(("pattern", "order", "transport", "backend", "inner"), "{}"),
    "wire_dtype": "{} wire",
    FILE_HASH: "file {}",
}
"""Texts of options whose values are words; the others are "full queries"."""
_ALIASES: dict[str, str] = {dtype: alias for alias, dtype in DTYPE_ALIASES.items()}


def find_short_labels(settings: Sequence[Settings]) -> list[str]:
    """Return a label per settings; labels of different settings differ.

    A label is the implementation, its sparsity or window, and those options that differ among its
    settings. The pattern stands for the only implementation that has several. Options that are None
    are left out. Where labels would be equal or longer than MAX_LABEL, they are the name and a
    number: "block-sparse #3".
    """
    labels = index_short_labels(settings)
    return [labels[settings_key(one)] for one in settings]


def index_short_labels(settings: Sequence[Settings]) -> Labels:
    """Return the labels of `find_short_labels` by key."""
    distinct = {settings_key(one): one for one in settings}
    most_ranks = max((one.world_size for one in settings), default=1)
    return _number(distinct, _find_words(distinct), MAX_LABEL - len(ranks_mark(most_ranks)))


def _find_words(distinct: Mapping[Hashable, Settings]) -> Labels:
    """Return labels that are not always unique, of any length."""
    differing = _find_differing(distinct.values())
    patterns = {str(one.options.get("pattern")) for one in distinct.values()}
    named = [name for name, options in differing.items() if "pattern" in options]
    # of two implementations, or with the name of another, a pattern does not identify one
    led = named[0] if len(named) == 1 and patterns.isdisjoint(differing) else None
    short = short_names(differing)

    return {
        key: _words(one, short[one.implementation], differing[one.implementation], led)
        for key, one in distinct.items()
    }


def _find_differing(settings: Iterable[Settings]) -> dict[str, set[str]]:
    """Return the names of options that differ, of each implementation.

    A missing option is not a difference: the version of longseq that ran did not have it.
    """
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in settings:
        of_name = values[one.implementation]
        for name, value in named_options(one).items():
            of_name[name].add(repr(value))
    return {
        implementation: {name for name, texts in options.items() if len(texts) > 1}
        for implementation, options in values.items()
    }


def _words(settings: Settings, name: str, differing: Iterable[str], led: str | None) -> str:
    """Return the words of a label.

    name: of the implementation.  led: implementation for which its pattern stands.
    """
    options = named_options(settings)
    shown = {*differing, "sparsity" if "sparsity" in options else "window"}  # it may replace it
    pattern, rates = options.get("pattern"), options.get("dilation")
    usual = tuple(2**i for i in range(len(rates))) if isinstance(rates, tuple) else None
    if "segments" in shown and rates == usual:
        shown.discard("dilation")
    if settings.implementation == led and isinstance(pattern, str):
        name = pattern
        shown.discard("pattern")
    texts = [label_option(key, value) for key, value in options.items() if key in shown]
    return " ".join(filter(None, [name, *texts])) + settings_suffix(settings)


def label_option(name: str, value: OptionValue) -> str:
    """Return an option in words: "95 %", "chunk 1k", "4k,8k", "no overlap"; "" for None."""
    words = name.replace("_", " ")
    match value:
        case None | "none":
            return ""
        case bool():
            return words if value else f"no {words}"
        case str():
            return _TEMPLATES.get(name, f"{{}} {words}").format(_ALIASES.get(value, value))
        case float() if name == "sparsity" and 0 <= value <= 1:
            return f"{100 * value:.10g} %"
        case tuple():
            text = ",".join(map(_format_int, value))
            return text if name == "segments" else f"{words} {text}"
        case int():
            return f"{words} {_format_int(value)}"
        case _:
            return f"{words} {value!r}"


def _format_int(value: int) -> str:
    return format_tokens(value).replace(",", "")


def _number(distinct: Mapping[Hashable, Settings], labels: Labels, room: int) -> Labels:
    """Return the labels, with a name and a number in place of those that are equal or too long."""
    counts, numbered = Counter(labels.values()), {}
    for number, (key, label) in enumerate(labels.items(), 1):
        is_kept = counts[label] == 1 and len(label) <= room
        numbered[key] = label if is_kept else _numbered(distinct[key], number, room)
    return numbered


def _numbered(settings: Settings, number: int, room: int) -> str:
    """Return the implementation with a number, cut to the room."""
    name, suffix = short_name(settings.implementation), settings_suffix(settings)
    mark = f" #{number}"
    if len(name + mark + suffix) > room:
        suffix = " (fit only)" if settings.fit_only else ""
    longest = room - len(mark + suffix)
    return (name if len(name) <= longest else f"{name[: longest - 1]}…") + mark + suffix


def short_name(name: str) -> str:
    """Return the function of an own function's name; any other name stays as it is."""
    function = name.rpartition(":")[2]
    return function if function.isidentifier() else name


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each name, all different.

    It is the function; with its file if two have the same function; else the whole name.
    """
    distinct = list(dict.fromkeys(names))
    short = {name: short_name(name) for name in distinct}
    for longer in (_with_file, str):
        counts = Counter(short.values())
        short = {n: longer(n) if counts[text] > 1 else text for n, text in short.items()}
    return short


def _with_file(name: str) -> str:
    place, _, function = name.rpartition(":")
    return f"{os.path.basename(place)}:{function}" if place else name


def mask_words(text: str) -> str:
    """Return a mask in words for people: "not causal", "causal", "sliding window 4k"."""
    mask = parse_mask(text)
    return "not causal" if mask.kind == FULL else mask.label


def mode_words(mode: str, new_tokens: int, kv_dtype: str | None) -> str:
    """Return a mode in words for people: "forward", "decode, 1 new token, int8 cache"."""
    words = f"{mode}, {new_tokens} new token{'s' * (new_tokens > 1)}" if new_tokens else mode
    return f"{words}, {kv_dtype} cache" if kv_dtype else words
