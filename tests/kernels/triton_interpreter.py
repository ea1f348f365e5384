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
    """Choose the interpreter, and correct its errors with current numpy and with bfloat16."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, patch, dot = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter.InterpreterBuilder.create_dot,
    )
    patched: list[Any] = []

    def with_index(tensor: Any, scope: Any) -> None:
        # numpy 2.4 no longer converts an array of one number to a number
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    class Scope:
        """A patch of the language, once per launch and module, because patching takes most of the
        time. It is restored at the end of the launch."""

        def __init__(self, function: Any) -> None:
            names = function.__globals__
            self.scope = None
            if not any(names is other for other in patched):
                patched.append(names)
                self.scope = patch(function)

        def restore(self) -> None:
            patched.clear()
            if self.scope is not None:
                self.scope.restore()

    def wide(operand: Any) -> Any:
        # bfloat16 is kept as 16 bits that numpy would multiply as whole numbers
        if operand.dtype != tl.bfloat16:
            return operand
        bits = interpreter._convert_float(operand.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    interpreter._patch_lang_tensor = with_index
    interpreter._patch_lang = Scope
    interpreter.InterpreterBuilder.create_dot = wide_dot
    # tensors are on the CPU already, so nothing is copied back (it could be gigabytes)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
