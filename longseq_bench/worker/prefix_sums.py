"""Sums of terms over all positions before an end, without an array over all positions."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad


class PrefixSums:
    """Sums of the terms of positions before an end, or of those from a start on.

    terms: the terms (n, C) of positions (n).  tokens: the number of positions.
    block: the number of positions whose sums are kept, of two blocks at a time.
    from_end: sum from the last position, so that sums over few last ones keep their digits.
    """

    def __init__(
        self, terms: Callable[[Tensor], Tensor], tokens: int, block: int, from_end: bool = False
    ) -> None:
        self._terms, self._tokens, self._block, self._from_end = terms, tokens, block, from_end
        self.clear()

    def __call__(self, ends: Tensor) -> Tensor:
        """Return the sums (n, C) over the positions p < end, or p >= end with `from_end`."""
        ends = self._tokens - ends if self._from_end else ends
        numbers = (ends - 1).clamp_min(0) // self._block
        found: Tensor | None = None
        for number in sorted(set(numbers.tolist())):
            here = numbers == number
            sums = self._sums_of(number, ends.device)[ends[here] - number * self._block]
            found = sums.new_empty(len(ends), sums.shape[1]) if found is None else found
            found[here] = sums
        assert found is not None
        return found

    def clear(self) -> None:
        """Drop the sums that are kept."""
        self._before: list[Tensor | int] = [0]
        self._kept: dict[int, Tensor] = {}

    def _sums_of(self, number: int, device: torch.device) -> Tensor:
        """Return the sums before each position of a block, and before the next block."""
        if number not in self._kept:
            while len(self._before) <= number:
                terms = self._terms_of(len(self._before) - 1, device)
                self._before.append(self._before[-1] + terms.sum(0, dtype=terms.dtype))
            if len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            terms = self._terms_of(number, device)
            sums = pad(terms.cumsum(0, dtype=terms.dtype), (0, 0, 1, 0))
            self._kept[number] = self._before[number] + sums
        return self._kept[number]

    def _terms_of(self, number: int, device: torch.device) -> Tensor:
        start = number * self._block
        positions = torch.arange(start, min(start + self._block, self._tokens), device=device)
        return self._terms(self._tokens - 1 - positions if self._from_end else positions)
