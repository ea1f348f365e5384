"""The exact kernel: attention of some queries to some keys on one device, with the log-sum-exp.

Ring, collective, Ulysses, USP and tiles of dilated attention call one of these. As in
FlashAttention (arXiv 2205.14135) a backward needs only the output and the log-sum-exp. Both may
belong to a larger softmax of which these keys are a part; the gradients are then this part's
contribution. Every head_dim is contiguous in memory: `kernels.base.attend` copies other tensors.

Shapes: q (B, Hq, Nq, D); k (B, Hk, Nk, D); v (B, Hk, Nk, Dv); out, grad_out (B, Hq, Nq, Dv); Hk
divides Hq; Dv is D unless the workload has another v_head_dim; lse (B, Hq, Nq), natural, float32
(float64 for float64). `causal` means the lower triangle and needs Nq == Nk. A mask is (Nq, Nk),
True where a query sees a key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from longseq_bench.core.errors import UnknownNameError, UnsupportedError
from longseq_bench.core.hardware import KernelRate
from longseq_bench.core.registry import Registry
from longseq_bench.core.workload import PLAIN_SCORES, Scores
from longseq_bench.kernels.base import Mask, Pair, Queries, Triple
from longseq_bench.kernels.exact._cuda import find_figures
from longseq_bench.kernels.merge import merge_part, put_rows

K = TypeVar("K", bound="ExactKernel")
AUTO = "auto"


@dataclass(frozen=True)
class Use:
    """The task of a kernel.

    device: kind of device.  masked: some calls have a mask.  v_head_dim: 0: that of q and k.
    causal: the whole attention is.  elements: of the largest tensor.  packages: False: `auto` takes
    no kernel of an optional package.  scores: those of all calls.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    train: bool
    masked: bool = False
    v_head_dim: int = 0
    causal: bool = False
    elements: int = 0
    packages: bool = True
    scores: Scores = PLAIN_SCORES


class ExactKernel(ABC):
    """Forward and backward of one softmax over all given keys.

    A subclass implements `_forward` and `_backward`. It may override `merge` and `add_gradients` if
    it can add to earlier results without temporaries.
    calls: number of forward and backward calls that this kernel ran, masked ones by another kernel
    not included.
    """

    name: ClassVar[str]
    device: ClassVar[str]
    """The kind of device that it runs on."""
    takes_masks: ClassVar[bool] = False
    takes_v_head_dim: ClassVar[bool] = False
    """True if v may have another head_dim; for other kernels v is padded to that of q and k."""
    takes_scores: ClassVar[tuple[str, ...]] = ()
    """What it computes of core.workload.Scores, by name."""
    default_priority: ClassVar[int | None] = None
    """The priority for `auto`, unless it depends on the task; None: never."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.calls: Counter[str] = Counter()
        self._masked: ExactKernel | None = None

    @classmethod
    def unavailable_reason(cls, use: Use) -> str | None:
        """Return the reason why it can't do this here; None if it can."""
        if use.device != cls.device:
            return f"it runs on {cls.device} only"
        for name in use.scores.given:
            if name not in cls.takes_scores:
                able = [k.name for k in kernels_of(use.device) if name in k.takes_scores]
                return f"it computes no {name}; {', '.join(able)}, dense and flex do"
        if use.masked and not cls.takes_masks:
            return "it takes no mask"
        if use.v_head_dim > use.head_dim and not cls.takes_v_head_dim:
            return f"it needs a v_head_dim of at most {use.head_dim}, the head_dim"
        return None

    @classmethod
    def priority(cls, use: Use) -> int | None:
        """Return the rank in which `auto` prefers it, after those with figures; None: never."""
        return cls.default_priority

    @classmethod
    def auto_reason(cls, use: Use) -> str | None:
        """Return why `auto` does not take it where it can run; None if it does."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        mask: Tensor | None = None,
        keep_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, Hq, Nq, D) and the log-sum-exp (B, Hq, Nq).

        Rows that see nothing get 0 and -inf. keep_lse: False if the log-sum-exp is not needed; it
        may be empty then.
        """
        own = self._for(mask)
        own.calls["forward"] += 1
        out, lse = own._forward(q, k, own._padded(v, q), causal, mask, keep_lse)
        return _cut(out, v), lse

    def backward(
        self, queries: Queries, keys: Pair, causal: bool = False, mask: Tensor | None = None
    ) -> Triple:
        """Return the gradients of q, k, v, given output and log-sum-exp of the whole softmax."""
        own = self._for(mask)
        own.calls["backward"] += 1
        (grad_out, q, out, lse), (k, v) = queries, keys
        padded = own._padded(grad_out, q), q, own._padded(out, q), lse
        dq, dk, dv = own._backward(padded, (k, own._padded(v, q)), causal, mask)
        return dq, dk, _cut(dv, v)

    def merge(
        self, q: Tensor, keys: Pair, sums: Pair, causal: bool = False, mask: Tensor | None = None
    ) -> None:
        """Add these keys to the softmax that sums (out and lse) hold, in place.

        Sums are wide (float32, or float64 for float64); rows without any key so far are 0 and -inf.
        """
        merge_part(*sums, *self.forward(q, *keys, causal, mask))

    def add_gradients(
        self, queries: Queries, keys: Pair, sums: Triple, causal: bool = False, mask: Mask = None
    ) -> None:
        """Add the gradients that `backward` returns to sums, which are wide."""
        put_rows(sums, self.backward(queries, keys, causal, mask), add=True)

    def ran(self) -> Iterator[str]:
        """Yield the names of the kernels that have run for this one."""
        if self.calls:
            yield self.name
        if self._masked and self._masked.calls:
            yield f"{self._masked.name} (masked)"

    def _pads(self, q: Tensor, v: Tensor) -> bool:
        return not self.takes_v_head_dim and v.shape[3] < q.shape[3]

    def _padded(self, t: Tensor, q: Tensor) -> Tensor:
        """Return values or an output with the head_dim of q, for kernels that know one only.

        Zeros change no score and no product. The padded copies are part of the measured memory.
        """
        return pad(t, (0, q.shape[3] - t.shape[3])) if self._pads(q, t) else t

    def _for(self, mask: Tensor | None) -> ExactKernel:
        """Return the kernel for a call: another one if this one takes no mask."""
        if mask is None or self.takes_masks:
            return self
        if self._masked is None:
            self._masked = select(AUTO, replace(self.use, masked=True))[0]
        return self._masked

    @abstractmethod
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, keep_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """See `forward`."""

    @abstractmethod
    def _backward(self, queries: Queries, keys: Pair, causal: bool, mask: Tensor | None) -> Triple:
        """See `backward`."""


