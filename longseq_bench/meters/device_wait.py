"""Wait for a CUDA device without using a core."""

import torch

from longseq_bench.core.stack_markers import longseq_wait_for_device


def wait_for_device() -> None:
    """Block until the current CUDA device is idle.

    `torch.cuda.synchronize` alone spins on a core. Then a rank that waits for its peers looks busy,
    and a hang looks like a slow pass. So the thread sleeps until the work of the current stream is
    done; the work of other streams is seldom longer.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    longseq_wait_for_device(event.synchronize)
    longseq_wait_for_device(torch.cuda.synchronize)
