"""Cases that tests of implementations share."""

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.external._library import External
from longseq_bench.testing.definition import Options

SEGMENTS: list[Options] = [
    {},
    {"segments": (24, 100), "dilation": (1, 3)},
    {"segments": (40, 64, 4096), "dilation": (2, 1, 7)},
    {"segments": (16, 64), "dilation": (1, 2), "mix": "groups"},
    {"segments": (30, 70, 256), "dilation": (2, 3, 5), "mix": "groups"},
]


def is_built_in(name: str) -> bool:
    """Return True if it can be imported and computes by itself: not a row of another library.

    tests/attention/external tests those.
    """
    if IMPLEMENTATIONS.unavailable_reason(name) is not None:
        return False
    kind = IMPLEMENTATIONS.get(name)
    return kind.__module__.startswith("longseq_bench.") and not issubclass(kind, External)


REGISTERED = [name for name in IMPLEMENTATIONS.names() if is_built_in(name)]
MANY = [name for name in REGISTERED if IMPLEMENTATIONS.get(name).many_ranks]
