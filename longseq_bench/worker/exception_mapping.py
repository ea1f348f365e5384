"""What an exception means: out of memory, a kernel's limit, unsupported, or a plain error.

Out of memory is recognised by type, or by the allocators' own words; nothing else is ever called
out of memory. An error that a peer's end causes is marked `lost_peer` in the facts: it says that
something happened on another rank, and is never the cause where any other is known.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch

from longseq_bench.core.errors import KernelLimitError, UnsupportedError
from longseq_bench.core.model import Outcome, Phase, Status

_MEMORY_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
)
_LIMIT_WORDS = (
    "invalid configuration argument", "too many resources requested", "invalid argument",
    "canUse32BitIndexMath", "integer out of range", "exceeds the maximum",
)  # fmt: skip
_LOST_PEER_WORDS = (
    # gloo, and the store where ranks meet
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout",
    "Timed out waiting", "timed out after", "Application timeout caused pair closure",
    "Connection refused", "failed to connect to",
    # NCCL
    "communicator was aborted", "remote process exited", "ncclRemoteError",
    "Watchdog caught collective operation timeout",
)  # fmt: skip
_TRACE_LINES = 12


def outcome_of_exception(error: BaseException, phase: Phase) -> Outcome:
    """The outcome that an exception in a phase stands for."""
    status = _status(error)
    text = " ".join(str(error).split()) or type(error).__name__
    if status == "oom":
        return Outcome(status="oom", reason=_short(text), phase=phase)
    if status in ("unsupported", "limit"):
        return Outcome(status=status, reason=_short(text), phase=phase)
    lines = "".join(traceback.format_exception(error)).splitlines()
    facts: dict[str, Any] = {"traceback": lines[-_TRACE_LINES:]}
    if lost_peer(error):
        facts["lost_peer"] = True
    reason = _short(f"{type(error).__name__}: {text}")
    return Outcome(status="error", reason=reason, phase=phase, facts=facts)


def lost_peer(error: BaseException) -> bool:
    """Whether an error is what the end of another rank looks like from here."""
    words = any(word in str(error) for word in _LOST_PEER_WORDS)
    return words and isinstance(error, (RuntimeError, OSError))


def _status(error: BaseException) -> Status:
    if isinstance(error, UnsupportedError):
        return "unsupported"
    if isinstance(error, KernelLimitError):
        return "limit"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    if isinstance(error, RuntimeError) and not lost_peer(error):
        text = str(error)
        if any(words in text for words in _MEMORY_WORDS):
            return "oom"
        if any(words in text for words in _LIMIT_WORDS):
            return "limit"
    return "error"


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
