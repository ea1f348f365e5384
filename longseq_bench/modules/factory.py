"""Block-sparse attention by the name of its variant, as a function of tensors.

    attend = create_block_sparse_attention("base", sparsity=0.99)
    out = attend(q, k, v)                        # (B, H, N, D), differentiable

The benchmark plans an attention for one workload. Here it is planned for the shapes that come, and
the last few plans are kept.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import torch
import torch.distributed as dist
from torch import Tensor

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.core.errors import (
    DENSITY,
    OldDensityError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)
from longseq_bench.core.model import DTYPE_BYTES, Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.modules.multihead import MultiheadBlockSparse, Recent
from longseq_bench.patterns.blocks import check_sparsity

VARIANTS = {
    "base": "block-sparse",
    "multihead": "",
    "adaptive": "block-sparse-adaptive",
    "distributed": "block-sparse",
}
"""The implementation of each; a module has none."""

OF_RANKS = ("placement", "ranks_per_node", "exchange")
KEPT_PLANS = 4


class SparseAttention:
    """attend(q, k, v) -> out: an implementation that is planned for the shapes it meets.

    attention: that of the last call or `prepare`, with its facts(), measures() and multiplicity();
    None before.
    """

    attention: Attention | None = None

    def __init__(self, implementation: str, options: dict[str, Any], causal: bool) -> None:
        self._name, self._options, self._causal = implementation, options, causal
        self._recent: Recent[Attention] = Recent(KEPT_PLANS)
        self._learned: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, Hq, N, D); k, v (B, Hk, N, D), Hk divides Hq -> (B, Hq, N, D), differentiable.

        Raises UserError for shapes that don't fit, UnsupportedError for what the implementation
        can't do.
        """
        _check_tensors(q, k, v)
        leaves = (q, k, v, *self._learned)
        train = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        w = self._workload(
            self._seq_len(q), q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.dtype, train
        )
        self.attention = self._planned(w, q.device)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
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
        """Plan for tensors of these shapes now rather than in their first call.

        seq_len: tokens of the whole sequence, on all ranks together.  kv_heads None: as many as
        heads.  Gives what of the tensors this rank holds: everything, on one rank.
        """
        shape = (seq_len, batch, heads, kv_heads or heads, head_dim)
        if min(shape) < 1 or heads % (kv_heads or heads):
            names = ("seq_len", "batch", "heads", "kv_heads", "head_dim")
            said = ", ".join(f"{n}={size}" for n, size in zip(names, shape, strict=True))
            raise UserError(f"{said}: each is 1 or more, and kv_heads divides heads")
        self.attention = self._planned(self._workload(*shape, dtype, train), torch.device(device))
        return self.attention.shard

    @property
    def shard(self) -> Shard:
        """What of the tensors this rank holds, as of the last call or `prepare`; `shard.queries`
        are its tokens' positions in the sequence. Raises UserError before."""
        if self.attention is None:
            raise UserError("shard: what this rank holds is known after prepare(seq_len=...)")
        return self.attention.shard

    def parameters(self) -> tuple[Tensor, ...]:
        """What it learns (scorer=learned), of any shape of tensors the same; there after the first
        call or `prepare`. Empty where nothing is."""
        return self._learned

    def __getstate__(self) -> dict[str, Any]:
        # plans belong to a process
        return {**vars(self), "attention": None}

    def _seq_len(self, q: Tensor) -> int:
        """Tokens of the whole sequence."""
        return q.shape[2]

    def _group(self, device: torch.device) -> Group:
        return Group.alone()

    def _workload(
        self, seq_len: int, batch: int, heads: int, kv_heads: int, head_dim: int,
        dtype: torch.dtype, train: bool,
    ) -> Workload:  # fmt: skip
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise UnsupportedError(f"no kernel takes {name}; {', '.join(DTYPE_BYTES)} are taken")
        return Workload(
            seq_len=seq_len, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=name, causal=self._causal, mode="train" if train else "forward",
        )  # fmt: skip

    def _planned(self, w: Workload, device: torch.device) -> Attention:
        return self._recent.of((w, device), lambda: self._made(w, device))

    def _made(self, w: Workload, device: torch.device) -> Attention:
        kind = IMPLEMENTATIONS.get(self._name)
        if reason := kind.unavailable_reason(device.type):
            raise UnsupportedError(f"{self._name} on {device.type}: {reason}")
        attention: Any = kind(w, self._group(device), **self._options)
        attention.prepare(device.type)
        if own := getattr(attention, "matrices", ()):
            self._learned = self._learned or tuple(m.detach().requires_grad_() for m in own)
            held, asked = ((m[0].shape, m[0].device) for m in (self._learned, own))
            if held != asked:
                raise UserError(
                    f"what was learned for heads of {held[0][0]} on {held[1]} is no use for heads "
                    f"of {asked[0][0]} on {asked[1]}; create another attention for those"
                )
            attention.matrices = self._learned
        return cast(Attention, attention)


