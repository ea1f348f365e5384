"""Spans tile by tile, for tests that count the pairs of a pattern."""

from collections.abc import Iterator

import numpy as np

from longseq_bench.kernels.spans import SpanTask
from longseq_bench.patterns.spans import Spans


def tiles_of(spans: Spans) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the steps of each tile's queries and keys, and the run of each key."""
    for t, (start, count) in enumerate(zip(spans.tile_start, spans.tile_count, strict=True)):
        queries = start + np.arange(count, dtype=np.int64) * spans.tile_step
        runs = np.arange(spans.runs[t], spans.runs[t + 1])
        steps = np.ones_like(spans.start) if spans.step is None else spans.step
        keys = [spans.start[r] + np.arange(spans.count[r], dtype=np.int64) * steps[r] for r in runs]
        yield queries, np.concatenate([np.arange(0), *keys]), np.repeat(runs, spans.count[runs])


def visible_pairs(task: SpanTask, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return True where a query at a step sees a key at a step, (queries, keys)."""
    index = task.steps
    if not task.causal:
        return np.ones((len(queries), len(keys)), dtype=np.bool_)
    q_row, k_row = (
        steps if row is None else row[steps]
        for steps, row in ((queries, index.q_row), (keys, index.k_row))
    )
    last = q_row if index.q_at is None else index.q_at[queries]
    places = k_row if index.k_at is None else index.k_at[keys]
    first = np.zeros_like(last) if index.q_first is None else index.q_first[queries]
    visible: np.ndarray = (places >= first[:, None]) & (places <= last[:, None])
    return visible
