"""Step longest: `longseq maxlen` of several shapes, beside the floor and the prediction."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmarks.gpu.items import (
    Figures,
    Item,
    ItemFailed,
    Result,
    Session,
    Step,
    Table,
    or_dash,
    slug,
)
from benchmarks.gpu.processes import run_with_records
from benchmarks.gpu.speed import SEGMENTS, SHAPES, TOY
from longseq_bench.analysis.searches import search_rows
from longseq_bench.core.units import format_bytes, format_share

ONE_HEAD = "1x64"
WORKLOADS = {ONE_HEAD: {"heads": 1, "head_dim": 64}} | SHAPES
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "ring": {},
    "block-sparse": {"sparsity": 0.999, "kernel": "triton"},
    "dilated": SEGMENTS,
}


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per search: under 64 GiB, with passes of at most 10 s."""
    if session.dry_run:
        limits = {"memory_budget": "8MiB", "time_budget": "5s"}
        words = arguments("cpu", "sdpa", {}, TOY | {"heads": 4, "head_dim": 64} | limits)
        return [Item("toy", partial(search, session, "toy", words))]
    limits = {"memory_budget": "64GiB", "time_budget": "10s", "dtype": "bfloat16"}
    found = []
    for mode, shape, (name, options) in product(
        ("forward", "train"), WORKLOADS, IMPLEMENTATIONS.items()
    ):
        words = arguments("cuda", name, options, WORKLOADS[shape] | limits | {"mode": mode})
        is_first = mode == "forward" and shape in (ONE_HEAD, "8x128") and name != "dilated"
        tier = 1 if is_first else 3 if name == "dilated" else 2
        item = f"{name} {shape} {mode}"
        found.append(Item(item, partial(search, session, item, words), 60, tier))
    return found


def arguments(
    device: str, name: str, options: dict[str, Any], settings: dict[str, Any]
) -> list[str]:
    """Return the command line of a search."""
    words = ["maxlen", "--impl", name, "--device", device]
    for option, value in options.items():
        words += ["-o", f"{option}={value}"]
    for setting, value in settings.items():
        words += [f"--{setting.replace('_', '-')}", str(value)]
    return words


def search(session: Session, name: str, words: list[str]) -> Figures:
    """Run one search; raises Unfinished at the deadline if at least one run has ended."""
    records, failed = run_with_records(session, words, f"longest/{slug(name)}", "runs")
    (row,) = search_rows(records)
    figures = {
        "max_tokens": row.max_tokens, "first_failure": row.first_failure,
        "predicted_tokens": row.predicted_tokens, "floor_tokens": row.floor_tokens,
        "fraction_of_floor": row.fraction_of_floor, "limited_by": row.limited_by,
        "reason": row.failure_reason, "peak_bytes": row.peak_bytes, "runs": row.runs,
        "search_s": row.wall_s,
    }  # fmt: skip
    if failed or not row.max_tokens:
        raise ItemFailed(f"limited by {row.limited_by}: {row.failure_reason}", figures)
    return figures


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per search."""
    heading = ("search", "status", "longest", "predicted", "floor", "of floor", "limited by",
               "peak", "runs", "seconds")  # fmt: skip
    rows: list[tuple[object, ...]] = [heading]
    for one in results:
        figures = one.figures
        lengths = (
            or_dash(figures.get(name), "{:,}".format)
            for name in ("max_tokens", "predicted_tokens", "floor_tokens")
        )
        rows.append((
            one.item, one.status, *lengths, or_dash(figures.get("fraction_of_floor"), format_share),
            figures.get("limited_by") or "–", or_dash(figures.get("peak_bytes"), format_bytes),
            figures.get("runs", "–"), or_dash(figures.get("search_s"), "{:.0f}".format),
        ))  # fmt: skip
    return rows


STEP = Step("longest", list_items, make_table)
