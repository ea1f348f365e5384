"""Groups of rows that may be compared, their best rows with ties, and both in words."""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import TypeVar

from longseq_bench.analysis.labels import mask_words, mode_words
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.runs import REMEDY, group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.model import Status
from longseq_bench.core.units import format_bytes, format_seconds, format_tokens
from longseq_bench.reports.document import MAX_FINDINGS

T = TypeVar("T", SweepRow, SearchRow)


def split_names(names: str) -> tuple[str, ...]:
    """Return the names of fields in a text."""
    return tuple(names.split())


SAME_TABLE = split_names(
    "fingerprint workers device mode new_tokens dtype mask sink soft_cap batch heads kv_heads "
    "head_dim v_head_dim latent kv_dtype model memory_budget time_budget threads fit_only"
)
SIMILAR_DENSITY = 0.9
"""Fraction of the highest density; rows at or above it are treated as equally sparse."""

table_key: Callable[[Row], Hashable] = attrgetter(*SAME_TABLE)
"""Key that is equal for rows of one table."""


def group_by_workload(rows: Iterable[R]) -> list[list[R]]:
    """Group rows that are equal in the fields of SAME_TABLE, in order of appearance."""
    return list(group_by(rows, table_key).values())


def find_varying(rows: Iterable[Row]) -> frozenset[str]:
    """Return the fields of SAME_TABLE that are not equal in all rows."""
    values = zip(*map(table_key, rows), strict=True)
    return frozenset(
        name for name, some in zip(SAME_TABLE, values, strict=False) if len({*some}) > 1
    )


def describe_workload(
    row: Row, machines: Mapping[str, str], fields: Collection[str], is_parallel: bool
) -> str:
    """Describe fields of SAME_TABLE in words, also a missing budget: "float32, no time limit".

    is_parallel: budgets are those of a rank.
    """
    described = _describe_fields(row, machines, is_parallel)
    return join_words(*(w or none for names, w, none in described if not names.isdisjoint(fields)))


def describe_shared(
    row: Row, machines: Mapping[str, str], varying: frozenset[str], is_parallel: bool
) -> str:
    """Describe what rows share, of which this is one: "forward, causal, batch 1, 8 heads of 64".

    varying: from find_varying.  is_parallel: as in describe_workload.
    """
    described = _describe_fields(row, machines, is_parallel)
    return join_words(*(words for names, words, _ in described if varying.isdisjoint(names)))


def _describe_fields(
    row: Row, machines: Mapping[str, str], is_parallel: bool
) -> Iterator[tuple[frozenset[str], str, str]]:
    """Yield names of fields, their words, and words for a missing value."""

    def of(names: str, words: str, missing: str = "") -> tuple[frozenset[str], str, str]:
        return frozenset(names.split()), words, missing

    heads = f"{row.heads} heads of {row.head_dim}"
    unlike = [
        *([f"{row.kv_heads} for k, v"] if row.kv_heads != row.heads else []),
        *([f"v of {row.v_head_dim}"] if row.v_head_dim != row.head_dim else []),
    ]
    heads += in_brackets(", ".join(unlike))
    if row.latent:
        heads = f"{row.heads} heads of a latent {row.latent}"
    model = f"model {row.model}" if row.model and row.layers == 1 else row.model
    yield of("model layers", model, "no model")
    yield of("mode new_tokens kv_dtype", mode_words(row.mode, row.new_tokens, row.kv_dtype))
    yield of("dtype", row.dtype)
    yield of("mask", mask_words(row.mask))
    yield of("sink", "sinks" if row.sink else "", "no sinks")
    yield of("soft_cap", f"soft cap {row.soft_cap:g}" if row.soft_cap else "", "no soft cap")
    yield of("batch", f"batch {row.batch}")
    yield of("heads kv_heads head_dim v_head_dim latent", heads)
    yield of("device", row.device)
    several, share = "s" if row.threads != 1 else "", " a rank" if is_parallel else ""
    threads = f"{row.threads} thread{several}{share}" if row.threads else ""
    yield of("threads", threads, "default threads")
    memory = f"{format_bytes(row.memory_budget)}{share}" if row.memory_budget else ""
    yield of("memory_budget", memory, "no memory budget")
    time = f"{format_limit(row.time_budget)} limit" if row.time_budget else ""
    yield of("time_budget", time, "no time limit")
    machine = machines[row.fingerprint]
    yield of("fingerprint", f"machine {machine}" if machine else "")
    beside = f"{row.workers} trials side by side" if row.workers else ""
    yield of("workers", beside, "one trial at a time")


def format_limit(seconds: float) -> str:
    """Format a time limit without zeros at its end: "10 min", "1 h 30 min", "30 s"."""
    text = format_seconds(seconds).removesuffix(" 00 s")
    return text.removesuffix(" 00 min")


def in_brackets(words: str) -> str:
    """Return " (words)"; "" for no words."""
    return f" ({words})" if words else ""


def capitalize_first(words: str) -> str:
    """Return the words with a capital first letter."""
    return words[:1].upper() + words[1:]


def has_several_ranks(rows: Iterable[Row]) -> bool:
    """Return True if any row ran on several ranks."""
    return any(row.world_size > 1 for row in rows)


def most_shared(rows: Iterable[T]) -> list[T]:
    """Return the rows of the workload that most implementations have.

    Of equal ones that with the most labels, then the first.
    """

    def count(group: list[T]) -> tuple[int, int]:
        found = [row for row in group if row.tokens]
        return len({row.implementation for row in found}), len({row.label for row in found})

    return max(group_by_workload(rows), key=count, default=[])


