"""Block-sparse attention by the name of its variant, as a function of tensors or as a module.

    attend = create_block_sparse_attention("base", sparsity=0.99)
    out = attend(q, k, v)                        # (B, H, N, D), differentiable

The benchmark prepares an attention for one workload. Here it is prepared for the shapes of each
call, and the last few are kept.

Shapes: B batch, N tokens, E embed_dim, Hq heads, Hk kv_heads, D head_dim = E / Hq.
"""

from collections.abc import Hashable
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.attention.signature_options import specs_of
from longseq_bench.attention.sparse.block_sparse import PatternName
from longseq_bench.core.errors import UnknownNameError, UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.core.options import OptionSpec, fill
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Shard
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import Triple

VARIANTS = {
    "base": "block-sparse",
    "multihead": "",
    "adaptive": "block-sparse-adaptive",
    "distributed": "block-sparse",
}
"""The implementation of each variant; a module has none."""

CACHED = 4
"""Shapes whose layouts are kept."""


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
        self._cache: dict[Hashable, Attention] = {}
        self._learned: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, differentiable: q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq.

        Raises UserError if shapes do not match, UnsupportedError for what it cannot compute.
        """
        found = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (q, k, v))
        is_alike = q.dim() == k.dim() == 4 and q.shape[::2] == k.shape[::2] and k.shape == v.shape
        if not is_alike or len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
            raise UserError(
                "q must be (B, Hq, N, D), k and v (B, Hk, N, D), of one dtype on one device; got "
                f"{found}"
            )
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *self._learned))
        self.prepare(
            self._seq_len(q),
            batch=len(q),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            dtype=q.dtype,
            device=q.device,
            train=train,
        )
        assert self.attention is not None
        return self.attention(q, k, v)

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
        device = torch.device(device)
        shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads or heads}
        w = Workload(
            seq_len=seq_len,
            **shape,
            head_dim=head_dim,
            dtype=str(dtype).removeprefix("torch."),
            causal=self._causal,
            mode="train" if train else "forward",
        )
        self.attention = self._cache.pop((w, device), None) or self._build(w, device)
        self._cache[w, device] = self.attention
        if len(self._cache) > CACHED:
            del self._cache[next(iter(self._cache))]
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
        tokens, seq_len = len(self.attention.shard.queries), self.attention.workload.seq_len
        if q.shape[2] != tokens:
            raise UserError(
                f"q has {q.shape[2]} tokens, but this rank holds {tokens} of {seq_len}; "
                "pass those of the shard that prepare returns, or prepare another seq_len"
            )
        return seq_len

    def _group(self, device: str) -> Group:
        if not self._distributed:
            return Group.alone()
        if device not in self._groups:
            self._groups[device] = Group.world(device)
        return self._groups[device]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: not the layouts."""
        return self.__dict__ | {"_cache": {}, "attention": None}

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


class MultiheadBlockSparse(nn.Module):
    """torch.nn.MultiheadAttention over the blocks of a layout, for self-attention.

    Parameters have the names and layout of nn.MultiheadAttention (in_proj_weight (E + 2 Hk D, E):
    rows of q, k, v; in_proj_bias; out_proj). With as many KV heads as heads, a state_dict of one
    loads into the other. With an attn_mask that equals the layout, both return the same. Attention
    weights are never computed, and there is no key_padding_mask.

    Attributes:
        attend: the SparseAttention between the projections.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        num_kv_heads: int | None = None,
        batch_first: bool = False,
        pattern: PatternName = "local-window",
        sparsity: float = 0.9,
        block: int = 128,
        globals: Annotated[int | None, 0] = None,
        window: int | None = None,
        seed: Annotated[int, 0] = 0,
        causal: bool = False,
        kernel: sparse_selection.Kernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Pattern and kernel are options of `block-sparse`; num_kv_heads None: as many as heads.

        Raises UserError for an impossible value.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = embed_dim, num_heads, kv_heads
        if min(sizes) < 1 or embed_dim % num_heads or num_heads % kv_heads:
            raise UserError(
                "num_heads must divide embed_dim, and num_kv_heads num_heads; got "
                f"embed_dim={embed_dim}, num_heads={num_heads}, num_kv_heads={kv_heads}"
            )
        if dropout:
            raise UserError(f"dropout={dropout:g} is not supported (no attention weights); use 0")
        super().__init__()
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.batch_first, self.causal = embed_dim // num_heads, batch_first, causal
        self.dropout = 0.0
        # if this were True, torch's encoder layer would call its own dense kernel instead
        self._qkv_same_embed_dim = False
        options: dict[str, Any] = {"pattern": pattern, "sparsity": sparsity, "block": block}
        options |= {"globals": globals, "window": window, "seed": seed, "kernel": kernel}
        self.attend = create_block_sparse_attention("base", causal=causal, **options)
        # drawn in the order of nn.MultiheadAttention: equal seeds give equal ones
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._rows = [embed_dim, *[kv_heads * self.head_dim] * 2]
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self._rows), embed_dim, **factory))
        in_proj_bias = nn.Parameter(torch.zeros(sum(self._rows), **factory)) if bias else None
        self.in_proj_bias = in_proj_bias
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return (output, None), the pair of nn.MultiheadAttention; arguments are in its order.

        query, key, value: (N, B, E), or with batch_first (B, N, E); so is the output.
        average_attn_weights has no effect.

        Raises:
            UserError: shapes do not match, or there is no kernel for the dtype.
            UnsupportedError: a mask, need_weights, or is_causal without `causal`.
        """
        refused = {
            "need_weights=True: attention weights are never computed": need_weights,
            "attn_mask: the pattern is the mask": attn_mask is not None,
            "key_padding_mask: all tokens are keys": key_padding_mask is not None,
            "is_causal=True: it was created with causal=False": is_causal and not self.causal,
        }
        for reason, is_given in refused.items():
            if is_given:
                raise UnsupportedError(f"not supported: {reason}")
        shapes = [tuple(t.shape) for t in (query, key, value)]
        is_known = query.dim() == 3 and query.shape[-1] == self.embed_dim and query.numel()
        if not is_known or len({*shapes}) > 1:
            raise UserError(
                f"query, key and value need one shape with E={self.embed_dim} and tokens (this is "
                f"self-attention); got {', '.join(map(str, shapes))}"
            )
        is_turned = not self.batch_first
        inputs = [t.transpose(0, 1) if is_turned else t for t in (query, key, value)]
        q, k, v = self._project(inputs)
        heads = self.attend(q, k, v)
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return out.transpose(0, 1) if is_turned else out, None

    def _project(self, inputs: list[Tensor]) -> Triple:
        """(B, N, E) each -> (B, Hq, N, D) and twice (B, Hk, N, D)."""
        weights = torch.split(self.in_proj_weight, self._rows)
        bias = self.in_proj_bias
        biases = (None, None, None) if bias is None else torch.split(bias, self._rows)
        q, k, v = (
            torch.unflatten(linear(t, w, b), -1, (-1, self.head_dim)).transpose(1, 2)
            for t, w, b in zip(inputs, weights, biases, strict=True)
        )
        return q, k, v


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
        return MultiheadBlockSparse(**options)
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
