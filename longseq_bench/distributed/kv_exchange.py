"""How keys and values come past every rank, and how their gradients find home.

A courier shows each rank the keys and values of all others, a piece at a time, by calling `visit`,
and while it does so the next piece is under way. What a rank does with its own keys it does in
shares, when `own` is called, so that there is always something to hide a transfer behind. With
gradients, `visit` returns those of the piece's keys and values that own queries cause; they come
back summed to the rank that holds the keys. A rank never holds more than its own keys and a few
pieces.

Shapes: k, v (B, Hk, N, D) of this rank; a piece (B, Hk, M, D).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from longseq_bench.distributed.group import Group, Pending
from longseq_bench.distributed.token_order import even
from longseq_bench.meta_mode import STEPS, limited

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Piece:
    """Local tokens start to stop of the rank that owns them."""

    owner: int
    start: int
    stop: int

    @property
    def own(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


Own = Callable[[int, int], None]
"""Told to do share i of so many of what concerns own keys alone."""

Visit = Callable[[Pair, Piece], None]
VisitBack = Callable[[Pair, Piece], Pair]
"""Keys and values of another rank's piece -> their gradients, (B, Hk, M, D), wide for sums."""


ALIGNED = 64
"""Tokens: kernels are up to a fifth slower on keys that are not a multiple of their vectors."""


