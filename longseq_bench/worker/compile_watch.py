"""Notice compilations inside a pass: their time is not that of the attention.

Triton compiles a kernel for each new combination of types and constants, torch.compile a graph for
each new shape that its guards refuse. The short warm-up pass meets most of them, but not all.

A kernel from a cache on disk counts too: it is loaded, which takes tens of milliseconds.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INDUCTOR_GRAPHS = ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass")
"""Counters of inductor, which also count a backward that is compiled after its forward."""


class CompileWatch:
    """A context manager. `compiled` is True at its end if anything was compiled inside.

    It imports neither Triton nor torch's compiler: if they are not loaded, nothing was compiled.
    If either is imported inside, that counts as compiling.
    """

    def __init__(self) -> None:
        self.compiled = False

    def __enter__(self) -> "CompileWatch":
        self._before = _graphs(), "triton" in sys.modules
        self._triton = _watch_triton(self)
        self._triton.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._triton.__exit__(None, None, None)
        if (_graphs(), "triton" in sys.modules) != self._before:
            self.compiled = True


@contextmanager
def _watch_triton(watch: CompileWatch) -> Iterator[None]:
    """Let Triton report each compilation; another hook that is set goes on being called."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        yield
        return
    earlier = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        watch.compiled = True
        return earlier(*args, **kwargs) if earlier else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = earlier


def _graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    inductor = dynamo.counters["inductor"]
    return int(dynamo.counters["stats"]["unique_graphs"]) + sum(
        int(inductor[name]) for name in _INDUCTOR_GRAPHS
    )
