"""Measure the longest sequence that an attention can take on given hardware, and its speed."""

from typing import Any

__version__ = "0.1.0"

_LAZY = {"create_block_sparse_attention": "longseq_bench.modules.factory"}
"""Exported names that need torch, which importing this package must not load."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