class KVExchange(ABC):
    """counts: tokens that each rank holds.  tokens: at most so many to a piece.

    wire: what keys and values travel as, where that is not their own dtype.
    """

    def __init__(
        self, group: Group, counts: tuple[int, ...], tokens: int, wire: torch.dtype | None = None
    ) -> None:
        self.group, self.counts, self.wire = group, counts, wire
        self._unit = ALIGNED if tokens >= ALIGNED else 1
        units = [-(-count // self._unit) for count in counts]
        whole = -(-max(units) // max(1, tokens // self._unit))
        self.pieces = min(whole, max(1, min(units)))
        # of ranks that hold as many one is enough
        owners = {count: rank for rank, count in enumerate(counts)}.values()
        self.most = max(len(self.piece(rank, i)) for rank in owners for i in range(self.pieces))

    @abstractmethod
    def tour(self, k: Tensor, v: Tensor, visit: Visit, own: Own) -> None:
        """Show every piece of every other rank once."""

    @abstractmethod
    def tour_back(self, k: Tensor, v: Tensor, visit: VisitBack, own: Own, totals: Pair) -> None:
        """The same with gradients; what others return for own keys is added to totals, (B, Hk, N,
        D), to which `own` adds too."""

    @abstractmethod
    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """What this rank sends in one pass, by formula.

        token_bytes: of a token's key and value on the wire; gradient_bytes: of their gradients,
        in a pass back and forth (0: forward only).
        """

    def piece(self, owner: int, index: int) -> Piece:
        """The index-th piece of a rank, taken in turn from the first and the second half of what it
        holds: in zigzag order one half is seen by twice as many queries of a peer as the other,
        and ranks that work in step would wait for each other all the time."""
        count = self.counts[owner]
        half, turn = divmod(index, 2)
        place = half + turn * ((self.pieces + 1) // 2)
        span = even(-(-count // self._unit), self.pieces, place)
        start, stop = (min(count, self._unit * at) for at in span)
        return Piece(owner, start, stop)

    def _wire_dtype(self, t: Tensor) -> torch.dtype:
        return self.wire or t.dtype


class Slot:
    """A place for one piece of two tensors, each in a buffer of its own."""

    def __init__(self, like: Tensor, most: int, dtype: torch.dtype) -> None:
        self._shape = like.shape
        elements = like.shape[0] * like.shape[1] * most * like.shape[3]
        self._flat = [torch.zeros(elements, dtype=dtype, device=like.device) for _ in range(2)]

    def sized(self, tokens: int) -> Pair:
        """Contiguous (B, Hk, tokens, D) views."""
        b, h, _, d = self._shape
        first, second = (f[: b * h * tokens * d].view(b, h, tokens, d) for f in self._flat)
        return first, second

    def load(self, pair: Pair) -> None:
        """Copy a pair in."""
        for mine, other in zip(self.sized(pair[0].shape[2]), pair, strict=True):
            mine.copy_(other)


@dataclass(frozen=True)
class _Step:
    """The piece of this index that has come `hop` ranks far."""

    index: int
    hop: int


class Ring(KVExchange):
    """Each piece goes from its owner to the next rank and on, `hops` times (arXiv 2310.01889).

    The sums of a piece's gradients follow it one step behind, and the last rank that saw it hands
    them home. Each step's transfers start before what is computed in it and end after.
    """

    def __init__(
        self,
        group: Group,
        counts: tuple[int, ...],
        tokens: int,
        wire: torch.dtype | None = None,
        hops: int | None = None,
    ) -> None:
        super().__init__(group, counts, tokens, wire)
        self.hops = group.size - 1 if hops is None else hops

    def send(self, send: Pair, receive: Pair, hops: int = 1) -> Pending:
        """Start sending to the rank `hops` further on and receiving from as many back. Other
        transports override this."""
        size, rank = self.group.size, self.group.rank
        return self.group.exchange(send, receive, (rank + hops) % size, (rank - hops) % size)

    def tour(self, k: Tensor, v: Tensor, visit: Visit, own: Own) -> None:
        steps = self._some_steps()
        belt = _Belt(self, k, v)
        coming = belt.start(steps[0]) if steps else Pending()
        own(0, len(steps) + 1)
        for at, step in enumerate(steps):
            coming.wait()
            pair = belt.arrived(step)
            coming = belt.start(steps[at + 1]) if at + 1 < len(steps) else Pending()
            visit(pair, self._piece_at(step))
            del pair
            own(at + 1, len(steps) + 1)

    def tour_back(self, k: Tensor, v: Tensor, visit: VisitBack, own: Own, totals: Pair) -> None:
        steps = self._some_steps()
        belt = _Belt(self, k, v)
        leaving, arriving = (Slot(k, self.most, k.dtype) for _ in range(2))
        coming = belt.start(steps[0]) if steps else Pending()
        own(0, len(steps) + 1)
        for at, step in enumerate(steps):
            coming.wait()
            pair = belt.arrived(step)
            coming = belt.start(steps[at + 1]) if at + 1 < len(steps) else Pending()
            sums = self._pass_sums(steps[at - 1], leaving, arriving) if at else Pending()
            grads = visit(pair, self._piece_at(step))
            del pair
            own(at + 1, len(steps) + 1)
            sums.wait()
            if at:
                self._take_sums(steps[at - 1], arriving, grads, totals)
            leaving.load(grads)
            del grads
        if steps:
            self._pass_sums(steps[-1], leaving, arriving).wait()
            self._take_sums(steps[-1], arriving, totals, totals)

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Pieces of this rank and of those before it go on, `hops` in all; the sums of gradients
        go with them, and home."""
        size, rank = self.group.size, self.group.rank
        shown = sum(self.counts[(rank - hop) % size] for hop in range(self.hops))
        if not gradient_bytes:
            return shown * token_bytes
        sums = sum(self.counts[(rank - hop) % size] for hop in range(1, self.hops + 1))
        return 2 * shown * token_bytes + sums * gradient_bytes

    def _steps(self) -> Iterator[_Step]:
        hops = range(1, self.hops + 1)
        return (_Step(i, hop) for i in range(self.pieces) for hop in hops)

    def _some_steps(self) -> list[_Step]:
        """All; where loops are capped the first and the last, at which sums go home."""
        last = [_Step(self.pieces - 1, self.hops)] if self.hops and self.pieces else []
        count = self.pieces * self.hops - len(last)
        return [*limited(islice(self._steps(), count), STEPS), *last]

    def _piece_at(self, step: _Step) -> Piece:
        """The piece that is at this rank in a step."""
        return self.piece((self.group.rank - step.hop) % self.group.size, step.index)

    def _pass_sums(self, made: _Step, leaving: Slot, arriving: Slot) -> Pending:
        """The sums made in a step go after their piece, or home; as many arrive."""
        sent = leaving.sized(len(self._piece_at(made)))
        if made.hop < self.hops:
            then = self._piece_at(_Step(made.index, made.hop + 1))
            return self.send(sent, arriving.sized(len(then)))
        mine = self.piece(self.group.rank, made.index)
        return self.send(sent, arriving.sized(len(mine)), -self.hops)

    def _take_sums(self, made: _Step, arriving: Slot, grads: Pair, totals: Pair) -> None:
        """What came while a step's own sums left: sums so far of the piece that is here now, or
        those of an own piece, home."""
        if made.hop < self.hops:
            arrived = arriving.sized(grads[0].shape[2])
            for grad, sums in zip(grads, arrived, strict=True):
                grad.add_(sums)
            return
        mine = self.piece(self.group.rank, made.index)
        for total, sums in zip(totals, arriving.sized(len(mine)), strict=True):
            total[:, :, mine.own].add_(sums)


class _Belt:
    """Slots for pieces on their way: own ones packed to leave, the one here, the one coming."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._own = ring, (k, v)
        rooms = 3 if ring.hops else 0
        self._slots = [Slot(k, ring.most, ring.wire or k.dtype) for _ in range(rooms)]

    def start(self, step: _Step) -> Pending:
        """Start the transfer by which a step's piece comes here."""
        ring = self._ring
        packed, here, coming = self._slots
        before = ring._piece_at(_Step(step.index, step.hop - 1))
        if step.hop == 1:
            packed.load(_part(*self._own, before))
        source = packed if step.hop == 1 else here
        return ring.send(source.sized(len(before)), coming.sized(len(ring._piece_at(step))))

    def arrived(self, step: _Step) -> Pair:
        """The piece of a step whose transfer is done."""
        packed, here, coming = self._slots
        self._slots = [packed, coming, here]
        k, v = self._own
        first, second = coming.sized(len(self._ring._piece_at(step)))
        return first.to(k.dtype), second.to(v.dtype)


class Gather(KVExchange):
    """Every rank's piece at once, to all: all-gather, and back each part to its owner."""

    def tour(self, k: Tensor, v: Tensor, visit: Visit, own: Own) -> None:
        rooms = [self._room(k) for _ in range(min(2, self.pieces))]
        under_way = self._gather(k, v, 0, rooms[0])
        for index in limited(range(self.pieces), STEPS):
            own(index, self.pieces)
            under_way.wait()
            here = rooms[index % len(rooms)]
            if index + 1 < self.pieces:
                under_way = self._gather(k, v, index + 1, rooms[(index + 1) % len(rooms)])
            for owner in limited(self._others(), STEPS):
                piece = self.piece(owner, index)
                visit(_present(k, v, here, piece), piece)

    def tour_back(self, k: Tensor, v: Tensor, visit: VisitBack, own: Own, totals: Pair) -> None:
        room = self._room(k)
        for index in limited(range(self.pieces), STEPS):
            under_way = self._gather(k, v, index, room)
            own(index, self.pieces)
            under_way.wait()
            sums = [torch.zeros(r.shape, dtype=k.dtype, device=k.device) for r in room]
            for owner in limited(self._others(), STEPS):
                piece = self.piece(owner, index)
                grads = visit(_present(k, v, room, piece), piece)
                for whole, grad in zip(sums, grads, strict=True):
                    whole[owner, :, :, : len(piece)] = grad
            self._return(sums, totals, self.piece(self.group.rank, index))

    def bytes_sent(self, token_bytes: int, gradient_bytes: int = 0) -> int:
        """Every piece is as long as the longest; each goes to all others, and so its gradients
        come back from them."""
        tokens = (self.group.size - 1) * self.pieces * self.most
        if not gradient_bytes:
            return tokens * token_bytes
        return tokens * (2 * token_bytes + gradient_bytes)

    def _others(self) -> list[int]:
        """As a ring would bring them."""
        return [(self.group.rank - hop) % self.group.size for hop in range(1, self.group.size)]

    def _room(self, k: Tensor) -> list[Tensor]:
        shape = (self.group.size, *k.shape[:2], self.most, k.shape[3])
        return [torch.zeros(shape, dtype=self._wire_dtype(k), device=k.device) for _ in range(2)]

    def _gather(self, k: Tensor, v: Tensor, index: int, room: list[Tensor]) -> Pending:
        mine = self.piece(self.group.rank, index)
        works = []
        for whole, own in zip(room, _part(k, v, mine), strict=True):
            packed = torch.zeros(whole.shape[1:], dtype=whole.dtype, device=whole.device)
            packed[:, :, : len(mine)] = own
            works.append(self.group.all_gather(whole, packed))
        return Pending(works)

    def _return(self, sums: list[Tensor], totals: Pair, mine: Piece) -> None:
        """Each part to its owner, who adds what comes from all others."""
        for total, whole in zip(totals, sums, strict=True):
            back = torch.empty_like(whole)
            self.group.all_to_all(back, whole).wait()
            for rank in limited(range(self.group.size), STEPS):
                if rank != self.group.rank:
                    total[:, :, mine.own].add_(back[rank, :, :, : len(mine)])


def _part(k: Tensor, v: Tensor, piece: Piece) -> Pair:
    return k[:, :, piece.own], v[:, :, piece.own]


def _present(k: Tensor, v: Tensor, room: list[Tensor], piece: Piece) -> Pair:
    first, second = (whole[piece.owner, :, :, : len(piece)] for whole in room)
    return first.to(k.dtype), second.to(v.dtype)
