"""Triton kernels of attention over spans; triton_spans.py launches them.

One program computes up to M queries of one tile for one head, and walks the runs of keys that the
tile sees, N keys at a time. Tokens are addressed one by one, so strided runs and permuted walks
cost no copies. FlashAttention-2 (arXiv 2307.08691), except that the backward is one kernel: it adds
to the gradients of keys by atomic additions in float32, in no fixed order.

HAS_...: whether an array of the steps or of the runs is given; see StepMap and Spans. LOCAL: some
keys of a chunk may be hidden from some queries. Other letters as in triton_kernels.py.
"""

import math

import triton.language as tl
from triton.language import tensor

from longseq_bench.kernels.triton_kernels import jit

_LOG2_E = tl.constexpr(1 / math.log(2))
_LOG_2 = tl.constexpr(math.log(2))


@jit
def _locate(work: tensor, head_list: tensor, item_count: tensor, head_count: tensor) -> tensor:
    """Return batch and head of this program, the index of the head, and its tile and offset."""
    program = tl.program_id(0)
    item = program % item_count
    position = program // item_count
    index = position % head_count
    batch = (position // head_count).to(tl.int64)
    head = tl.load(head_list + index).to(tl.int64)
    return batch, head, index, tl.load(work + 2 * item), tl.load(work + 2 * item + 1)


@jit
def _rows_and_positions(
    steps: tensor, inside: tensor, row: tensor, at: tensor, HAS_ROW: tl.constexpr,
    HAS_AT: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the tensor rows and the sequence positions of some steps."""
    rows = steps
    if HAS_ROW:
        rows = tl.load(row + steps, mask=inside, other=0)
    places = rows
    if HAS_AT:
        places = tl.load(at + steps, mask=inside, other=0)
    return rows.to(tl.int64), places


@jit
def _load(
    base: tensor, rows: tensor, inside: tensor, stride: tensor, DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load rows of one head, (rows, WIDE); 0 where not inside."""
    dims = tl.arange(0, WIDE)
    at = base + rows[:, None] * stride + dims[None, :]
    if WIDE != DIM:
        return tl.load(at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    return tl.load(at, mask=inside[:, None], other=0.0)


@jit
def _store(
    base: tensor, rows: tensor, inside: tensor, stride: tensor, numbers: tensor,
    DIM: tl.constexpr, WIDE: tl.constexpr,
) -> tensor:  # fmt: skip
    dims = tl.arange(0, WIDE)
    at = base + rows[:, None] * stride + dims[None, :]
    mask = inside[:, None] & (dims < DIM)[None, :]
    tl.store(at, numbers.to(base.dtype.element_ty), mask=mask)


@jit
def _wait_for_loads() -> tensor:
    """Let no warp store before all have loaded: several warps may load what one of them stores."""
    tl.debug_barrier()


@jit
def _queries(
    tile: tensor, offset: tensor, tile_start: tensor, tile_count: tensor, tile_step: tensor,
    q_row: tensor, q_at: tensor, q_first: tensor, HAS_Q_ROW: tl.constexpr, HAS_Q_AT: tl.constexpr,
    HAS_Q_FIRST: tl.constexpr, M: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return rows, positions, first positions seen, and validity of this program's queries."""
    within = offset + tl.arange(0, M)
    inside = within < tl.load(tile_count + tile)
    steps = tl.load(tile_start + tile) + within * tile_step
    rows, places = _rows_and_positions(steps, inside, q_row, q_at, HAS_Q_ROW, HAS_Q_AT)
    firsts = places
    if HAS_Q_FIRST:
        firsts = tl.load(q_first + steps, mask=inside, other=0)
    return rows, places, firsts, inside


@jit
def _keys(
    first: tensor, count: tensor, step: tensor, done: tensor, k_row: tensor, k_at: tensor,
    HAS_K_ROW: tl.constexpr, HAS_K_AT: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return rows, positions and validity of the next N keys of a run."""
    within = done + tl.arange(0, N)
    inside = within < count
    rows, places = _rows_and_positions(
        first + within * step, inside, k_row, k_at, HAS_K_ROW, HAS_K_AT
    )
    return rows, places, inside


@jit
def _scores(
    q: tensor, keys: tensor, q_places: tensor, q_firsts: tensor, k_places: tensor, inside: tensor,
    CAUSAL: tl.constexpr, HAS_Q_FIRST: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the scores of queries and keys, unscaled; -inf where a key is not visible."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    visible = inside[None, :]
    if CAUSAL:
        visible = visible & (k_places[None, :] <= q_places[:, None])
        if HAS_Q_FIRST:
            visible = visible & (k_places[None, :] >= q_firsts[:, None])
    return tl.where(visible, scores, float("-inf"))


@jit
def forward(
    q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, work: tensor, head_list: tensor,
    tile_start: tensor, tile_count: tensor, runs: tensor, start: tensor, count: tensor,
    step: tensor, q_row: tensor, k_row: tensor, q_at: tensor, k_at: tensor, q_first: tensor,
    q_strides: tl.tuple, k_strides: tl.tuple, v_strides: tl.tuple, out_strides: tl.tuple,
    lse_strides: tl.tuple, tile_step: tensor, item_count: tensor, head_count: tensor,
    scale: tensor, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr,
    MERGE: tl.constexpr, KEEP_LSE: tl.constexpr, HAS_STEP: tl.constexpr, HAS_Q_ROW: tl.constexpr,
    HAS_K_ROW: tl.constexpr, HAS_Q_AT: tl.constexpr, HAS_K_AT: tl.constexpr,
    HAS_Q_FIRST: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute output and log-sum-exp of M queries; MERGE: continue the softmax that they hold."""
    batch, head, _, tile, offset = _locate(work, head_list, item_count, head_count)
    rows, places, firsts, inside = _queries(
        tile, offset, tile_start, tile_count, tile_step, q_row, q_at, q_first, HAS_Q_ROW, HAS_Q_AT,
        HAS_Q_FIRST, M,
    )  # fmt: skip
    q += batch * q_strides[0] + head * q_strides[1]
    k += batch * k_strides[0] + head // GROUP * k_strides[1]
    v += batch * v_strides[0] + head // GROUP * v_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    lse += batch * lse_strides[0] + head * lse_strides[1]
    own = _load(q, rows, inside, q_strides[2], DIM, WIDE)
    scale = scale * _LOG2_E
    if MERGE:
        old = tl.load(lse + rows * lse_strides[2], mask=inside, other=float("-inf"))
        row_max = old * _LOG2_E
        row_sum = tl.where(old == float("-inf"), 0.0, 1.0)
        sums = _load(out, rows, inside, out_strides[2], DIM, WIDE)
    else:
        row_max = tl.full([M], float("-inf"), tl.float32)
        row_sum = tl.zeros([M], tl.float32)
        sums = tl.zeros([M, WIDE], tl.float32)
    for run in range(tl.load(runs + tile), tl.load(runs + tile + 1)):
        keys_of_run = tl.load(count + run)
        stride = tl.load(step + run) if HAS_STEP else 1
        first = tl.load(start + run)
        for done in range(0, keys_of_run, N):
            k_rows, k_places, valid = _keys(
                first, keys_of_run, stride, done, k_row, k_at, HAS_K_ROW, HAS_K_AT, N
            )
            keys = _load(k, k_rows, valid, k_strides[2], DIM, WIDE)
            scores = _scores(own, keys, places, firsts, k_places, valid, CAUSAL, HAS_Q_FIRST)
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            # a query that has seen no key so far
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores * scale - shift[:, None])
            rescale = tl.exp2(row_max - shift)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            sums = sums * rescale[:, None]
            values = _load(v, k_rows, valid, v_strides[2], DIM, WIDE)
            sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
            row_max = new_max
    total = tl.where(row_sum == 0, 1.0, row_sum)
    if MERGE:
        _wait_for_loads()
    _store(out, rows, inside, out_strides[2], sums / total[:, None], DIM, WIDE)
    if KEEP_LSE:
        natural = (row_max + tl.log2(total)) * _LOG_2
        tl.store(lse + rows * lse_strides[2], natural, mask=inside)


@jit
def backward(
    q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, grad_out: tensor, dq: tensor,
    dk: tensor, dv: tensor, bias: tensor, work: tensor, head_list: tensor, tile_start: tensor,
    tile_count: tensor, runs: tensor, start: tensor, count: tensor, step: tensor, q_row: tensor,
    k_row: tensor, q_at: tensor, k_at: tensor, q_first: tensor, q_strides: tl.tuple,
    k_strides: tl.tuple, v_strides: tl.tuple, out_strides: tl.tuple, lse_strides: tl.tuple,
    grad_strides: tl.tuple, dq_strides: tl.tuple, dk_strides: tl.tuple, dv_strides: tl.tuple,
    bias_strides: tl.tuple, tile_step: tensor, item_count: tensor, head_count: tensor,
    first_kv_head: tensor, scale: tensor, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, MERGE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STEP: tl.constexpr,
    HAS_Q_ROW: tl.constexpr, HAS_K_ROW: tl.constexpr, HAS_Q_AT: tl.constexpr,
    HAS_K_AT: tl.constexpr, HAS_Q_FIRST: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> tensor:  # fmt: skip
    """Compute dQ of M queries, and add to dK, dV and to the sums of score gradients of each run."""
    batch, head, index, tile, offset = _locate(work, head_list, item_count, head_count)
    rows, places, firsts, inside = _queries(
        tile, offset, tile_start, tile_count, tile_step, q_row, q_at, q_first, HAS_Q_ROW, HAS_Q_AT,
        HAS_Q_FIRST, M,
    )  # fmt: skip
    kv_head = head // GROUP
    q += batch * q_strides[0] + head * q_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    lse += batch * lse_strides[0] + head * lse_strides[1]
    grad_out += batch * grad_strides[0] + head * grad_strides[1]
    dq += batch * dq_strides[0] + head * dq_strides[1]
    k += batch * k_strides[0] + kv_head * k_strides[1]
    v += batch * v_strides[0] + kv_head * v_strides[1]
    dk += batch * dk_strides[0] + (kv_head - first_kv_head) * dk_strides[1]
    dv += batch * dv_strides[0] + (kv_head - first_kv_head) * dv_strides[1]
    bias += batch * bias_strides[0] + index.to(tl.int64) * bias_strides[1]
    own = _load(q, rows, inside, q_strides[2], DIM, WIDE)
    grad = _load(grad_out, rows, inside, grad_strides[2], DIM, WIDE)
    result = _load(out, rows, inside, out_strides[2], DIM, WIDE)
    delta = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    own_lse = tl.load(lse + rows * lse_strides[2], mask=inside, other=float("inf"))
    own_lse = tl.where(own_lse == float("-inf"), float("inf"), own_lse) * _LOG2_E
    sums = tl.zeros([M, WIDE], tl.float32)
    dims = tl.arange(0, WIDE)
    for run in range(tl.load(runs + tile), tl.load(runs + tile + 1)):
        keys_of_run = tl.load(count + run)
        stride = tl.load(step + run) if HAS_STEP else 1
        first = tl.load(start + run)
        of_run = tl.zeros([N], tl.float32)
        for done in range(0, keys_of_run, N):
            k_rows, k_places, valid = _keys(
                first, keys_of_run, stride, done, k_row, k_at, HAS_K_ROW, HAS_K_AT, N
            )
            keys = _load(k, k_rows, valid, k_strides[2], DIM, WIDE)
            values = _load(v, k_rows, valid, v_strides[2], DIM, WIDE)
            scores = _scores(own, keys, places, firsts, k_places, valid, CAUSAL, HAS_Q_FIRST)
            weights = tl.exp2(scores * (scale * _LOG2_E) - own_lse[:, None])
            grad_weights = tl.dot(grad, tl.trans(values), input_precision="ieee")
            grad_scores = weights * (grad_weights - delta[:, None])
            sums = tl.dot(grad_scores.to(keys.dtype), keys, sums, input_precision="ieee")
            own_dv = tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision="ieee")
            own_dk = tl.dot(tl.trans(grad_scores.to(own.dtype)), own, input_precision="ieee")
            mask = valid[:, None] & (dims < DIM)[None, :]
            at = k_rows[:, None] * dk_strides[2] + dims[None, :]
            tl.atomic_add(dk + at, own_dk * scale, mask=mask, sem="relaxed")
            at = k_rows[:, None] * dv_strides[2] + dims[None, :]
            tl.atomic_add(dv + at, own_dv, mask=mask, sem="relaxed")
            if HAS_BIAS:
                of_run += tl.sum(tl.where(inside[:, None], grad_scores, 0.0), 0)
        if HAS_BIAS:
            tl.atomic_add(bias + run, tl.sum(of_run, 0), sem="relaxed")
    sums = sums * scale
    if MERGE:
        sums += _load(dq, rows, inside, dq_strides[2], DIM, WIDE)
        _wait_for_loads()
    _store(dq, rows, inside, dq_strides[2], sums, DIM, WIDE)
