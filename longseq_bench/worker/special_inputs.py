"""Inputs with which attention has a known result at every position.

Constant values: all values of a head are one vector, its neighbours have others. Weights of a
softmax add up to 1, so every output row that sees a key is that vector, for any scores and any
pattern. Queries are 64 times as large as normally distributed ones, so scores reach ±200.

known_scores.py has the others.
"""

from itertools import product

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DType, Workload
from longseq_bench.worker.check import GRADIENT_TOLERANCE
from longseq_bench.worker.passes import Pass
from longseq_bench.worker.prefix_sums import PrefixSums

OUTPUT_TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-8}
"""Allowed error of an output row over its largest magnitude: four roundings of the weights and of
the output."""

_HARD_FACTOR = 64.0
"""Factor of normally distributed queries that makes scores as large as 200; exact in any dtype."""


def chunk_rows(tokens: int) -> int:
    """Return how many rows are written or compared together.

    Few enough for a cache and for a device that is full, and so many that a GPU starts few kernels.
    """
    return min(max(4096, tokens // 256), 65_536)


def has_other(b: int, head: int) -> bool:
    """Return True for a head that has the queries of `SpecialInputs.other`.

    Heads whose numbers differ in one bit differ in this: neighbours, and most wrong indices.
    """
    return (b.bit_count() + head.bit_count()) % 2 == 1


class SpecialInputs:
    """Inputs of a workload by position, and what attention must return for them.

    By itself it has constant values: one vector for all values of a head; keys stay, and queries
    but for a factor. Positions are int64 tensors (n), on the device on which the rows are needed.

    name: for the record.  written: the inputs that `fill` replaces.
    float32_tolerance: the allowed error of a float32 row over its magnitude.
    gradients: those that are known, of dq, dk and dv; without a module's matrices.
    sums: what `expected` keeps on the device.
    other: inputs with the same keys and values, whose queries and outputs some heads have instead,
    so that no row is right in all heads (`has_other`); None: all heads have the same queries.
    sink: of every head, if the workload has sinks; constant values come back without their weight.
    """

    sink = -1e4
    name = "constant values"
    float32_tolerance = 6e-5
    written: tuple[str, ...] = ("v",)
    gradients: tuple[str, ...] = ()
    sums: tuple[PrefixSums, ...] = ()
    other: "SpecialInputs | None" = None

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def inputs(self, name: str, positions: Tensor) -> Tensor:
        """Return rows (n, D) of q and k, (n, Dv) of v and grad_out; v is multiplied by `factor`."""
        return torch.ones(len(positions), self.workload.v_head_dim)

    def expected(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows (n or 1, D) of `out` or of a gradient, and their magnitudes (n or 1).

        `out` is multiplied by `factor`; dk and dv are summed over query heads.
        """
        rows = torch.ones(1, self.workload.v_head_dim, device=positions.device).double()
        return rows, rows[:, 0]

    def factor(self, b: int, kv_head: int) -> Tensor | None:
        """Return the factor (Dv) of a head's values; None: 1 for all heads."""
        if self.workload.kv_dtype:
            return None
        # eighths from 1 to 1.875, which every dtype represents exactly, in another order each
        dims = torch.arange(self.workload.v_head_dim, dtype=torch.float64)
        step = 1 + 2 * (kv_head // 8 + b // 8)
        return 1 + (step * dims + 3 * kv_head + 5 * b) % 8 / 8

    def allowed(self, name: str, dtype: DType, positions: Tensor) -> Tensor:
        """Return the allowed errors of rows (n or none) over their magnitudes, without matrices."""
        tolerance = OUTPUT_TOLERANCE if name == "out" else GRADIENT_TOLERANCE
        return torch.tensor(self.float32_tolerance if dtype == "float32" else tolerance[dtype])

    def fill(self, attention: Attention, pass_: Pass, forward_only: bool = False) -> None:
        """Write the inputs over those of a pass; forward_only: the output's gradient stays."""
        at = attention.shard
        chunk, pairs = chunk_rows(self.workload.seq_len), list(product(at.batch, at.heads))
        odd = torch.tensor([has_other(*pair) for pair in pairs]).view(len(at.batch), -1).nonzero()
        names = ("q", at.queries), ("k", at.keys), ("v", at.keys), ("grad_out", at.queries)
        tensors: tuple[Tensor, ...] = pass_.inputs
        if pass_.grad_out is not None and not forward_only:
            tensors = *tensors, pass_.grad_out
        with torch.no_grad():
            for (name, positions), tensor in zip(names, tensors, strict=False):
                if name not in self.written:
                    continue
                # of a quantised cache: all that is written is 0 or ±1
                getattr(tensor, "scale", tensor[:0]).fill_(1)
                for start in range(0, len(positions), chunk):
                    own = slice(start, start + chunk)
                    some = torch.from_numpy(positions[own]).to(tensor.device)
                    tensor[:, :, own] = self.inputs(name, some).to(tensor)
                    if self.other and name == "q" and len(odd):
                        rows = self.other.inputs(name, some).to(tensor)
                        tensor[odd[:, 0], odd[:, 1], own] = rows
            for (i, b), (j, head) in product(enumerate(at.batch), enumerate(at.kv_heads)):
                if (factor := self.factor(b, head)) is not None:
                    pass_.inputs[2][i, j] *= factor.to(pass_.inputs[2])
            if "q" not in self.written:
                pass_.inputs[0].mul_(_HARD_FACTOR)
            if attention.sinks is not None:
                attention.sinks.fill_(self.sink)
