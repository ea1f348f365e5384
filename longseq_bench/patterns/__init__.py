"""Patterns: index arithmetic in numpy that says which query sees which key."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
"""Positions, or other integers."""

Tokens = Ints | tuple[range, ...]
"""Positions of tokens, in some order: an array, or runs, of which no array is made."""
