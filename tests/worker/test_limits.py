"""The budget is a wall: a true need just under it passes, one just over it fails.

Every case runs in a fresh process, since a limit and an allocator's settings stay.
"""

import json
import subprocess
import sys

import pytest
import torch

from longseq_bench.meters.heap_peak import HeapPeak
from longseq_bench.worker import limits

MIB = 2**20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="no enforced budget and no mark to reset here"
)

NEEDS = """
import json, sys, torch
from longseq_bench.worker import limits
from longseq_bench.meters.heap_peak import HeapPeak

tensors, each, budgets = json.loads(sys.argv[1])
torch.ones(2**20).add_(1)
assert limits.use_exact_heap() is None

def need():
    kept = [torch.ones(each // 4) for _ in range(tensors)]
    return sum(float(t[-1]) for t in kept)

said = {}
for budget in budgets:
    assert limits.limit_heap(budget) is None
    try:
        need()
        said[budget] = "fits"
    except RuntimeError as error:
        said[budget] = str(error)
    limits.lift_heap_limit()
with HeapPeak() as meter:
    need()
    kept = torch.ones(2**18)
said["peak"] = meter.peak
with HeapPeak() as meter:
    pass
said["after"] = meter.peak
print(json.dumps(said))
"""


def said(tensors: int, each: int, budgets: list[int]) -> dict[str, str | int]:
    """What a fresh process says of a need of some tensors under some budgets, and its peak."""
    request = json.dumps([tensors, each, budgets])
    child = subprocess.run(
        [sys.executable, "-c", NEEDS, request], capture_output=True, text=True, check=True
    )
    return json.loads(child.stdout)


FREED = """
import torch
from longseq_bench.worker import limits

assert limits.use_exact_heap() is None
freed = torch.ones(2**22)
del freed
blocks = [torch.ones(2**18) for _ in range(40)]
del blocks[:-1]
limits.limit_heap(8 * 2**20)
try:
    again = [torch.ones(2**18) for _ in range(30)]
except RuntimeError:
    print("does not fit")
"""


def test_what_was_freed_before_is_not_used_outside_the_budget() -> None:
    """30 MiB under a budget of 8, after 39 MiB were freed below a block that is kept."""
    child = [sys.executable, "-c", FREED]
    told = subprocess.run(child, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "does not fit"


@pytest.mark.parametrize(("tensors", "each"), [(1, 52 * MIB), (52, MIB), (260, MIB // 5)])
def test_a_true_need_is_met_to_within_a_mebibyte(tensors: int, each: int) -> None:
    """One large tensor, some, and many just above what the allocator maps on its own."""
    need = tensors * (each // 4) * 4
    told = said(tensors, each, [need - MIB, need + 2 * MIB])
    assert "can't allocate memory" in str(told[str(need - MIB)])
    assert told[str(need + 2 * MIB)] == "fits"


@pytest.mark.skipif(
    HeapPeak.unavailable_reason() is not None, reason="the mark can't be reset here"
)
@pytest.mark.parametrize(("tensors", "each"), [(1, 52 * MIB), (26, 2 * MIB)])
def test_the_peak_is_what_was_needed_at_most(tensors: int, each: int) -> None:
    """Fault 10: not what is left (1 MiB here), and nothing of an earlier peak."""
    told = said(tensors, each, [])
    assert told["peak"] == pytest.approx(tensors * each, rel=0.02)
    assert int(told["after"]) < MIB / 4


def test_the_allocator_is_set_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    limits.use_allocator("expandable")
    limits.use_allocator("default")
    assert said == ["expandable_segments:True", "expandable_segments:False"]
