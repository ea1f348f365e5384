"""Masks: the keys that each query sees in exact attention, exact to a token.

full                     every key
causal                   the keys up to the query's own position
sliding-window:W         of those the last W, the query's own included (Longformer, arXiv
                         2004.05150; as in Mistral 7B, arXiv 2310.06825)
prefix:P                 the keys up to its own position, and the first P (prefix LM, arXiv
                         1910.10683)
documents:LENGTHS        of documents that are packed into one sequence: the keys of its own
                         document up to its own position
full-documents:LENGTHS   every key of its own document
chunked:C                the same as documents:C, as Llama 4 has it

LENGTHS is one number (all documents have this length, the last one the rest), several numbers with
commas between them that add up to the sequence, or the name of a distribution of DISTRIBUTIONS,
from which lengths are drawn, the same for equal seeds: chatqa2, chatqa2@7 (seed 7).

A mask is one interval of keys per query, and neither end ever moves back from one query to the
next. Everything that depends on masks relies on it: patterns/visible_keys.py has the ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, cycle
from random import Random

from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.units import format_tokens, parse_tokens

FULL, CAUSAL = "full", "causal"
WINDOW, PREFIX = "sliding-window", "prefix"
DOCUMENTS, FULL_DOCUMENTS, CHUNKED = "documents", "full-documents", "chunked"
KINDS = (FULL, CAUSAL, WINDOW, PREFIX, DOCUMENTS, FULL_DOCUMENTS, CHUNKED)
_CHATQA2 = (0.16, 0.05, 0.04, 0.06, 0.08, 0.21, 0.4, 0.2, 0.05, 0.04, 0.01, 0.01)
DISTRIBUTIONS = {
    "chatqa2": tuple((2**n if n > 10 else 1, 2 ** (n + 1), w) for n, w in enumerate(_CHATQA2, 10))
}
"""Lengths of documents in bins: the first and last length of each, and its weight; within a bin all
are equally frequent. chatqa2: long training data of ChatQA 2 (arXiv 2407.14482), in the bins and
weights that MagiAttention's benchmark of kernels uses (SandAI-org/MagiAttention, exps/attn)."""


@dataclass(frozen=True)
class Mask:
    """A mask of one of KINDS.

    size: tokens of a window, a prefix, or of every document.  lengths: tokens of each document.
    distribution, seed: of the documents' lengths.
    """

    kind: str
    size: int = 0
    lengths: tuple[int, ...] = ()
    distribution: str = ""
    seed: int = 0

    @property
    def is_causal(self) -> bool:
        """True if no query sees a key after its own position."""
        return self.kind in (CAUSAL, WINDOW, DOCUMENTS, CHUNKED)

    @property
    def is_plain(self) -> bool:
        """True for a full or causal mask, which every implementation knows."""
        return self.kind in (FULL, CAUSAL)

    @property
    def has_documents(self) -> bool:
        """True if the sequence is a row of documents, or of chunks."""
        return self.kind in (DOCUMENTS, FULL_DOCUMENTS, CHUNKED)

    @property
    def text(self) -> str:
        """The mask as it is written in records: sizes in tokens, without suffixes."""
        if self.distribution:
            value = self.distribution + (f"@{self.seed}" if self.seed else "")
        else:
            value = ",".join(map(str, self.lengths)) if self.lengths else str(self.size or "")
        return f"{self.kind}:{value}" if value else self.kind

    @property
    def label(self) -> str:
        """The mask in words for people: "sliding window 4k", "3 documents", "documents of 4k"."""
        name = self.kind.replace("-", " ")
        if self.distribution:
            return f"{name} {self.text.partition(':')[2]}"
        if self.lengths:
            return f"{len(self.lengths)} {name}"
        if self.has_documents and self.kind != CHUNKED:
            return f"{name} of {format_tokens(self.size)}"
        return f"{name} {format_tokens(self.size)}" if self.size else name

    def document_lengths(self, tokens: int) -> tuple[int, ...]:
        """Return the tokens of each document of a sequence.

        A list is repeated until the sequence is full, and its last document cut: a warm-up, a
        prediction or a search has other lengths than the list adds up to.
        """
        return _fill(self, tokens)

    def check_tokens(self, tokens: int) -> None:
        """Raise UserError if the lengths of a list do not add up."""
        if self.lengths and (total := sum(self.lengths)) != tokens:
            raise UserError(
                f"the {len(self.lengths)} documents of the mask add up to {total:,} tokens, but "
                f"the sequence has {tokens:,}; one number or a distribution fits every length"
            )

    def visible_pairs(self, tokens: int) -> int:
        """Return the query-key pairs that a head computes over a sequence."""
        return self.pairs_before(tokens, tokens)

    def pairs_before(self, position: int, tokens: int) -> int:
        """Return the query-key pairs of all queries before a position of a sequence."""
        triangle = position * (position + 1) // 2
        if self.has_documents:
            squares, start, length = self._documents_before(position, tokens)
            inside = position - start
            if self.is_causal:
                return (squares + start + inside * (inside + 1)) // 2
            return squares + inside * length
        if self.kind == WINDOW:
            hidden = max(0, position - self.size)
            return triangle - hidden * (hidden + 1) // 2
        if self.kind == PREFIX:
            prefix = min(self.size, tokens)
            inside = min(prefix, position)
            return triangle + inside * prefix - inside * (inside + 1) // 2
        return triangle if self.kind == CAUSAL else position * tokens

    def _documents_before(self, position: int, tokens: int) -> tuple[int, int, int]:
        """Return the squares of the lengths before a position, and start and length of the next.

        Equal documents are not listed: a record may have a trillion of them.
        """
        lengths = self.lengths or (self.size,)
        if self.distribution:
            lengths = self.document_lengths(tokens)
        times, rest = divmod(position, sum(lengths))
        squares, start = times * sum(n * n for n in lengths), position - rest
        for length in lengths:
            if start + length > position:
                break
            squares, start = squares + length**2, start + length
        return squares, start, min(length, tokens - start)