def common_length(
    rows: Iterable[SweepRow], key: Callable[[SweepRow], str] = attrgetter("name")
) -> list[SweepRow]:
    """Return the rows of the length at which most keys were ok; the longest of equal ones."""
    by_length = group_by(rows, attrgetter("tokens"))

    def rank(tokens: int) -> tuple[int, int]:
        return len({key(row) for row in by_length[tokens] if row.is_ok}), tokens

    return by_length[max(by_length, key=rank)] if by_length else []


def group_by_density(rows: Iterable[R]) -> list[list[R]]:
    """Group rows of similar density, the densest group first.

    The rows of a group have at least SIMILAR_DENSITY of its highest density, in input order.
    """
    found: list[list[R]] = []
    rest = list(rows)
    while rest:
        minimum = SIMILAR_DENSITY * max(row.density for row in rest)
        found.append([row for row in rest if row.density >= minimum])
        rest = [row for row in rest if row.density < minimum]
    return found


def split_by_sparsity(rows: Iterable[R]) -> dict[str, list[R]]:
    """Split rows into "exact" and "sparse"; a group without rows is left out.

    The two compute different things, so they are not compared with each other.
    """
    found = group_by(rows, lambda row: "sparse" if row.is_sparse else "exact")
    return dict(sorted(found.items()))


def at_length(where: str, tokens: int) -> str:
    """Return the description of a workload with a length of it."""
    return join_words(where, f"{format_tokens(tokens)} tokens")


def join_words(*words: str) -> str:
    """Join the words that are not empty by commas."""
    return ", ".join(filter(None, words))


# ---- parts of sentences: limits on their number, and rankings with ties --------------------------

MAX_NAMES = 2
"""Maximum number of names in one sentence."""
TIE = "no significant difference"
UNCONFIRMED = "not confirmed by a second run"
"""Of a longest length that passed once: the search was interrupted, or used up its runs."""


def limit_findings(findings: Iterable[str]) -> list[str]:
    """Return at most MAX_FINDINGS; the last one is the number of those left out, if any."""
    known = list(findings)
    if len(known) <= MAX_FINDINGS:
        return known
    first = MAX_FINDINGS - 1
    return [*known[:first], f"{len(known) - first:,} more are in the tables."]


def join_names(names: Iterable[str]) -> str:
    """Return the first MAX_NAMES names of a sentence, then the number of further ones."""
    named = list(names)
    more = len(named) - MAX_NAMES
    return ", ".join([*named[:MAX_NAMES], f"{more:,} more"] if more > 0 else named)


def format_range(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Return the smallest and the largest value: "2× to 3×"; one where their texts are equal."""
    return " to ".join(dict.fromkeys(write(value) for value in (min(values), max(values))))


def find_ties(ordered: Sequence[R], low: str, high: str, largest: bool = False) -> list[R]:
    """Return the best row and those whose intervals overlap with its own.

    ordered: rows, the best first.  low, high: fields of the bounds; a missing bound
    overlaps.  largest: the best has the largest value, not the smallest.
    """
    own, other = (low, high) if largest else (high, low)
    end = getattr(ordered[0], own)

    def overlaps(row: R) -> bool:
        bound = getattr(row, other)
        return None in (bound, end) or (bound >= end if largest else bound <= end)

    return [row for row in ordered if overlaps(row)]


USUAL = "sdpa", "dense"
"""Labels with which others are compared, if no other baseline is asked for."""


def ends_first(row: SweepRow) -> float:
    """Return the end of the interval of a time (s), by which the surest of tied rows is first."""
    return (row.time_high_s or row.time_s or inf) if row.is_ok else inf


def find_longest_ties(rows: Sequence[SearchRow]) -> list[SearchRow]:
    """Return the longest row, and those whose bracket does not exclude its length."""
    ordered = sorted(rows, key=lambda row: -row.max_tokens)
    most = ordered[0].max_tokens
    return [r for r in ordered if r.max_tokens >= most or r.fails_from > most]


# ---- outcomes in words ---------------------------------------------------------------------------


def name_status(status: Status) -> str:
    """Return a status as words: "out of memory" for oom."""
    return "out of memory" if status == "oom" else status


def describe_outcome(status: Status, phase: str | None, reason: str | None) -> str:
    """Return how a trial ended: "out of memory in forward", "unsupported: runs on one rank".

    The allocator's text is left out: it repeats the status, and the record keeps it.
    """
    where = f" in {phase}" if phase and status != "unsupported" else ""
    detail = f": {reason}" if reason else ""
    return f"{name_status(status)}{where}{others_on_gpu(reason) if status == 'oom' else detail}"


def others_on_gpu(reason: str | None) -> str:
    """Return the end of a reason that names other processes on the GPU; "" if there is none."""
    found = re.search(r"; GPU \d+ is in use: .*", reason or "")
    return found[0] if found else ""


def describe_rows(rows: Sequence[SweepRow]) -> list[str]:
    """Return sentences on rows that failed, whose times vary, or that were checked in part.

    Each names the first row with the same outcome, and how many more there are.
    """
    failed = group_by(
        (row for row in rows if row.status != "ok"),
        lambda row: describe_outcome(row.status, row.phase, row.reason),
    )
    checked = group_by((row for row in rows if row.check_limits), attrgetter("check_limits"))
    found = [f"{_name_first(group)}: {outcome}" for outcome, group in failed.items()]
    found += [f"{_name_first(group)}: checked in part, {why}" for why, group in checked.items()]
    if unstable := [row for row in rows if row.unstable]:
        reason = f"{_name_first(unstable)}: unstable, {unstable[0].unstable}"
        found.append(f"{reason}; {REMEDY}. `longseq doctor` lists causes.")
    return found


def _name_first(rows: Sequence[SweepRow]) -> str:
    more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
    return f"{rows[0].name} at {format_tokens(rows[0].tokens)}{more}"
