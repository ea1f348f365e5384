"""The seconds of compilation inside a pass."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any


class CompileWatch:
    """A context manager that measures the seconds of compilation inside it, 0.0 if there was none.

    Triton compiles a kernel for each new combination of types and constants, torch.compile a graph
    for each new shape that its guards refuse: the short warm-up pass does not meet all. Both call
    hooks before and after, also for a kernel from a cache on disk. What is outside them, such as
    loading code on a GPU, is not counted. A compiler that is not imported yet has no hooks: the
    warm-up pass imports those of a trial.
    """

    seconds = 0.0

    def __enter__(self) -> "CompileWatch":
        self._depth = 0
        self._triton: Any = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        self._torch: Any = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if self._triton:
            self._hooks = self._triton.jit_cache_hook, self._triton.jit_post_compile_hook
            self._triton.jit_cache_hook = partial(self._call, self._begin, self._hooks[0])
            self._triton.jit_post_compile_hook = partial(self._call, self._end, self._hooks[1])
        if self._torch:
            self._torch.register_start_callback(self._begin)
            self._torch.register_end_callback(self._end)
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._triton:
            self._triton.jit_cache_hook, self._triton.jit_post_compile_hook = self._hooks
        if self._torch:
            self._torch.remove_start_callback(self._begin)
            self._torch.remove_end_callback(self._end)
        if self._depth > 0:  # a compilation that failed has no end
            self.seconds += time.perf_counter() - self._begin_s

    def _call(self, note: Callable[[], None], earlier: Any, *args: Any, **kwargs: Any) -> Any:
        note()
        return earlier(*args, **kwargs) if earlier else None

    def _begin(self, *_: Any) -> None:
        if not self._depth:  # a graph has kernels of Triton
            self._begin_s = time.perf_counter()
        self._depth += 1

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._begin_s
