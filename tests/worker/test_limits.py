"""The memory budget: a need just below it passes, one just above it fails.

Every case runs in its own process, because limits and allocator settings can't be undone.
"""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.meters.memory import HeapPeak
from longseq_bench.worker import memory, verdicts

MIB = 2**20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the budget is enforced on Linux only"
)


def in_child(launcher: LocalLauncher, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs in its own process, which has torch loaded."""
    assert launcher.catalogue()  # starts the server with torch
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=respond, args=(sender, function, arguments))
    child.start()
    sender.close()
    result = receiver.recv()
    child.join()
    return result


def respond(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.ones(2**20).add_(1)
    memory.use_exact_heap()
    sender.send(function(*arguments))


def reuse_freed_memory() -> bool:
    """Return whether 30 MiB fit a budget of 8, after 39 MiB were freed below a kept block."""
    freed = torch.ones(2**22)
    del freed
    blocks = [torch.ones(2**18) for _ in range(40)]
    del blocks[:-1]
    memory.limit_heap(8 * MIB)
    return fits(30, MIB)


def fits(tensors: int, each: int) -> bool:
    try:
        kept = [torch.ones(each // 4) for _ in range(tensors)]
    except (MemoryError, RuntimeError) as error:
        # a list that grows at the limit ends with a MemoryError
        if verdicts.outcome_of_exception(error, "forward").status != "oom":
            raise
        return False
    return all(float(t[-1]) for t in kept)


def fit_budgets(tensors: int, each: int, budgets: list[int]) -> list[bool]:
    """Return whether tensors of that size fit each of some budgets."""
    found = []
    for budget in budgets:
        assert memory.limit_heap(budget) is None
        found.append(fits(tensors, each))
        memory.lift_heap_limit()
    return found


def measure_peaks(tensors: int, each: int) -> tuple[int, int]:
    """Return the peak of tensors that are freed before 1 MiB is kept, and that of no work."""
    with HeapPeak() as meter:
        assert fits(tensors, each)
        kept = torch.ones(2**18)
    with HeapPeak() as after:
        pass
    assert kept[0] == 1
    return meter.peak, after.peak


def test_memory_that_was_freed_before_does_not_extend_the_budget(launcher: LocalLauncher) -> None:
    assert not in_child(launcher, reuse_freed_memory)


@pytest.mark.parametrize(("tensors", "each"), [(1, 52 * MIB), (260, MIB // 5)])
def test_the_budget_is_exact_to_a_mebibyte(
    launcher: LocalLauncher, tensors: int, each: int
) -> None:
    """One large tensor, and many that are just above the mmap threshold."""
    need = tensors * (each // 4) * 4
    budgets = [need - MIB, need + 2 * MIB]
    assert in_child(launcher, fit_budgets, tensors, each, budgets) == [False, True]


@pytest.mark.skipif(
    HeapPeak.unavailable_reason() is not None, reason="the mark can't be reset here"
)
@pytest.mark.parametrize(("tensors", "each"), [(1, 52 * MIB), (26, 2 * MIB)])
def test_the_peak_is_the_largest_need(launcher: LocalLauncher, tensors: int, each: int) -> None:
    """Fault 10: not the memory that is left (1 MiB), and nothing of an earlier peak."""
    peak, after = in_child(launcher, measure_peaks, tensors, each)
    assert peak == pytest.approx(tensors * each, rel=0.02)
    assert after < MIB / 4
