"""Prepare timed passes on a GPU: raise its clocks, set the host's head start, batch passes.

An idle H200 runs at a sixth of its clock, so one short warm-up pass is not enough. A pass of less
than a millisecond is near the resolution of events and the time in which Python issues it, so
several of them are one sample.
"""

import math
from collections.abc import Callable, Sequence

from longseq_bench.distributed.group import Group
from longseq_bench.meters.clock import MIN_HEAD_START_S, CudaClock

WARM_S = 0.2
"""Seconds of work after which a GPU has left its idle clocks."""

SAMPLE_S = 1e-3
"""A sample takes at least about this long."""
MAX_PASSES = 50
"""Maximum number of passes of a sample."""

HEAD_START_FACTOR = 1.2
MAX_HEAD_START_S = 0.02


def prepare_clocks(
    clocks: Sequence[CudaClock], time_pass: Callable[[CudaClock], None], group: Group,
    can_batch: bool,
) -> None:  # fmt: skip
    """Run passes until the device was busy for 200 ms, then set up the clocks by the last pass.

    Every rank runs the same number of passes, and gets the same head start and batches.

    Args:
        clocks: those of the timed passes, which keep no sample of this.
        time_pass: runs a pass under the clock that it gets.
        group: all ranks of the trial.
        can_batch: if a pass may follow another one without new inputs.
    """
    warming, busy_s = CudaClock(clocks[0].context), 0.0
    while busy_s < WARM_S:
        time_pass(warming)
        pass_s, dispatch_s = group.all_max(warming.wall[-1], warming.dispatch_s)
        busy_s += pass_s + warming.head_start_s
        # the first passes may have measured the host
        warming.head_start_s = head_start_of(dispatch_s)
    passes = passes_of_a_sample(pass_s) if can_batch else 1
    for clock in clocks:
        clock.passes = passes
        clock.head_start_s = head_start_of(dispatch_s * passes)


def head_start_of(dispatch_s: float) -> float:
    """Return the head start of the host, in s, for work that it issues in `dispatch_s`."""
    return min(max(HEAD_START_FACTOR * dispatch_s, MIN_HEAD_START_S), MAX_HEAD_START_S)


def passes_of_a_sample(pass_s: float) -> int:
    """Return the number of passes between two events, for passes of `pass_s` seconds."""
    return min(max(math.ceil(SAMPLE_S / max(pass_s, 1e-9)), 1), MAX_PASSES)
