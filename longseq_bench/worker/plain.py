"""A plain implementation in half precision, on the rows of the float64 reference.

It is what a user would write: scores, softmax and products in torch, each result rounded to the
dtype, sums in float32. Its errors are the measure for those of an implementation (errors.py). The
log-sum-exp and rows come from the reference, so that a chunk of keys is visited once.

Letters: Hq heads, R rows, K keys of a chunk, D head_dim.
"""

import torch
from torch import Tensor

from longseq_bench.core.model import DType
from longseq_bench.worker.reference import CheckedRows, KeyChunk, Reference


class PlainRows:
    """The plain implementation's output and gradients of some checked rows.

    Create it on all ranks. Feed each chunk of `Gradients.of_keys` to `add_keys`.

    out: (B, Hq, R, Dv).
    """

    def __init__(self, reference: Reference, rows: CheckedRows, dtype: DType) -> None:
        self._reference, self._rows = reference, rows
        self._dtype = getattr(torch, dtype)
        self._q = self._round(rows.q.float())
        total, attended = torch.zeros_like(rows.lse), torch.zeros_like(rows.attended)
        for chunk in reference.seen_chunks(rows.batch):
            values = self._round(chunk.values.float())
            for head, row in reference.heads_of(chunk, rows.batch):
                weights = self._weights(chunk, head, row)
                total[row] += weights.sum(-1, keepdim=True)
                attended[row] += (self._round(weights) @ values).double()
        total, attended = reference.all_sum(total), reference.all_sum(attended)
        total = total.where(total > 0, 1.0)
        self._log_total = total.log().float()
        self._attended = self._round((attended / total).float())
        self.out = self._projected(self._attended, "out").double()
        self._dq = torch.zeros_like(rows.q)

    def set_gradient(self, grad_out: Tensor) -> None:
        """Set the output gradient (B, Hq, R, D) in float64, before `add_keys`."""
        matrix = self._reference.matrices.get("out")
        if matrix is not None:
            grad_out = grad_out @ matrix.T
        self._d_attended = self._round(grad_out.float())
        self._delta = (self._d_attended * self._attended).sum(-1, keepdim=True)

    def add_keys(self, chunk: KeyChunk) -> tuple[Tensor, Tensor]:
        """Add a chunk to dq; return its dk and dv (K, D), rounded after each query head."""
        scale, reference = self._reference.scale, self._reference
        keys, values = (self._round(t.float()) for t in (chunk.keys, chunk.values))
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for head, row in reference.heads_of(chunk, self._rows.batch):
            weights = self._weights(chunk, head, row) * (-self._log_total[row]).exp()
            d_attended = self._d_attended[row]
            d_weights = self._round(d_attended @ values.T)
            d_scores = self._round(weights * (d_weights - self._delta[row]))
            dk = self._round(dk + self._round(d_scores.T @ self._q[row] * scale))
            dv = self._round(dv + self._round(self._round(weights).T @ d_attended))
            if chunk.is_counted:
                self._dq[row] += (d_scores @ keys * scale).double()
        return self._before(dk, "k"), self._before(dv, "v")

    def close(self) -> Tensor:
        """Return dq, (B, Hq, R, D). All ranks must call it."""
        dq = self._reference.all_sum(self._dq).float()
        return self._before(self._round(dq), "q")

    def _weights(self, chunk: KeyChunk, head: int, row: tuple[int, int]) -> Tensor:
        """Return exp(score - the reference's log-sum-exp), (R, K)."""
        keys = self._round(chunk.keys.float())
        scores = self._round(self._round(self._q[row] @ keys.T) * self._reference.scale)
        seen = self._reference.log_multiplicity(chunk, head)
        if seen is not None:
            scores += seen.float()
        return scores.sub_(self._rows.lse[row].float().nan_to_num(neginf=0.0)).exp_()

    def _projected(self, tensor: Tensor, name: str) -> Tensor:
        matrix = self._reference.matrices.get(name)
        return tensor if matrix is None else self._round(tensor @ matrix.float())

    def _before(self, gradient: Tensor, name: str) -> Tensor:
        """Return the gradient before a matrix product, from that after it."""
        matrix = self._reference.matrices.get(name)
        found = gradient if matrix is None else self._round(gradient @ matrix.float().T)
        return found.double()

    def _round(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype).float()
