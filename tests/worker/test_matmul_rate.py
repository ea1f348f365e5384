"""The rate of matrix products, with replaced clocks."""

import pytest
import torch

from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.meters.clock import Clock
from longseq_bench.worker import matmul_rate
from longseq_bench.worker.matmul_rate import measure_matmul_rate


def test_products_grow_until_one_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """One FLOP takes a nanosecond; the first product of a size is slower and not counted."""
    sizes: list[int] = []
    multiply = torch.mm

    class Stopped(Clock):
        def stop(self) -> None:
            self.wall.append(2e-9 * sizes[-1] ** 3 * (9 if not self.wall else 1))

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(len(a))
        # equal numbers need less power, and a GPU multiplies them faster
        assert a.std() > 0.9
        assert not torch.equal(a, b)
        multiply(a, b, out=out)

    monkeypatch.setattr(matmul_rate, "clock_for", lambda device: Stopped())
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "no compiler")
    assert measure_matmul_rate(Group.alone(), "cpu", "float32") == pytest.approx(1e9)
    assert sorted(set(sizes)) == [128, 256]


def test_the_compiled_kernel_counts_if_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := native.unavailable_reason():
        pytest.skip(reason)
    assert native.product_flops(3) % 3 == 0
    monkeypatch.setattr(matmul_rate, "_native_rate", lambda group: 1e30)
    assert measure_matmul_rate(Group.alone(), "cpu", "bfloat16") == 1e30
