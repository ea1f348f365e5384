"""Encode a column as its distinct texts, in order of value, and one small number per row.

Sorting by the numbers sorts by value. The size depends on how much the rows differ: a page
can hold a hundred thousand of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longseq_bench.reports.document import MISSING, Cell, Kind, Spread, format_cell

MISSING_CODE = -1

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Packed:
    """A column of text as codes.

    texts: the distinct texts, smallest value first.  codes: index of each row's text; -1: none.
    """

    texts: list[str]
    codes: list[int]

    def text(self, i: int) -> str:
        """Return the text of a row."""
        code = self.codes[i]
        return MISSING if code == MISSING_CODE else self.texts[code]


def pack(cells: Sequence[Cell], kind: Kind) -> Packed:
    """Encode cells: numbers before text, text by the numbers in it.

    Equal texts of successive values share one code.
    """
    # Not a set: its order of strings changes from process to process.
    distinct = sorted(dict.fromkeys(cell for cell in cells if cell is not None), key=_order)
    texts: list[str] = []
    codes: dict[Cell, int] = {None: MISSING_CODE}
    for cell in distinct:
        text = format_cell(cell, kind)
        if not texts or texts[-1] != text:
            texts.append(text)
        codes[cell] = len(texts) - 1
    return Packed(texts, [codes[cell] for cell in cells])


def _order(cell: str | int | float | Spread) -> tuple[Any, ...]:
    if isinstance(cell, str):
        parts = _NUMBER.split(cell.casefold())
        return (1, [float(p) if i % 2 else p for i, p in enumerate(parts)], cell)
    value = cell.value if isinstance(cell, Spread) else cell
    return (0, value) if value == value else (2,)