class SpreadAttention(SparseAttention):
    """The same over all ranks of torch.distributed, each with its shard of the tokens.

        shard = attend.prepare(seq_len=131072, heads=8, head_dim=64)
        mine = torch.from_numpy(shard.queries)
        out = attend(q[:, :, mine], k[:, :, mine], v[:, :, mine])    # out[:, :, mine] of one rank

    Every rank calls prepare, attend and backward, in the same order and with the same options;
    either all ranks' tensors require gradients or none.
    """

    def __init__(self, implementation: str, options: dict[str, Any], causal: bool) -> None:
        super().__init__(implementation, options, causal)
        self._groups: dict[str, Group] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": {}}

    def _seq_len(self, q: Tensor) -> int:
        if self.attention is None:
            raise UserError(
                "call prepare(seq_len=...) first, with the tokens of all ranks together: a rank's "
                "shard doesn't tell them"
            )
        held = len(self.attention.shard.queries)
        if q.shape[2] != held:
            seq_len = self.attention.workload.seq_len
            raise UserError(
                f"q has {q.shape[2]} tokens, but this rank holds {held} of the {seq_len} prepared; "
                "take shard.queries of the whole, or prepare another seq_len"
            )
        return self.attention.workload.seq_len

    def _group(self, device: torch.device) -> Group:
        if device.type not in self._groups:
            self._groups[device.type] = Group.world(device.type)
        return self._groups[device.type]


@overload
def create_block_sparse_attention(
    variant: Literal["base", "adaptive", "distributed"] = "base", *, sparsity: float = 0.9,
    **options: Any,
) -> SparseAttention:  # fmt: skip
    """attend(q, k, v) -> out."""


@overload
def create_block_sparse_attention(
    variant: Literal["multihead"], *, sparsity: float = 0.9, **options: Any
) -> MultiheadBlockSparse:
    """module(query, key, value) -> (output, None)."""


@overload
def create_block_sparse_attention(
    variant: str, *, sparsity: float = 0.9, **options: Any
) -> SparseAttention | MultiheadBlockSparse:
    """Either, by a name that is known when it runs."""


def create_block_sparse_attention(
    variant: str = "base", *, sparsity: float = 0.9, **options: Any
) -> SparseAttention | MultiheadBlockSparse:
    """Block-sparse attention, by variant.

    base         attend(q, k, v) -> out, tensors (B, H, N, D); options of `block-sparse`
    adaptive     the same, key blocks chosen by their scores; options of `block-sparse-adaptive`
    distributed  the same over the ranks of an initialised torch.distributed: SpreadAttention
    multihead    a module in place of torch.nn.MultiheadAttention: MultiheadBlockSparse; embed_dim
                 and num_heads are needed

    sparsity: the fraction of the visible blocks that is skipped, in [0, 1): 0.99 keeps one in a
    hundred. All variants take `causal` (False). Raises UnknownNameError, with the nearest, for a
    variant or an option that is not there, UserError for values that can't be and for the old
    sparsity_ratio, which meant density.
    """
    if variant not in VARIANTS:
        raise UnknownNameError("variant", variant, VARIANTS)
    if DENSITY in options:
        raise OldDensityError(options[DENSITY], f"variant={variant}")
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float):
        raise UserError(f"sparsity={sparsity!r} is not a number in [0, 1)")
    check_sparsity(sparsity)
    if variant == "multihead":
        return _multihead(options | {"sparsity": sparsity})
    causal = options.pop("causal", False)
    owner, spread = f"variant={variant}", variant == "distributed"
    _check_value(bool, "causal", causal, owner)
    for name in OF_RANKS:
        if name in options and not spread:
            raise UserError(f"{name} is an option of variant=distributed; {owner} is on one rank")
    options["sparsity"] = sparsity
    kind = IMPLEMENTATIONS.get(VARIANTS[variant])
    _check(kind, options, owner, ("causal",))
    # what can't be of any length is said here rather than in the first call
    long = max([1, *(value for value in options.values() if isinstance(value, int))])
    kind(Workload(seq_len=long, causal=causal), Group.alone(), **options)
    if not spread:
        return SparseAttention(VARIANTS[variant], options, causal)
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "variant=distributed runs on the ranks of torch.distributed: call "
            "torch.distributed.init_process_group on every rank first"
        )
    return SpreadAttention(VARIANTS[variant], options, causal)


def _multihead(options: dict[str, Any]) -> MultiheadBlockSparse:
    needed = ("embed_dim", "num_heads")
    if missing := [name for name in needed if name not in options]:
        raise UserError(f"variant=multihead needs {' and '.join(missing)}")
    _check(MultiheadBlockSparse, options, "variant=multihead")
    return MultiheadBlockSparse(**options)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
    alike = q.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]
    alike = alike and q.shape[2:] == k.shape[2:] and bool(q.numel() and k.numel())
    if not alike or q.shape[1] % k.shape[1]:
        raise UserError(
            f"q, k, v {shapes} are not (B, Hq, N, D) and twice (B, Hk, N, D), Hk dividing Hq"
        )
    kinds = {(t.dtype, t.device) for t in (q, k, v)}
    if len(kinds) > 1:
        said = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise UserError(f"q, k and v are of different kinds: {said}")


def _check(
    make: Callable[..., Any], given: dict[str, Any], owner: str, also: tuple[str, ...] = ()
) -> None:
    """Names of options against a signature, and words and whole numbers against what it names.
    Other values are checked where they are used."""
    target = make.__init__ if inspect.isclass(make) else make
    hints = get_type_hints(target, include_extras=True)
    known = {name: hints[name] for name in inspect.signature(target).parameters if name in hints}
    for name in ("workload", "group"):
        known.pop(name, None)
    for name, value in given.items():
        if name not in known:
            raise UnknownNameError("option", name, {*known, *also}, place=owner)
        _check_value(known[name], name, value, owner)


def _check_value(hint: Any, name: str, value: Any, owner: str) -> None:
    least = 1
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        least = next((e for e in extras if isinstance(e, int)), 1)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise UnknownNameError(name, str(value), get_args(hint), place=owner)
    if bool in kinds and not isinstance(value, bool):
        raise UserError(f"{name}={value!r} in {owner} is neither True nor False")
    if int in kinds and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UserError(f"{name}={value!r} in {owner} is not a whole number from {least} up")
