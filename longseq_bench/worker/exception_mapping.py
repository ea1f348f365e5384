"""Map an exception to an outcome: out of memory, a kernel's limit, unsupported, or an error.

An exception becomes `oom` by its type, or by a text of an allocator, CUDA, NCCL or Triton
(known_errors.py). A process that dies without an exception is judged in launchers/exit_status.py.
That module also selects the failures, some RuntimeErrors among them, that are run again with more
memory: `oom` if that passes.

Two facts of an error are for the launcher. `lost_peer`: the end of another rank caused it, so it is
never reported as the cause if another cause is known. `device_error`: the GPU or NCCL failed, so
the trial runs once more in a fresh process.
"""

import traceback
from typing import Any

import torch

from longseq_bench.attention.own_function import find_place
from longseq_bench.core.errors import KernelLimitError, OwnFunctionError, UnsupportedError
from longseq_bench.core.model import Outcome, Phase, Status
from longseq_bench.worker.known_errors import (
    KERNEL_LIMIT,
    LOST_PEER,
    OUT_OF_MEMORY,
    explain_unusable,
    is_device_error,
    is_library_error,
    text_of,
)

_TRACE_LINES = 12
_REASON_CHARACTERS = 300
_LAST_CHARACTERS = 130
"""The end of a long text that is kept: NCCL names the cause last."""


def outcome_of_exception(error: BaseException, phase: Phase) -> Outcome:
    """Return the outcome of a trial that raised `error` in a phase."""
    status = _status_of(error)
    text = " ".join(text_of(error).split()) or type(error).__name__
    if status in ("oom", "unsupported", "limit"):
        return Outcome(status=status, reason=_shorten(text), phase=phase)
    if sentence := explain_unusable(error):
        return Outcome(
            status="unsupported", reason=sentence, phase=phase, facts={"exception": _shorten(text)}
        )
    lines = "".join(traceback.format_exception(error)).splitlines()
    facts: dict[str, Any] = {"traceback": list(map(_shorten, lines[-_TRACE_LINES:]))}
    if _is_lost_peer(error):
        facts["lost_peer"] = True
    if is_device_error(error):
        facts["device_error"] = True
    if isinstance(error, OwnFunctionError):
        return Outcome(status="error", reason=_shorten(text), phase=phase, facts=facts)
    reason = _shorten(f"{type(error).__name__}: {text}")
    if place := find_place(error):
        reason += f" ({place})"
    return Outcome(status="error", reason=reason, phase=phase, facts=facts)


def _status_of(error: BaseException) -> Status:
    if isinstance(error, UnsupportedError):
        return "unsupported"
    if isinstance(error, KernelLimitError):
        return "limit"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    if is_library_error(error) and not _is_lost_peer(error):
        if OUT_OF_MEMORY.search(text_of(error)):
            return "oom"
        if KERNEL_LIMIT.search(text_of(error)):
            return "limit"
    return "error"


def _is_lost_peer(error: BaseException) -> bool:
    """Return True if an error is caused by the end of another rank."""
    return isinstance(error, (RuntimeError, OSError)) and bool(LOST_PEER.search(text_of(error)))


def _shorten(text: str) -> str:
    """Return a text without its middle if it is long."""
    if len(text) <= _REASON_CHARACTERS:
        return text
    return f"{text[: _REASON_CHARACTERS - _LAST_CHARACTERS - 1]}…{text[-_LAST_CHARACTERS:]}"