def _cut(t: Tensor, v: Tensor) -> Tensor:
    """Return a tensor without the padding of v; the tensor itself if there is none."""
    return t if t.shape[3] == v.shape[3] else t[..., : v.shape[3]].contiguous()


KERNELS: Registry[type[ExactKernel]] = Registry(
    "attention kernel", "longseq_bench.kernels.exact", "longseq_bench.kernels"
)


def exact_kernel(name: str) -> Callable[[type[K]], type[K]]:
    """Return a decorator that registers an exact kernel under a name."""

    def add(kernel: type[K]) -> type[K]:
        kernel.name = name
        KERNELS.register(name)(kernel)
        return kernel

    return add


def kernels_of(device: str) -> list[type[ExactKernel]]:
    """Return the kernels for a kind of device that can be imported, in the order of their names."""
    known = [name for name in KERNELS.names() if KERNELS.unavailable_reason(name) is None]
    return [k for k in map(KERNELS.get, known) if k.device == device]


def check_name(requested: str, kind: str = KERNELS.kind, others: Sequence[str] = ()) -> None:
    """Raise UnknownNameError, with the nearest name, if no kernel is called so.

    kind: what the name is of, for the message.  others: further names that are allowed.
    """
    known = [AUTO, *KERNELS.names(), *others]
    if requested not in known:
        raise UnknownNameError(kind, requested, known)


def select(requested: str, use: Use) -> tuple[ExactKernel, dict[str, str]]:
    """Return a kernel, and facts for the record.

    They say why `auto` did not take a faster kernel, which figure decided, and that one pads v.
    Raises UnknownNameError for a name that no kernel has, UnsupportedError with the reason for one
    that can't do this here.
    """
    if requested != AUTO:
        kernel = KERNELS.get(requested)
        if reason := kernel.unavailable_reason(use):
            raise UnsupportedError(f"kernel={requested}: {reason}")
        return kernel(use), _padding(kernel, use)
    facts: dict[str, str] = {}
    figures = find_figures(use)
    for kernel in _preferred(use, figures):
        try:
            if reason := kernel.unavailable_reason(use) or kernel.auto_reason(use):
                raise UnsupportedError(reason)
            found = kernel(use)
        except UnsupportedError as error:  # also from a package of an unknown version
            facts[f"not_{kernel.name}"] = str(error)
            continue
        if figure := figures.get(kernel.name):
            facts["kernel_choice"] = figure.words(use.train)
        return found, facts | _padding(kernel, use)
    reasons = "; ".join(f"{name.removeprefix('not_')}: {why}" for name, why in facts.items())
    raise UnsupportedError(
        f"no kernel of exact attention takes head_dim {use.head_dim} in {str(use.dtype)[6:]} on "
        f"{use.device}" + (f" ({reasons})" if reasons else "")
    )


def _padding(kernel: type[ExactKernel], use: Use) -> dict[str, str]:
    if use.v_head_dim in (0, use.head_dim) or kernel.takes_v_head_dim:
        return {}
    return {"padded_v": f"from {use.v_head_dim} to {use.head_dim} elements per head, in the kernel"}


def _preferred(use: Use, figures: Mapping[str, KernelRate]) -> list[type[ExactKernel]]:
    """Return the kernels that `auto` may take for this device, the preferred one first."""
    ranks = {k: rank for k in kernels_of(use.device) if (rank := k.priority(use)) is not None}
    rates = {name: figure.flops(use.train) or 0.0 for name, figure in figures.items()}
    return sorted(ranks, key=lambda k: (-rates.get(k.name, 0.0), -ranks[k], k.name))
