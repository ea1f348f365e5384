"""Formulas for FLOPs, bytes and visible pairs.

Letters: n tokens, B batch, Hq heads, Hk kv_heads, D head_dim, Dv v_head_dim, b bytes per element.
"""

from bisect import bisect_right

from longseq_bench.core.model import Workload

LSE_BYTES = 4
"""Bytes of the log-sum-exp: one float32 per query and head."""

KV_BLOCK, SCALE_BYTES = 128, 4
"""Tokens of a quantised cache that share a scale in a KV head, and the bytes of a scale."""

FORWARD_MATMULS = 2
BACKWARD_MATMULS = 5
"""Scores (recomputed), dV, dP, dQ, dK (FlashAttention, arXiv 2205.14135, appendix B)."""


def floor_bytes_per_token(workload: Workload) -> int:
    """Return the bytes per token that every exact implementation needs.

    These are q, k, v and the output; in training also their gradients and the log-sum-exp. In
    decode they are the cache alone: q and the output have the new tokens only.
    """
    w = workload
    if w.decode:
        return key_bytes_per_token(w)
    forward = (w.heads + w.kv_heads) * (w.head_dim + w.v_head_dim) * w.dtype_bytes
    return w.batch * (2 * forward + LSE_BYTES * w.heads if w.train else forward)


def key_bytes_per_token(workload: Workload) -> int:
    """Return the bytes of a token's key and value (a latent is both) in all heads, unscaled."""
    w, each = workload, 1 if workload.kv_dtype else workload.dtype_bytes
    elements = w.head_dim if w.latent else w.head_dim + w.v_head_dim
    return w.batch * w.kv_heads * elements * each


def scale_bytes(workload: Workload, tokens: int) -> int:
    """Return the bytes of the scales of some tokens of a quantised cache; 0 of another cache."""
    scales = -(-tokens // KV_BLOCK) if workload.kv_dtype else 0
    return 2 * workload.batch * workload.kv_heads * scales * SCALE_BYTES


def floor_bytes(workload: Workload) -> int:
    """Return the floor bytes of the whole workload, over all layers and ranks."""
    return sum(
        layers * (floor_bytes_per_token(one) * one.seq_len + scale_bytes(one, one.seq_len))
        for layers, one in workload.of_kinds()
    )


def floor_tokens(workload: Workload, memory_budget: int, world_size: int = 1) -> int:
    """Return the largest number of tokens whose floor fits the budget of all ranks."""
    budget = world_size * memory_budget
    most = budget // floor_bytes_per_token(workload)
    if not (workload.layers or workload.kv_dtype):
        return most

    def floor(tokens: int) -> int:
        tokens = max(tokens, workload.new_tokens)
        return floor_bytes(workload.model_copy(update={"seq_len": tokens}))

    return bisect_right(range(1, most + 1), budget, key=floor)


def visible_pairs(seq_len: int, causal: bool) -> int:
    """Return the query-key pairs per head in dense attention."""
    return seq_len * (seq_len + 1) // 2 if causal else seq_len**2


def mask_pairs(workload: Workload) -> int:
    """Return the query-key pairs per head that the workload's mask shows."""
    mask, tokens = workload.visibility, workload.seq_len
    return mask.visible_pairs(tokens) - mask.pairs_before(workload.queries.start, tokens)


def attention_flops(workload: Workload, pairs: float | None = None) -> float:
    """Return the FLOPs of the matrix products; a multiply-add counts as two.

    pairs: visible query-key pairs per head in one layer; None: those of the mask, in all layers.
    """
    w = workload
    if pairs is None:
        return sum(n * attention_flops(one, mask_pairs(one)) for n, one in w.of_kinds())
    # scores have D terms and the output's rows Dv elements; backward: scores, dq, dk; dv, dp
    elements = w.head_dim + w.v_head_dim
    if w.train:
        elements += 3 * w.head_dim + 2 * w.v_head_dim
    return 2.0 * elements * pairs * w.heads * w.batch


def ratio(over: float | None, under: float | None) -> float | None:
    """Return over / under; None if either is unknown, or `under` is 0."""
    return over / under if over is not None and under else None
