"""Block-sparse attention by the name of its variant, as a function of tensors.

    attend = create_block_sparse_attention("base", sparsity=0.99)
    out = attend(q, k, v)                        # (B, H, N, D), differentiable

The benchmark prepares an attention for one workload. Here it is prepared for the shapes of each
call, and the last few are kept.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.errors import UnknownNameError, UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.core.options import OptionSpec, fill, specs_of, unknown_option
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.modules.multihead import MultiheadBlockSparse, RecentCache, make_workload

VARIANTS = {
    "base": "block-sparse",
    "multihead": "",
    "adaptive": "block-sparse-adaptive",
    "distributed": "block-sparse",
}
"""The implementation of each variant; a module has none."""

RANK_OPTIONS = ("placement", "ranks_per_node", "exchange")


class SparseAttention:
    """attend(q, k, v) -> out: an implementation, prepared for the shapes of each call.

    attention: that of the last call or `prepare`, with facts(), measures() and multiplicity(); None
    before. With variant=distributed each rank of torch.distributed holds a shard of the tokens:

        shard = attend.prepare(seq_len=131072, heads=8, head_dim=64)
        own = torch.from_numpy(shard.queries)
        out = attend(q[:, :, own], k[:, :, own], v[:, :, own])    # out[:, :, own] of one rank

    Then every rank calls prepare, attend and backward, in the same order and with the same options.
    Either the tensors of all ranks require gradients, or none do.
    """

    attention: Attention | None = None

    def __init__(
        self, implementation: str, options: dict[str, Any], causal: bool, distributed: bool
    ) -> None:
        self._name, self._options, self._causal = implementation, options, causal
        self._distributed, self._groups = distributed, dict[str, Group]()
        self._cache: RecentCache[Attention] = RecentCache()
        self._learned: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, differentiable: q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq.

        Raises:
            UserError: shapes do not match.
            UnsupportedError: the implementation cannot compute this.
        """
        found = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (q, k, v))
        is_alike = q.dim() == k.dim() == 4 and q.shape[::2] == k.shape[::2] and k.shape == v.shape
        if not is_alike or len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
            raise UserError(
                "q must be (B, Hq, N, D), k and v (B, Hk, N, D), of one dtype on one device; got "
                f"{found}"
            )
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *self._learned))
        attention = self._prepare(self._seq_len(q), q.shape, k.shape[1], q.dtype, q.device, train)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        return attention(q, k, v)

    def prepare(
        self,
        seq_len: int,
        *,
        batch: int = 1,
        heads: int = 8,
        kv_heads: int | None = None,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        train: bool = False,
    ) -> Shard:
        """Prepare for tensors of these shapes now instead of in their first call.

        seq_len: tokens of all ranks together. kv_heads None: as many as heads. Returns the part of
        the tensors that this rank holds; one rank holds everything.
        """
        shape = (batch, heads, seq_len, head_dim)
        device = torch.device(device)
        return self._prepare(seq_len, shape, kv_heads or heads, dtype, device, train).shard

    @property
    def shard(self) -> Shard:
        """The part of the tensors that this rank holds, from the last call or `prepare`.

        `shard.queries` are the positions of its tokens. Raises UserError if there was none.
        """
        if self.attention is None:
            raise UserError("shard is known after prepare(seq_len=...) or a first call")
        return self.attention.shard

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the learned matrices (scorer=learned), the same for all shapes.

        Empty if nothing is learned, and before the first call or `prepare`.
        """
        return self._learned

    def _seq_len(self, q: Tensor) -> int:
        """Return the tokens of all ranks together."""
        if not self._distributed:
            return q.shape[2]
        if self.attention is None:
            raise UserError("call prepare(seq_len=...) first, with the tokens of all ranks")
        tokens, seq_len = len(self.shard.queries), self.attention.workload.seq_len
        if q.shape[2] != tokens:
            raise UserError(
                f"q has {q.shape[2]} tokens, but this rank holds {tokens} of {seq_len}; "
                "pass the tokens of shard.queries, or prepare another seq_len"
            )
        return seq_len

    def _group(self, device: str) -> Group:
        if not self._distributed:
            return Group.alone()
        if device not in self._groups:
            self._groups[device] = Group.world(device)
        return self._groups[device]

    def _prepare(
        self,
        seq_len: int,
        shape: Sequence[int],
        kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        train: bool,
    ) -> Attention:
        """Return the attention for `seq_len` tokens of all ranks; shape: of q on this rank."""
        batch, heads, _, head_dim = shape
        sizes = {"seq_len": seq_len, "batch": batch, "heads": heads, "kv_heads": kv_heads}
        mode = "train" if train else "forward"
        w = make_workload(dtype, head_dim=head_dim, causal=self._causal, mode=mode, **sizes)
        self.attention = self._cache.get((w, device), lambda: self._build(w, device))
        return self.attention

    def _build(self, w: Workload, device: torch.device) -> Attention:
        kind = IMPLEMENTATIONS.get(self._name)
        if reason := kind.unavailable_reason(device.type):
            raise UnsupportedError(f"{self._name} on {device.type}: {reason}")
        attention: Any = kind(w, self._group(device.type), **self._options)
        attention.prepare(device.type)
        if matrices := getattr(attention, "matrices", ()):
            self._learned = self._learned or tuple(m.detach().requires_grad_() for m in matrices)
            attention.matrices = self._learned
        built: Attention = attention
        return built


def create_block_sparse_attention(
    variant: str = "base", *, sparsity: float = 0.9, **options: Any
) -> Any:
    """Return block-sparse attention of a variant.

    base         attend(q, k, v) -> out, tensors (B, H, N, D); options of `block-sparse`
    adaptive     the same, key blocks chosen by their scores; options of `block-sparse-adaptive`
    distributed  the same over the ranks of an initialised torch.distributed
    multihead    a module in place of torch.nn.MultiheadAttention: MultiheadBlockSparse; embed_dim
                 and num_heads are needed

    sparsity: fraction of the visible blocks that is skipped, in [0, 1); 0.99 keeps one in a
    hundred. All variants take `causal`, default False.

    Raises:
        UnknownNameError: the variant or an option does not exist; the message names the nearest.
        UserError: an impossible value, the old option sparsity_ratio, which meant density, or
            `distributed` without an initialised torch.distributed.
    """
    if variant not in VARIANTS:
        raise UnknownNameError("variant", variant, VARIANTS)
    owner, distributed = f"variant={variant}", variant == "distributed"
    options["sparsity"] = sparsity
    if variant == "multihead":
        known = inspect.signature(MultiheadBlockSparse).parameters
        for name in options:
            if name not in known:
                raise unknown_option(name, known, owner)
        return MultiheadBlockSparse(**options)
    for name in RANK_OPTIONS:
        if name in options and not distributed:
            raise UserError(f"{name} is an option of variant=distributed; {owner} runs on one rank")
    kind = IMPLEMENTATIONS.get(VARIANTS[variant])
    specs = OptionSpec(name="causal", kind="bool", default=False), *specs_of(kind)
    options = fill(specs, options, owner)
    causal = bool(options.pop("causal"))
    # refuse impossible options here, not in the first call; no whole number exceeds this length
    seq_len = max([1, *(value for value in options.values() if isinstance(value, int))])
    kind(Workload(seq_len=seq_len, causal=causal), Group.alone(), **options)
    if distributed and not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "variant=distributed runs on the ranks of torch.distributed: call "
            "torch.distributed.init_process_group on every rank first"
        )
    return SparseAttention(VARIANTS[variant], options, causal, distributed)
