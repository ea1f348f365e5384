"""Changes of a pass's inputs: no two passes of a trial see equal bytes, and every result is known.

A result that was looked up must not count as a fast one. So all inputs change before each pass,
outside the clock, in place and exactly in floating point. With signs s and t, a sign g, and powers
of two a and e, each tensor is that of the checked pass times

    q: s a    k: s / a    v: t e    grad_out: t g    out: t e    dv: t g
    dq: s g e / a    dk: s g e a

s has a sign for each column of head_dim, t one for each of v_head_dim. Where matrices mix columns,
and in a quantised cache, whose scales change alone, each KV head of each row of the batch has a
sign instead. Scores and work stay the same, unless signs of q's columns change alone. The v of a
latent is a part of k, with its factors. Drawing new inputs would take twenty times as long.
"""

import random
from math import prod

import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.kernels.quantised import Quantised

_POWERS = 4
"""Powers of two are 1 to 8; of float16, whose small numbers have fewer bits, only 1."""


class InputChanges:
    """The changes of a trial's passes, the same on all ranks. seed: that of the trial's inputs.

    made: the factors that the inputs have now, by name.
    """

    def __init__(self, attention: Attention, seed: int) -> None:
        self._attention, self._random = attention, random.Random(seed)
        self._passes = self._step = 0
        self.made: dict[str, Tensor] = {}

    def make(self, inputs: dict[str, Tensor], new_scores: bool) -> None:
        """Change the inputs of the next pass, by name."""
        attention, w = self._attention, self._attention.workload
        shapes: list[tuple[int, ...]] = [(w.head_dim,), (w.v_head_dim,)]
        if attention.projections() or attention.chooses_layout or w.kv_dtype:
            shapes = [(w.batch, w.kv_heads)] * 2
        sizes = [*map(prod, shapes)]
        powers = 1 if attention.coarsest_dtype == "float16" else _POWERS
        count = powers**2 * 2 ** sum(sizes)
        # multiples of an odd number differ from each other, modulo a power of two
        self._step = self._step or self._random.randrange(1, count, 2)
        self._passes += 1
        code, self._e = divmod(self._passes * self._step % count, powers)
        code, self._a = divmod(code, powers)
        parts = torch.split(_signs(code, sum(sizes)), sizes)
        self._s, self._t = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        of_q = self._random.randrange(1, 2**w.head_dim) if new_scores else 0
        self._of_q_alone = _signs(of_q, w.head_dim)
        for name, tensor in inputs.items():
            factor = self.factor(name)
            tensor = tensor.scale[..., None] if isinstance(tensor, Quantised) else tensor
            with torch.no_grad():
                tensor.mul_((factor / self.made.get(name, 1.0)).to(tensor))
            self.made[name] = factor

    def factor(self, name: str) -> Tensor:
        """Return the factor of q, k, v, grad_out, out, dq, dk or dv, which broadcasts to it."""
        w = self._attention.workload
        if w.latent and name in ("v", "out"):
            return self.factor("k")[: w.v_head_dim]
        a, e, g = 2.0**self._a, 2.0**self._e, (-1.0) ** self._passes
        number = {"q": a, "k": 1 / a, "v": e, "out": e, "dq": g * e / a, "dk": g * e * a}
        signs = self._s if name in ("q", "k", "dq", "dk") else self._t
        if signs.dim() > 1:
            shard = self._attention.shard
            of_queries = [head * w.kv_heads // w.heads for head in shard.heads]
            heads = [*shard.kv_heads] if name in ("k", "v", "dk", "dv") else of_queries
            signs = signs[[*shard.batch]][:, heads, None, None]
        factor = signs.mul(number.get(name, g))
        return factor * self._of_q_alone if name == "q" else factor


def _signs(number: int, count: int) -> Tensor:
    return torch.tensor([1.0 - 2 * (number >> bit & 1) for bit in range(count)])
