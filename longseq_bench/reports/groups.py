"""Groups of rows that may be compared, and their descriptions."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TypeVar

from longseq_bench.analysis.labels import mask_words, mode_words
from longseq_bench.analysis.row import R, Row
from longseq_bench.analysis.runs import group_by
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.units import format_bytes, format_seconds

T = TypeVar("T", SweepRow, SearchRow)


def split_names(names: str) -> tuple[str, ...]:
    """Return the names of fields in a text."""
    return tuple(names.split())


SAME_TABLE = split_names(
    "fingerprint device mode new_tokens dtype mask batch heads kv_heads head_dim v_head_dim model "
    "memory_budget time_budget threads fit_only"
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
    row: Row, machines: Mapping[str, str], fields: Collection[str] | None = None
) -> str:
    """Describe a group in words: "forward, float32, causal, batch 1, 8 heads of 64, cpu".

    fields: the fields of SAME_TABLE to describe, with words for a missing budget; all if None.
    """
    described = [*_describe_fields(row, machines)]
    if fields is None:
        return ", ".join(words for _, words, _ in described if words)
    found = (
        words or missing for names, words, missing in described if not names.isdisjoint(fields)
    )
    return ", ".join(filter(None, found))


def describe_shared(
    row: Row, machines: Mapping[str, str], varying: frozenset[str], ending: str = ""
) -> str:
    """Return a sentence with what all rows share, of which this is one.

    varying: from find_varying, of all rows.
    """
    described = _describe_fields(row, machines)
    words = ", ".join(w for names, w, _ in described if w and varying.isdisjoint(names))
    return capitalize_first("; ".join(filter(None, (words, ending)))) + "."


def _describe_fields(
    row: Row, machines: Mapping[str, str]
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
    yield of("model", f"model {row.model}" if row.model else "", "no model")
    yield of("mode new_tokens", mode_words(row.mode, row.new_tokens))
    yield of("dtype", row.dtype)
    yield of("mask", mask_words(row.mask))
    yield of("batch", f"batch {row.batch}")
    yield of("heads kv_heads head_dim v_head_dim", heads)
    yield of("device", row.device)
    several = "s" if row.threads != 1 else ""
    threads = f"{row.threads} thread{several} a rank" if row.threads else ""
    yield of("threads", threads, "default threads")
    memory = f"{format_bytes(row.memory_budget)} a rank" if row.memory_budget else ""
    yield of("memory_budget", memory, "no memory budget")
    time = f"{format_limit(row.time_budget)} limit" if row.time_budget else ""
    yield of("time_budget", time, "no time limit")
    machine = machines[row.fingerprint]
    yield of("fingerprint", f"machine {machine}" if machine else "")


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


def join_words(*words: str) -> str:
    """Join the words that are not empty by commas."""
    return ", ".join(filter(None, words))
