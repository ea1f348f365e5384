"""Map an exception to an outcome: out of memory, a kernel's limit, unsupported, or an error.

An exception becomes `oom` by its type, or by a text of torch's CPU allocator or of C++. A process
that dies without an exception is judged in launchers/exit_status.py. That module also selects the
failures, some RuntimeErrors among them, that are run again with more memory: `oom` if that passes.

An error that is caused by the end of another rank has the fact `lost_peer`: it is never reported as
the cause if another cause is known.
"""

import traceback
from typing import Any

import torch

from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.model import Outcome, Phase, Status

_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
)
_KERNEL_LIMIT_TEXTS = (
    "invalid configuration argument", "too many resources requested", "invalid argument",
    "canUse32BitIndexMath", "integer out of range", "exceeds the maximum",
)  # fmt: skip
_LOST_PEER_TEXTS = (
    # gloo, and the store through which ranks connect
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout",
    "Timed out waiting", "timed out after", "Application timeout caused pair closure",
    "Connection refused", "failed to connect to",
    # NCCL
    "communicator was aborted", "remote process exited", "ncclRemoteError",
    "Watchdog caught collective operation timeout",
)  # fmt: skip
_TRACE_LINES = 12
_REASON_CHARACTERS = 300


def outcome_of_exception(error: BaseException, phase: Phase) -> Outcome:
    """Return the outcome of a trial that raised `error` in a phase."""
    status = _status_of(error)
    text = " ".join(str(error).split()) or type(error).__name__
    if status in ("oom", "unsupported", "limit"):
        return Outcome(status=status, reason=_shorten(text), phase=phase)
    lines = "".join(traceback.format_exception(error)).splitlines()
    facts: dict[str, Any] = {"traceback": lines[-_TRACE_LINES:]}
    if _is_lost_peer(error):
        facts["lost_peer"] = True
    reason = _shorten(f"{type(error).__name__}: {text}")
    return Outcome(status="error", reason=reason, phase=phase, facts=facts)


def _status_of(error: BaseException) -> Status:
    if isinstance(error, UnsupportedError):
        return "unsupported"
    if isinstance(error, KernelLimitError):
        return "limit"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    if isinstance(error, RuntimeError) and not _is_lost_peer(error):
        if any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
            return "oom"
        if any(text in str(error) for text in _KERNEL_LIMIT_TEXTS):
            return "limit"
    return "error"


def _is_lost_peer(error: BaseException) -> bool:
    """Return True if an error is caused by the end of another rank."""
    known = any(text in str(error) for text in _LOST_PEER_TEXTS)
    return known and isinstance(error, (RuntimeError, OSError))


def _shorten(text: str) -> str:
    return text if len(text) <= _REASON_CHARACTERS else text[: _REASON_CHARACTERS - 1] + "…"