@lru_cache(maxsize=256)
def parse_mask(text: str) -> Mask:
    """Return the mask that a text means: see the module's docstring.

    Raises UserError or UnknownNameError: one sentence.
    """
    kind, colon, value = text.strip().partition(":")
    if kind not in KINDS:
        raise UnknownNameError("mask", kind, KINDS)
    if kind in (FULL, CAUSAL):
        if colon:
            raise UserError(f"mask {text!r}: {kind} takes no number; write {kind}")
        return Mask(kind)
    if not value:
        raise UserError(f"mask {text!r} needs a number of tokens; write {kind}:4k")
    if kind in (WINDOW, PREFIX, CHUNKED):
        return Mask(kind, size=_tokens(text, value))
    name, _, seed = value.partition("@")
    if not name.replace(",", "").strip()[:1].isdigit():
        if name not in DISTRIBUTIONS:
            raise UnknownNameError("distribution of a mask", name, DISTRIBUTIONS)
        if seed and not re.fullmatch("[0-9]{1,18}", seed):
            raise UserError(f"mask {text!r}: seed {seed!r} is not a whole number")
        return Mask(kind, distribution=name, seed=int(seed or 0))
    lengths = tuple(_tokens(text, part) for part in value.split(","))
    return Mask(kind, size=lengths[0]) if len(lengths) == 1 else Mask(kind, lengths=lengths)


def _tokens(mask: str, value: str) -> int:
    try:
        return parse_tokens(value)
    except UserError as error:
        raise UserError(f"mask {mask!r}: {error}") from None


@lru_cache(maxsize=64)
def _fill(mask: Mask, tokens: int) -> tuple[int, ...]:
    """Return lengths of documents until the sequence is full; the last one is cut to the rest."""
    lengths: Iterator[int] = cycle(mask.lengths or (mask.size,))
    if mask.distribution:
        lengths = _draw(mask.distribution, mask.seed)
    filled, left = [], tokens
    while left:
        filled.append(min(left, next(lengths)))
        left -= filled[-1]
    return tuple(filled)


def _draw(name: str, seed: int) -> Iterator[int]:
    bins, random = DISTRIBUTIONS[name], Random(f"{name} {seed}")
    upto = list(accumulate(weight for _, _, weight in bins))
    while True:
        ((first, last, _),) = random.choices(bins, cum_weights=upto)
        yield first + int(random.random() * (last - first))
