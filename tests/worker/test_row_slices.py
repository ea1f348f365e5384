"""Checks of whole tensors: what they find, and how little memory they take."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longseq_bench.distributed.group import Group
from longseq_bench.meters.memory import StoragePeak
from longseq_bench.worker import check
from longseq_bench.worker.check import all_finite, count_zero_rows

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = 2**14


def heads_next_to_tokens(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor (B, H, N, D) as fused kernels return it: (B, N, H, D) in memory."""
    b, h, n, d = shape
    return torch.ones(b, n, h, d, dtype=dtype).transpose(1, 2)


def memory_of(call: Callable[[Tensor], object], tensor: Tensor) -> int:
    """Return the peak of the tensors that a call with a tensor creates, in bytes."""
    meter = StoragePeak("cpu")
    with meter:
        tensor.detach()  # the meter counts it from here on
        before = meter.current
        call(tensor)
    assert before == tensor.nbytes
    return int(meter.peak) - before


@pytest.mark.parametrize("make", [heads_next_to_tokens, lambda s, d: torch.ones(s, dtype=d)])
def test_checks_need_little_memory_at_any_size(
    make: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that copies the output would not fit where a pass has used all memory."""
    monkeypatch.setattr(check, "MAX_BYTES", SMALL)
    # the sum of these numbers overflows float16, so every number is looked at
    out = make((2, 2, 4096, 32), torch.float16) * 0 + 60_000
    assert out.nbytes > 32 * SMALL
    alone = Group.alone()
    assert memory_of(lambda t: all_finite([t], alone), out) < 4 * SMALL
    assert memory_of(lambda t: count_zero_rows(t, alone), out) < 4 * SMALL


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("at", [(0, 0, 0, 0), (1, 2, 4095, 7)])
def test_one_bad_number_is_found(value: float, at: tuple[int, ...]) -> None:
    out = heads_next_to_tokens((2, 3, 4096, 8), torch.float32)
    assert check.is_finite(out)
    out[at] = value
    assert not check.is_finite(out)
    assert not all_finite([torch.ones(1, 1, 1, 1), out], Group.alone())
