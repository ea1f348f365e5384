"""Write the parts of a comparison as text: names, percentages, counts, values of environments."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from longseq_bench.analysis.labels import mask_words, mode_words
from longseq_bench.analysis.searches import SearchRow
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.core.masks import FULL
from longseq_bench.core.units import format_bytes, format_tokens

ComparedRow = SweepRow | SearchRow
"""A trial or a search."""

_FIELD_NAMES = {
    "memory_bytes": "memory", "gpus": "GPUs", "cpu": "CPU", "cuda": "CUDA", "cudnn": "cuDNN",
    "nccl": "NCCL", "triton": "Triton", "power_limits_w": "power limits in W",
}  # fmt: skip


def name_row(row: ComparedRow) -> str:
    """Return the name of a trial or a search: "ring chunk 1k ×2 at 4k (train)"."""
    tokens = "" if is_search(row) else f" at {format_tokens(row.tokens)}"
    workload: list[str] = [
        *([mode_words(row.mode, row.new_tokens)] if row.mode != "forward" else []),
        *([row.dtype] if row.dtype != "float32" else []),
        *([mask_words(row.mask)] if row.mask != FULL else []),
    ]
    suffix = f" ({', '.join(workload)})" if workload else ""
    return f"{row.name}{tokens}{suffix}"


def is_search(row: ComparedRow) -> bool:
    """Return True for the row of a search, which has no length of its own."""
    return isinstance(row, SearchRow)


def format_percent(share: float) -> str:
    """Format a relative difference as a percentage with two digits."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.2g} %"


def format_detectable(share: float) -> str:
    """Format the smallest detectable difference; above 100 % its size has no meaning."""
    return ">100 %" if share > 1 else format_percent(share)


def count_rows(rows: Sequence[ComparedRow]) -> str:
    """Return the number of trials and searches, with the verb."""
    searches = sum(map(is_search, rows))
    parts = [count_trials(len(rows) - searches)] if searches < len(rows) else []
    parts += [count(searches, "search", "searches")] if searches else []
    return f"{' and '.join(parts)} {'is' if len(rows) == 1 else 'are'}"


def count_trials(n: int) -> str:
    """Return "1 trial", "2 trials"."""
    return count(n, "trial", "trials")


def count(n: int, one: str, several: str) -> str:
    """Return a number with the singular or the plural."""
    return f"{n} {one if n == 1 else several}"


def join_words(words: Sequence[str], max_words: int = 6, separator: str = ", ") -> str:
    """Join words; beyond `max_words` of them only their number is given."""
    more = f" and {len(words) - max_words} more" if len(words) > max_words else ""
    return separator.join(words[:max_words]) + more


def name_field(name: str) -> str:
    """Return the name of a field of an environment in sentences."""
    return _FIELD_NAMES.get(name, name)


def format_value(name: str, values: Sequence[Any]) -> str:
    """Format the values of a field of environments."""
    return "; ".join(_format_one(name, value) for value in values)


def _format_one(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in sorted(value.items())) or "none"
    if isinstance(value, tuple):
        return ", ".join(f"{n} × {one}" for one, n in Counter(value).items()) or "none"
    return "none" if value is None else str(value)
