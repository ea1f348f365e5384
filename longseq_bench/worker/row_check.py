"""Check every output row with inputs whose result is known in closed form.

special_inputs.py and known_scores.py have the inputs, which cost O(N) next to the pass itself, at
any length and over ranks. Sampled rows with random inputs (check.py) see what these can't: scores
that are a little wrong.

Letters: B batch, Hq heads, Hk kv_heads, N tokens, D head_dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.worker.check import TINY, TOLERANCE, is_finite
from longseq_bench.worker.known_scores import choose_inputs
from longseq_bench.worker.passes import Pass
from longseq_bench.worker.special_inputs import SpecialInputs, chunk_rows, has_other


class EveryRowCheck:
    """Gives a pass special inputs, and judges every row of this rank's results.

    remaining: the inputs for passes of their own, after the warm-up; such a pass loses its inputs.
    done: the inputs that were tried.  reason: a sentence about rows that are wrong, or None.
    """

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._first, *self.remaining = choose_inputs(attention)
        self.done: list[str] = []
        self.reason: str | None = None

    @property
    def not_done(self) -> list[str]:
        """The inputs that were not tried."""
        return [i.name for i in (self._first, *self.remaining) if i.name not in self.done]

    @contextmanager
    def warm_up(self, pass_: Pass) -> Iterator[None]:
        """Check the forward that is run in the block, and restore the inputs after it."""
        if not self._attention.is_softmax:
            yield
            pass_.out = None
            return
        sinks = self._attention.sinks
        drawn = None if sinks is None else sinks.detach().clone()
        with self.check(pass_, self._first, forward_only=True):
            yield
        pass_.draw_again()
        if sinks is not None and drawn is not None:
            sinks.detach().copy_(drawn)

    @contextmanager
    def check(
        self, pass_: Pass, inputs: SpecialInputs, forward_only: bool = False
    ) -> Iterator[None]:
        """Check the pass that is run in the block. The inputs stay as they are then."""
        inputs.fill(self._attention, pass_, forward_only)
        kept, pass_.keep_output = pass_.keep_output, True
        yield
        pass_.keep_output = kept
        reason = find_wrong_rows(self._attention, inputs, pass_)
        for sums in inputs.sums:
            sums.clear()
        self.done += [inputs.name] if inputs.name not in self.done else []
        self.reason = self.reason or (reason and f"with {inputs.name}, {reason}")
        pass_.out = pass_.grads = None


def find_wrong_rows(attention: Attention, inputs: SpecialInputs, pass_: Pass) -> str | None:
    """Return a sentence about rows of the output or of a gradient that are wrong, or None."""
    covers_all = attention.is_exact or not attention.measures().get("uncovered", 1.0)
    known = inputs.gradients if covers_all and not attention.projections() else ()
    assert pass_.out is not None
    for name, got in {"out": pass_.out, **pass_.gradients}.items():
        # an output that is not kept was copied to the host
        rows = got.to(pass_.inputs[0].device)
        if name in ("out", *known) and (
            reason := _describe_wrong_rows(attention, inputs, name, rows, covers_all)
        ):
            return reason
    if not all(map(is_finite, pass_.gradients.values())):
        return "a gradient has values that are not finite"
    return None


def _describe_wrong_rows(
    attention: Attention, inputs: SpecialInputs, name: str, got: Tensor, covers_all: bool
) -> str | None:
    """Compare every row of a result; an error is relative to the size of its row."""
    shard, w, matrices = attention.shard, attention.workload, attention.projections()
    group = w.heads // w.kv_heads
    positions, heads, times = shard.queries, shard.heads, 1.0
    if name in ("dk", "dv"):
        positions, heads = shard.keys, shard.kv_heads
        # heads have the same inputs, so they round alike, and the errors of their sum add up
        times = max(1.0, group / 8)
    # what rows must be in heads with the same queries
    sources = [inputs, inputs.other] if name == "out" and inputs.other else [inputs]
    count, first = 0, ""
    chunk = chunk_rows(w.seq_len)
    for start in range(0, len(positions), chunk):
        own = slice(start, start + chunk)
        at = torch.from_numpy(positions[own]).to(got.device)
        known = [source.expected(name, at) for source in sources]
        limits = [source.allowed(name, attention.coarsest_dtype, at) * times for source in sources]
        if matrices:
            limits = [torch.tensor(TOLERANCE[attention.coarsest_dtype])]
        for (i, b), (j, head) in product(enumerate(shard.batch), enumerate(heads)):
            of = -1 if has_other(b, head) else 0
            (expected, size), allowed = known[of], limits[of]
            if name == "out":
                factor = inputs.factor(b, head // group)
                expected, size = _as_output(attention, expected, size, factor)
            part = got[i, j, own].detach().float()
            error = (part - expected.float()).abs().amax(-1) / size.clamp_min(TINY)
            wrong = ~(error <= allowed.to(error))
            if not covers_all:
                # a pattern may leave rows uncovered: their number was checked before
                wrong &= (part != 0).any(-1)
            number = int(wrong.sum())
            if number and not count:
                n = int(wrong.nonzero()[0])
                limit = float(allowed.expand(len(error))[n])
                first = f"token {positions[start + n]:,} of head {head} is {float(error[n]):.2g}"
                first += f" off (allowed {limit:.2g})"
            count += number
    if not count:
        return None
    total, what = got.shape[:3].numel(), "output" if name == "out" else name
    return f"{count:,} of {total:,} rows of {what} are wrong: {first}"


def _as_output(
    attention: Attention, rows: Tensor, sizes: Tensor, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Multiply rows (n, D) by the factor of a head's values and a module's matrices of v and out.

    Returns them with their sizes.
    """
    if factor is not None:
        factor = factor.to(rows)
        rows, sizes = rows * factor, sizes * factor.max()
    matrices = attention.projections()
    for name in ("v", "out"):
        if name in matrices:
            rows = rows @ matrices[name].detach().to(rows)
            sizes = rows.abs().amax(-1)
    return rows, sizes
