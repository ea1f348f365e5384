"""`longseq_bench.recommend`: which attention for some lengths, and how far each one goes."""

from __future__ import annotations

from typing import Any

from longseq_bench.api.grid import sweep
from longseq_bench.api.implementations import Implementations, Options
from longseq_bench.api.results import Results

USUAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sdpa", {}),
    ("ring", {}),
    ("block-sparse", {"sparsity": 0.99}),
    ("block-sparse", {"sparsity": 0.99, "pattern": "sink-window"}),
    ("block-sparse-adaptive", {"sparsity": 0.99}),
    ("dilated", {"segments": (2048, 8192), "dilation": (1, 4)}),
    ("hilbert", {"segments": (2048, 8192), "dilation": (1, 4)}),
)
"""One of each kind that needs no other library: exact attention by torch and in minimal memory, a
window (Longformer, arXiv 2004.05150), a window with sinks (StreamingLLM, 2309.17453), blocks by
content, LongNet's dilation (2307.02486), the same along a curve."""
FEW_PASSES = {"repeats": 3, "time_cap": "500ms", "time_budget": "10s", "rounds": 1}


def recommend(
    implementations: Implementations | None = None,
    *,
    tokens: Any = ("8k", "32k"),
    within: float | str = "2min",
    options: Options | None = None,
    **given: Any,
) -> Results:
    """Time implementations at some lengths, and predict the longest that fits in memory.

    Keywords and errors are those of `sweep`.

    Args:
        implementations: As for `sweep`. Default: the list of `longseq recommend --help`.
        tokens: Sequence lengths over all ranks: 4096 or "4k".
        within: As for `sweep`.
        options: As for `sweep`; they replace those of the default implementations.
        **given: Other keywords of `sweep`.
    """
    shared = options or {}
    usual = [(name, {o: v for o, v in own.items() if o not in shared}) for name, own in USUAL]
    more: dict[str, Any] = FEW_PASSES | given
    chosen = implementations or usual
    return sweep(tokens=tokens, implementations=chosen, within=within, options=options, **more)
