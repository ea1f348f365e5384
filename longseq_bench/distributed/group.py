"""The ranks that run one trial together, and the transfers between them.

The bytes that a rank sends are counted, so that they can be compared with the formula. A group of
one rank (`alone()`) transfers nothing. Values that do not belong to the attention (a verdict, a
maximum) go through the `control` group and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from longseq_bench.core.ranks import longseq_wait_for_peers

GROUP_TIMEOUT = timedelta(days=7)
"""Practically none: the launcher enforces time limits and detects hangs and lost ranks."""


@dataclass
class Traffic:
    """Bytes and transfers that a rank has sent; and the halves of a pass that are switched on.

    peers: for each group, by its ranks, those that this rank has sent to.
    """

    bytes_sent: int = 0
    transfers: int = 0
    peers: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    communicates: bool = True
    computes: bool = True


class Pending:
    """Transfers in progress. `wait` drops their handles, because these keep buffers alive.

    kept_alive: the tensor that a real transfer would keep alive until the wait.
    """

    def __init__(self, works: Sequence[Any] = (), kept_alive: Tensor | None = None) -> None:
        self._works, self._kept_alive = list(works), kept_alive

    def wait(self) -> None:
        """Block until every transfer is done. Raises RuntimeError if a rank is lost."""
        for work in self._works:
            longseq_wait_for_peers(work.wait)
        self._works, self._kept_alive = [], None


@dataclass(frozen=True)
class Group:
    """The group of ranks of a trial; this process is rank `rank` of `size`.

    ranks: global ranks of a subgroup, ascending; empty for the world.
    data, control: of torch; None: the group is not connected, and counts what it would send.
    communicators: process groups of subgroups by their ranks. With NCCL each takes up to hundreds
        of MB of device memory until the process ends, so each is made once.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = ()
    data: Any = None
    control: Any = None
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    communicators: dict[tuple[int, ...], Any] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def alone(cls) -> Group:
        """Return a group of one process, without communication."""
        return cls()

    @classmethod
    def world(cls, device: str) -> Group:
        """Return all ranks of an initialised torch.distributed.

        On CUDA the control messages have a gloo group of their own.
        """
        rank, size, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        control = everyone
        if device != "cpu":
            control = cast(Any, dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT))
        made = {tuple(range(size)): everyone}
        return cls(rank, size, (), everyone, control, communicators=made)

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Group:
        """Return the subgroup of the part that contains this rank. It shares this group's traffic.

        Every rank calls it with the same parts. A part is a list of global ranks, ascending; each
        rank of the world is in exactly one. Equal parts share one process group; a part of one rank
        has none.
        """
        assert all(list(ranks) == sorted(ranks) for ranks in parts), parts
        own_ranks = next(tuple(p) for p in parts if self.rank in p)
        if self.data is not None:
            for ranks in map(tuple, parts):
                # every rank takes part in making each, so all ranks have made the same ones
                if len(ranks) > 1 and ranks not in self.communicators:
                    handle = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
                    self.communicators[ranks] = handle
        return replace(
            self,
            rank=own_ranks.index(self.rank),
            size=len(own_ranks),
            ranks=own_ranks,
            data=self.communicators.get(own_ranks),
        )

    @contextmanager
    def only(self, *, compute: bool = True, communicate: bool = True) -> Iterator[None]:
        """Switch off half of a pass, to time the other half alone."""
        self.traffic.computes, self.traffic.communicates = compute, communicate
        try:
            yield
        finally:
            self.traffic.computes = self.traffic.communicates = True

    @property
    def computes(self) -> bool:
        """True unless communication alone is timed."""
        return self.traffic.computes

    # ---- counted transfers ---------------------------------------------------------------------

    def exchange(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], to: int, source: int
    ) -> Pending:
        """Start sending to rank `to` and receiving from rank `source` of this group.

        Tensors are contiguous, and none is both sent and received.
        """
        if not self._sends(sum(t.nbytes for t in send), to) or self.data is None:
            return Pending()
        ops = [dist.P2POp(dist.isend, t, self._peer(to), self.data) for t in send]
        ops += [dist.P2POp(dist.irecv, t, self._peer(source), self.data) for t in receive]
        return Pending(dist.batch_isend_irecv(ops))

    def all_gather(self, out: Tensor, own: Tensor) -> Pending:
        """Start filling `out` (size, *own.shape) with every rank's `own`."""
        # NCCL's own gather and scatter send to the next rank
        if not self._sends((self.size - 1) * own.nbytes, (self.rank + 1) % self.size):
            out[self.rank].copy_(own)
            return Pending()
        if self.data is None:
            return Pending(kept_alive=own)
        if out.device.type == "cpu":
            return self._pairwise(list(out), [own] * self.size)
        # every backend accepts tensors joined along the first dimension
        joined = out.flatten(0, 1)
        return Pending([dist.all_gather_into_tensor(joined, own, self.data, async_op=True)])

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> Pending:
        """Start filling `out` with the sum over ranks of their parts[rank].

        parts: (size, *out.shape).
        """
        if not self._sends((self.size - 1) * out.nbytes, (self.rank + 1) % self.size):
            out.copy_(parts[self.rank])
            return Pending()
        if self.data is None:
            return Pending()
        joined = parts.flatten(0, 1)
        return Pending([dist.reduce_scatter_tensor(out, joined, group=self.data, async_op=True)])

    def all_to_all(
        self,
        out: Tensor,
        sent: Tensor,
        out_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
    ) -> Pending:
        """Start sending part r of `sent` to each rank r, and receiving part r of `out` from it.

        Sizes are those of the parts along dimension 0; None: equal parts.
        """
        own = sent_sizes[self.rank] if sent_sizes else sent.shape[0] // self.size
        if not self._sends((sent.shape[0] - own) * sent[:1].nbytes, *range(self.size)):
            if out.shape == sent.shape:
                out.copy_(sent)
            return Pending()
        if self.data is None:
            return Pending(kept_alive=sent)
        if out.device.type == "cpu":
            out_parts = torch.split(out, out_sizes or out.shape[0] // self.size)
            sent_parts = torch.split(sent, sent_sizes or sent.shape[0] // self.size)
            return self._pairwise(out_parts, sent_parts)
        work = dist.all_to_all_single(out, sent, out_sizes, sent_sizes, self.data, async_op=True)
        return Pending([work])

    def _pairwise(self, out: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        """Start sending sent[r] to each rank r and receiving out[r] from it.

        gloo's own all-gather keeps a second copy of its result until after the wait.
        """
        out[self.rank].copy_(sent[self.rank])
        others = [r for r in range(self.size) if r != self.rank]
        ops = [dist.P2POp(dist.isend, sent[r], self._peer(r), self.data) for r in others]
        ops += [dist.P2POp(dist.irecv, out[r], self._peer(r), self.data) for r in others]
        return Pending(dist.batch_isend_irecv(ops))

    def _sends(self, nbytes: int, *peers: int) -> bool:
        """Count bytes as sent to ranks of this group; False if nothing is sent now."""
        if self.size == 1 or not self.traffic.communicates:
            return False
        self.count(nbytes)
        self.traffic.peers.setdefault(self.ranks, set()).update({*peers} - {self.rank})
        return True

    def count(self, nbytes: int) -> None:
        """Count bytes as sent, for transports that don't send through this class."""
        self.traffic.bytes_sent += nbytes
        self.traffic.transfers += 1

    # ---- control, not counted ------------------------------------------------------------------

    def all_max(self, *values: float) -> list[float]:
        """Return the largest of each value over all ranks; the same on every rank."""
        if self.size == 1 or self.control is None:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64)
        longseq_wait_for_peers(dist.all_reduce, largest, dist.ReduceOp.MAX, group=self.control)
        return largest.tolist()

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place, and return it."""
        if self.size > 1 and self.control is not None:
            longseq_wait_for_peers(dist.all_reduce, tensor, group=self.control)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.size > 1 and self.control is not None:
            longseq_wait_for_peers(dist.barrier, group=self.control)

    def _peer(self, rank: int) -> int:
        return self.ranks[rank] if self.ranks else rank
