"""References for sparse attention: dense attention's FLOPs, standard attention's memory.

Pure formulas and ratios. A result is None if an input is None.
"""

from longseq_bench.core.cost import floor_bytes, key_bytes_per_token, query_bytes_per_token
from longseq_bench.core.model import Workload

Interval = tuple[float | None, float | None]


def standard_bytes(workload: Workload) -> int:
    """Peak bytes of standard attention: the whole score matrix S = B Hq N² b, several times.

    Forward: q, k, v and out (the floor), plus scores and weights: 2 S. Train: q, k, v, out, the
    gradients of out and v, plus weights, their gradient and that of the scores: 3 S. Causal: N²
    more bytes, for the mask. The peak of attention/exact/dense.py on a CPU is within 0.5 % of it at
    2,048 tokens and 4 heads.
    """
    w = workload
    scores = w.batch * w.heads * w.seq_len**2 * w.dtype_bytes
    held, times = floor_bytes(w), 2
    if w.train:
        held = w.seq_len * (3 * query_bytes_per_token(w) + 3 * key_bytes_per_token(w) // 2)
        times = 3
    return held + times * scores + (w.seq_len**2 if w.causal else 0)


def share_of_ideal(
    dense_s: float | None, density: float | None, sparse_s: float | None
) -> float | None:
    """Return dense time times density over sparse time: 1 if skipped pairs cost nothing."""
    if dense_s is None or density is None or not sparse_s:
        return None
    return dense_s * density / sparse_s


def share_interval(dense_s: Interval, density: float | None, sparse_s: Interval) -> Interval:
    """Return the lowest and highest share that the intervals (low, high) of both times allow."""
    low = share_of_ideal(dense_s[0], density, sparse_s[1])
    return low, share_of_ideal(dense_s[1], density, sparse_s[0])


def ratio(over: float | None, under: float | None) -> float | None:
    """Return over / under; None if either is unknown, or `under` is 0."""
    return over / under if over is not None and under else None
