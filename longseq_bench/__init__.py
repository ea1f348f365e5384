"""Measure the longest sequence that an attention can take on given hardware, and its speed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq_bench.api.grid import sweep as sweep
    from longseq_bench.api.length_search import maxlen as maxlen
    from longseq_bench.api.plan_document import Plan as Plan
    from longseq_bench.api.planning import plan as plan
    from longseq_bench.api.recommendation import recommend as recommend
    from longseq_bench.api.results import Results as Results
    from longseq_bench.api.results import load as load
    from longseq_bench.core.errors import LongseqError as LongseqError
    from longseq_bench.core.errors import UserError as UserError
    from longseq_bench.modules.block_sparse import (
        create_block_sparse_attention as create_block_sparse_attention,
    )

__version__ = "0.1.0"

_LAZY = {
    "Plan": "longseq_bench.api.plan_document",
    "Results": "longseq_bench.api.results",
    "LongseqError": "longseq_bench.core.errors",
    "UserError": "longseq_bench.core.errors",
    "create_block_sparse_attention": "longseq_bench.modules.block_sparse",
    "load": "longseq_bench.api.results",
    "maxlen": "longseq_bench.api.length_search",
    "plan": "longseq_bench.api.planning",
    "recommend": "longseq_bench.api.recommendation",
    "sweep": "longseq_bench.api.grid",
}
"""Exported names by module. Importing this package loads neither torch nor pandas nor these."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
