"""Linear attention of flash-linear-attention: a recurrence over tokens in place of a softmax.

    S_t = (1 - β_t k_t k_tᵀ) diag(exp g_t) S_{t-1} + β_t k_t v_tᵀ        out_t = S_tᵀ q_t / √D

Gated DeltaNet (arXiv 2412.06464) has a decay g for each head, KDA (Kimi Linear, 2510.26692) for
each of its channels; both divide q and k by their lengths. Mamba-2 (2405.21060) has a decay for
each head and no delta rule, S_t = exp(g_t) S_{t-1} + k_t v_tᵀ, with q, k, v for its C, B and x.

Not run on a GPU by this project yet.
Letters: B batch, H heads, N tokens, D head_dim, Dv v_head_dim, R rows.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from longseq_bench.attention.base import Cost, implementation
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.kernels.base import Triple

FUNCTIONS = {
    "gated-deltanet": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "mamba-2": "chunk_simple_gla",
}
_DELTA_RULE = "q k v g beta use_qk_l2norm_in_kernel"
MAX_HEAD_DIM = 256
BLOCK = 64  # tokens that the reference computes together


@implementation("fla")
class FlashLinearAttention(External):
    """A recurrence of flash-linear-attention; decays and β are drawn from a seed in `prepare`."""

    summary = "linear attention of flash-linear-attention (a recurrence, no softmax), forward"
    takes_v_head_dim = True
    dtypes = ("bfloat16", "float16")
    library = Library(
        "flash-linear-attention",
        "fla.ops",
        "pip install 'flash-linear-attention[cuda]'",
        dict.fromkeys(FUNCTIONS.values(), _DELTA_RULE) | {"chunk_simple_gla": "q k v g"},
        versions=("0.5.2", "0.7"),
    )

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        recurrence: Annotated[
            Literal["gated-deltanet", "kda", "mamba-2"], "recurrence of a layer"
        ] = "gated-deltanet",
    ) -> None:
        super().__init__(workload, group)
        self.recurrence, self.has_delta_rule, w = recurrence, recurrence != "mamba-2", workload
        for is_refused, what in (
            (not w.causal, "a recurrence is causal; use causal=true"),
            (w.train, "its gradients have no float64 reference; use mode=forward"),
            (w.heads != w.kv_heads, "each head has a state of its own; use as many KV heads"),
            (w.head_dim > MAX_HEAD_DIM, f"fla has no kernel for a head_dim above {MAX_HEAD_DIM}"),
        ):
            if is_refused:
                raise UnsupportedError(what)

    def prepare(self, device: str) -> None:
        """Import the library, and draw the decays, and β of a delta rule, of all tokens."""
        super().prepare(device)
        w, generator = self.workload, torch.Generator(device).manual_seed(0)
        shape, channels = (w.batch, w.seq_len, w.heads), (w.head_dim,)
        g, beta = (
            torch.empty(size, device=device).normal_(generator=generator)
            for size in (shape + channels * (self.recurrence == "kda"), shape)
        )
        # a state forgets a token in about 50 tokens
        self.gates = {"g": logsigmoid(g) / 40}
        if self.has_delta_rule:
            self.gates["beta"] = beta.sigmoid().to(self.torch_dtype)

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        more = {"use_qk_l2norm_in_kernel": True} if self.has_delta_rule else {}
        function = getattr(self.module, FUNCTIONS[self.recurrence])
        out: Tensor = function(q=q, k=k, v=v, **self.gates, **more)[0]
        return out.transpose(1, 2)

    @override
    def reference_rows(self, inputs: Triple, rows: Tensor) -> Tensor:
        gates = {n: t.reshape(*t.shape[:3], -1).transpose(1, 2) for n, t in self.gates.items()}
        return recurrent_rows(*inputs, **gates, rows=rows)

    @override
    def cost(self) -> Cost:
        # products of a state: with q, with v, and in a delta rule with k
        w, products = self.workload, 3 if self.has_delta_rule else 2
        states = w.batch * w.heads * w.head_dim * w.v_head_dim
        gates = sum(t.nbytes for t in self.gates.values())
        return Cost(2.0 * products * states * w.seq_len, floor_bytes(w) + gates + 4 * states)

    @override
    def facts(self) -> dict[str, Any]:
        layout = "each pass copies q, k and v to (batch, tokens, heads, head_dim)"
        own = {"kernel": f"fla {FUNCTIONS[self.recurrence]}", "layout": layout}
        return super().facts() | own


def recurrent_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: Tensor, beta: Tensor | None = None
) -> Tensor:
    """Return rows (B, H, R, Dv) of a recurrence in float64; without beta that of Mamba-2.

    q, k (B, H, N, D), v (B, H, N, Dv), g (B, H, N, 1 or D), beta (B, H, N, 1); rows ascend. What a
    delta rule writes to the state in a block of tokens is the solution of a triangular system.
    """
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=torch.float64)
    found = []
    for start in range(0, int(rows[-1]) + 1, BLOCK):
        at = slice(start, start + BLOCK)
        q_, k_, v_, g_ = (t[:, :, at].double() for t in (q, k, v, g))
        if beta is not None:
            q_, k_ = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q_, k_))
        decay = g_.cumsum(2).exp()
        q_, k_, written = q_ * decay / q.shape[3] ** 0.5, k_ * decay, (k_ / decay).mT
        if beta is not None:
            b = beta[:, :, at].double()
            system, known = (b * (k_ @ written)).tril(-1), b * (v_ - k_ @ state)
            v_ = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        out = q_ @ state + (q_ @ written).tril() @ v_
        found.append(out[:, :, (rows[(rows >= start) & (rows < at.stop)] - start).to(out.device)])
        state = decay[:, :, -1:].mT * (state + written @ v_)
    return torch.cat(found, 2)
