"""Triton's interpreter, for a separate process."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

LIMIT_S = 120.0
"""Time limit of a function in that process."""

Interpreted = Callable[..., Any]
"""Type of the fixture `interpreted`."""


def interpret() -> None:
    """Choose the interpreter, correct its errors with current numpy and with bfloat16, and leave
    out work without a result."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, patch, dot, cast = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        builder.create_dot,
        builder.cast_impl,
    )
    patched: list[Any] = []

    def with_index(tensor: Any, scope: Any) -> None:
        # numpy 2.4 no longer converts an array of one number to a number
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    class Scope:
        """A patch of the language, once per module, because patching takes most of the time of a
        launch. It is never restored: this process runs nothing but kernels."""

        def __init__(self, function: Any) -> None:
            names = function.__globals__
            if not any(names is other for other in patched):
                patched.append(names)
                patch(function)

        def restore(self) -> None: ...

    def widen(handle: Any) -> Any:
        """Return bfloat16, which is kept as 16 bits, in float32: the upper half of its bits."""
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def with_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        # numpy would multiply the 16 bits as whole numbers
        a, b = (widen(t) if t.dtype == tl.bfloat16 else t for t in (a, b))
        return dot(self, a, b, *rest)

    def with_fast_cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) == (tl.bfloat16, tl.float32):
            return widen(source)
        return cast(self, source, dtype)

    interpreter._patch_lang_tensor = with_index
    interpreter._patch_lang = Scope
    builder.create_dot = with_wide_dot
    builder.cast_impl = with_fast_cast
    # assertions are off, so overflows would be looked for in vain, ten operations for each addition
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    # tensors are on the CPU already, so nothing is copied back (it could be gigabytes)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
