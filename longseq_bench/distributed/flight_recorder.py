"""The oldest unfinished collective of NCCL, for a hang, by torch's flight recorder.

SIGUSR1 makes every rank write its stack (core/ranks.py). In a hang on CUDA the stack only shows
that the rank waits for its device. So a thread also writes a line on the collective in which the
device waits. It reads the recorder twice: a collective that has started and is the same in both
readings waits for other ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from longseq_bench.core.ranks import COLLECTIVE, COLLECTIVE_FOLLOWS, COLLECTIVE_WAITS

BETWEEN_READINGS_S = 0.3
Entries = Sequence[dict[str, Any]]


def enable_flight_recorder() -> None:
    """Switch the recorder on, and write a line at SIGUSR1. Call this before NCCL is used."""
    from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the default in torch 2.13
    # else a collective is never known to have started
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    answer_signal(lambda: json.loads(_dump_nccl_trace_json()).get("entries", []))


def answer_signal(read: Callable[[], Entries]) -> None:
    """Start a thread that writes the collective after each SIGUSR1. Call it in the main thread.

    read: returns the recorded operations of NCCL, oldest first.

    The main thread may wait in torch, where no Python handler runs. So faulthandler's handler, in
    C, calls Python's, whose C part wakes the thread through a pipe.
    """
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)
    threading.Thread(target=_answer, args=(wakes, read), daemon=True).start()


def _answer(wakes: int, read: Callable[[], Entries]) -> None:
    while number := os.read(wakes, 1):
        if number[0] != signal.SIGUSR1:
            continue
        try:
            before = read()
            _write(COLLECTIVE_FOLLOWS)
            time.sleep(BETWEEN_READINGS_S)
            _write(COLLECTIVE + describe(before, read()))
        except Exception as error:
            _write(f"{COLLECTIVE}unknown ({type(error).__name__}: {error})")


def _write(line: str) -> None:
    # in one call to the file of faulthandler
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())


def describe(before: Entries, after: Entries) -> str:
    """Return the oldest collective that has started and not ended, and if it waits; or "none".

    Sends and receives that start together are `scheduled` for ever: a later entry has their state.
    """

    def launch(entry: dict[str, Any]) -> tuple[int, bool, int]:
        """Return a key that is equal for operations that were launched together."""
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        return entry["pg_id"], entry["is_p2p"], number

    one = next((entry for entry in after if entry["state"] == "started"), None)
    if one is None:
        return "none"
    together = (e["profiling_name"] for e in after if launch(e) == launch(one))
    names = dict.fromkeys(n.removeprefix("nccl:") for n in together if n != "nccl:coalesced")
    is_same = (one["record_id"], "started") in [(e["record_id"], e["state"]) for e in before]
    name = f"{' and '.join(names) or 'operations'} #{launch(one)[2]}"
    return f"{name} {COLLECTIVE_WAITS if is_same else 'makes progress'}"
