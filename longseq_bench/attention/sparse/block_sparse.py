"""Block-sparse attention on a compressed layout: for each query block, the key blocks it keeps.

Over ranks, rows of the layout are split with their keys (`placement`), and each rank fetches the
key blocks that its rows see; see block_sparse_distributed.py.
"""

import os
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal

from typing_extensions import override

from longseq_bench.attention.base import Attention, Counts, implementation
from longseq_bench.attention.decode import CacheAttention, choose_kernel, over_lists
from longseq_bench.attention.one_rank import masked_steps
from longseq_bench.attention.projections import Projected, ProjectedAttention
from longseq_bench.attention.sparse.block_sparse_distributed import FetchKernel, ShardedLayout
from longseq_bench.core.cost import key_bytes_per_token
from longseq_bench.core.errors import UnsupportedError, UserError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.core.options import Replaces
from longseq_bench.core.workload import ALL_SCORES, PLAIN_SCORES, Scores
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions, Shard
from longseq_bench.kernels import sparse_selection
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.decode import SeenKeys
from longseq_bench.kernels.spans import HeadSpans, SpanAttention, SpanTask, StepMap
from longseq_bench.kernels.torch_spans import torch_kernel
from longseq_bench.patterns.block_layout import BlockLayout, Placement, place_rows
from longseq_bench.patterns.blocks import (
    BY_KV_HEAD,
    OF_RUNS,
    WITH_SPECIAL,
    check_options,
    make_layout,
    row_counts,
)
from longseq_bench.patterns.spans import spans_of
from longseq_bench.patterns.visible_keys import visible_keys

PatternName = Literal[
    "local-window",
    "dilated-sparse",
    "global-local",
    "hierarchical",
    "strided",
    "sink-window",
    "random",
    "indices",
]
# options that block-sparse and block-sparse-multihead share
PatternOption = Annotated[PatternName, "pattern of the kept blocks"]
SparsityOption = Annotated[float, "fraction of the visible blocks that is skipped, in [0, 1)"]
BlockOption = Annotated[int, "block size in tokens"]
GlobalsOption = Annotated[
    int | None, "global or sink tokens (global-local, sink-window); none: 128", 0
]
# in strided a window is a part of the kept blocks
_OF_WINDOW = Replaces("sparsity", unless=("pattern", "strided"))
WindowOption = Annotated[int | None, "window width in tokens; none: by sparsity", _OF_WINDOW]
SeedOption = Annotated[int, "seed of pattern=random and pattern=indices", 0]
SparseKernelOption = Annotated[sparse_selection.Kernel, "kernel; auto: the fastest one available"]


class LayoutAttention(Attention):
    """Attention over the blocks of `layouts`: one, one per KV head, or one per query head."""

    sees_itself = True  # in every layout a block of queries sees its own keys
    takes_sinks = True
    takes_scores = ALL_SCORES  # or its kernel refuses

    requested_density: float | None
    """Requested density; None if the options set the window instead."""

    block: int
    """Tokens of a block."""

    def __init__(self, workload: Workload, group: Group, kernel: sparse_selection.Kernel) -> None:
        super().__init__(workload, group)
        if workload.sink and kernel in ("flex", "flashinfer"):
            raise UnsupportedError(f"kernel={kernel} has no sinks; use auto")
        self.requested_kernel = kernel
        self.kernel_name = ""

    @property
    @abstractmethod
    def layouts(self) -> tuple[BlockLayout, ...]:
        """The layouts of the last call, or of all calls."""

    def prepare(self, device: str) -> None:
        """Choose the kernel."""
        super().prepare(device)
        w, block = self.workload, self.kernel_block
        self.kernel_name, self._kernel_facts = sparse_selection.choose(
            self.requested_kernel, device, w.dtype, w.head_dim, block, w.train
        )

    @property
    def kernel_block(self) -> int | None:
        """The tokens of a block for block kernels; None if only span kernels can be used."""
        # block kernels know no mask but the causal triangle
        return self.block if self.workload.mask is None else None

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        return self.layouts[self.pattern_of(head)].multiplicity(q_positions, k_positions)

    @override
    def keys_seen(self, q_positions: Positions, head: int) -> Positions:
        return self.layouts[self.pattern_of(head)].keys_seen(q_positions)

    @override
    def pattern_of(self, head: int) -> int:
        return head * len(self.layouts) // self.workload.heads

    @override
    def kept_pairs(self) -> float:
        return sum(layout.visible_pairs for layout in self.layouts) / len(self.layouts)

    @override
    def measures(self) -> dict[str, float]:
        achieved = sum(layout.block_density for layout in self.layouts) / len(self.layouts)
        requested = self.requested_density
        measures = {} if requested is None else {"density_asked": requested}
        # no query is uncovered: in every layout each sees its own block
        return {**measures, "density_achieved": achieved, "uncovered": 0.0}

    @property
    @override
    def comparable_kernel(self) -> str:
        if self.workload.decode:
            return "native" if self.device == "cpu" else "triton"
        if self.kernel_name == "torch":
            return torch_kernel(self.kernel_use).name
        return self.kernel_name

    @override
    def facts(self) -> dict[str, Any]:
        kept = sum(len(layout.indices) for layout in self.layouts)
        return {**self._kernel_facts, "kept_blocks": kept}


def build_layout_kernel(
    kernel: str, layouts: tuple[BlockLayout, ...], heads: int, scores: Scores = PLAIN_SCORES
) -> AttentionKernel:
    """Build the kernel of this name; each layout is for an equal share of the query heads.

    Kernels are imported here, because some need libraries that may be missing.
    """
    mask, causal, steps = layouts[0].mask, layouts[0].causal, StepMap()
    each = heads // len(layouts)
    # block kernels take one layout, or one per query head
    by_head = layouts if len(layouts) == 1 else [x for x in layouts for _ in range(each)]
    if mask is not None:
        causal, steps = True, masked_steps(mask)
    elif kernel == "triton" and sparse_selection.has_triton():
        from longseq_bench.kernels.triton_blocks import TritonBlocks

        return TritonBlocks(by_head, scores)
    elif kernel == "flex":
        from longseq_bench.kernels.flex_blocks import FlexBlocks

        return FlexBlocks(by_head, scores)
    elif kernel == "flashinfer":
        from longseq_bench.attention.external.flashinfer import FlashInferBlocks

        return FlashInferBlocks(layouts, scores)
    # Triton is missing in meta mode only; the native kernel needs the same memory there
    spans = sparse_selection.span_kernel("native" if kernel == "triton" else kernel)
    parts = [HeadSpans(spans_of(x), range(i * each, (i + 1) * each)) for i, x in enumerate(layouts)]
    task = SpanTask(parts, causal, steps, scores)
    return SpanAttention(spans, task, (heads, layouts[0].seq_len))


@implementation("block-sparse")
class BlockSparse(LayoutAttention):
    """Attention over the blocks of a layout."""

    summary = "each query block sees the key blocks of a named pattern"
    many_ranks = True
    takes_masks = True
    takes_decode = takes_latent = takes_kv_dtype = True

    def __init__(
        self,
        workload: Workload,
        group: Group,
        *,
        pattern: PatternOption = "local-window",
        sparsity: SparsityOption = 0.9,
        block: BlockOption = 128,
        globals: GlobalsOption = None,
        window: WindowOption = None,
        seed: SeedOption = 0,
        kernel: SparseKernelOption = "auto",
        placement: Annotated[Placement, "assignment of rows to ranks"] = "node-local",
        ranks_per_node: Annotated[
            int, "ranks per node (hierarchical); 0: those of this host", 0
        ] = 0,
    ) -> None:
        w, self.block = workload, block
        special = special_tokens(pattern, w.seq_len, globals)
        check_options(pattern, w.seq_len, block, sparsity, special, window)
        mask = None if w.mask is None else visible_keys(w)
        sizes = w.seq_len, block, sparsity, w.causal
        self._make_layout: Callable[[int], BlockLayout] = lambda seed: make_layout(
            pattern, *sizes, seed, special, window, mask, w.queries.start
        )
        self._seeds = [seed + (h << 32) for h in range(w.kv_heads if pattern == BY_KV_HEAD else 1)]
        self._reads_runs = pattern in OF_RUNS
        if w.decode:
            self._refuse_in_decode(w, group)
        self._placement = placement
        # torch sets the variable to the number of ranks on this host
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", group.size))
        self._ranks_per_node = ranks_per_node or on_host
        self._kernel: AttentionKernel | None = None
        self.requested_density = None if window and pattern != "strided" else 1 - sparsity
        if group.size > -(-w.seq_len // block):
            raise WorldError(
                f"{w.seq_len} tokens in blocks of {block} are too few for {group.size} ranks; "
                "each rank needs at least one block"
            )
        super().__init__(workload, group, kernel)

    def _refuse_in_decode(self, w: Workload, group: Group) -> None:
        if w.new_tokens > 1 and not (w.causal or self._reads_runs):
            known = ", ".join(OF_RUNS)
            raise UnsupportedError(
                f"mode decode: several new tokens need causal=true, or one of the patterns {known}"
            )
        if w.mask is not None:
            raise UnsupportedError(f"mode decode: block-sparse takes no mask {w.mask} there")
        if w.kv_dtype and not self._reads_runs:
            known = f"kv_dtype {w.kv_dtype}: kept keys are copied without their scales"
            raise UnsupportedError(f"{known}; use one of the patterns {', '.join(OF_RUNS)}")
        if group.size > 1:
            raise WorldError("mode decode: block-sparse runs on one rank; ring splits a cache")

    @classmethod
    @override
    def kept_blocks(cls, workload: Workload, **options: Any) -> int:
        if workload.decode:
            return 0
        pattern, tokens, block = options["pattern"], workload.seq_len, options["block"]
        special = special_tokens(pattern, tokens, options["globals"])
        sparsity, window = options.get("sparsity", 0.0), options["window"]
        counts = row_counts(pattern, tokens, block, sparsity, workload.causal, special, window)
        return int(counts.sum()) * (workload.kv_heads if pattern == BY_KV_HEAD else 1)

    @override
    def build_shard(self) -> Shard:
        if self.group.size == 1:
            return Shard.full(self.workload)
        sharded = self._sharded[0]
        return Shard.of_tokens(self.workload, sharded.tokens(sharded.rows(self.group.rank)))

    @cached_property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """One layout, or one per KV head; in decode with the rows of new tokens alone.

        They are built when they are first needed: in `prepare`, which is timed.
        """
        try:
            return tuple(self._make_layout(seed) for seed in self._seeds)
        except UserError as error:
            # the options may be valid at other lengths
            raise UnsupportedError(str(error)) from None

    def prepare(self, device: str) -> None:
        """Build the layout and the kernel."""
        # a shard may have needed layouts before: build them again, so that the time is counted
        for name in ("layouts", "_sharded", "_rank_kernel"):
            vars(self).pop(name, None)
        if self.workload.decode:
            self._prepare_decode(device)
            return
        super().prepare(device)
        if self.group.size > 1:
            self._kernel = self._rank_kernel
        else:
            w = self.workload
            self._kernel = build_layout_kernel(self.kernel_name, self.layouts, w.heads, w.scores)
            if self.kernel_name == "flashinfer":
                from longseq_bench.attention.external.flashinfer import LIBRARY

                self._kernel_facts |= LIBRARY.facts()

    def _prepare_decode(self, device: str) -> None:
        self.device = device
        if self.requested_kernel not in ("auto", "native", "triton"):
            raise UnsupportedError(
                f"kernel={self.requested_kernel} computes no steps of decoding; use auto"
            )
        kernel, self._kernel_facts = choose_kernel(
            self.requested_kernel, self.kernel_use, self.workload
        )
        self.kernel_name = self._kernel_facts["kernel"]
        runs = self.layouts[0].runs() if self._reads_runs else []
        if not runs:
            kernel = over_lists(kernel, self.layouts, self.workload, device)
            self._kernel_facts["layout"] = "each pass copies the kept keys together"
        parts = tuple(SeenKeys(first, stop) for first, stop in runs)
        self._kernel = CacheAttention(kernel, parts, self.group)

    def build_kernel(self) -> AttentionKernel:
        """Return the kernel that `prepare` built."""
        assert self._kernel is not None, "call prepare first"
        return self._kernel

    @property
    @override
    def kernel_block(self) -> int | None:
        return super().kernel_block if self.group.size == 1 else None

    @override
    def bytes_sent(self) -> int:
        if self.group.size == 1:
            return 0
        token = key_bytes_per_token(self.workload)
        return self._rank_kernel.bytes_sent(token, token if self.workload.train else 0)

    @override
    def work_share(self) -> float:
        if self.group.size == 1:
            return 1.0
        kept = self.layouts[0].row_lengths
        return float(kept[self._sharded[0].rows(self.group.rank)].sum() / kept.sum())

    @cached_property
    def _sharded(self) -> tuple[ShardedLayout, ...]:
        layouts, scores = self.layouts, self.workload.scores
        rank, size = self.group.rank, self.group.size
        # layouts of KV heads have rows of equal lengths
        owners = place_rows(self._placement, layouts[0].row_lengths, size, self._ranks_per_node)
        return tuple(ShardedLayout(layout, owners, rank, size, scores) for layout in layouts)

    @cached_property
    def _rank_kernel(self) -> FetchKernel:
        spans = sparse_selection.span_kernel(self.kernel_name)
        return FetchKernel(self._sharded, self.group, spans)


def special_tokens(pattern: str, seq_len: int, requested: int | None) -> int:
    """Return the global or sink tokens of a pattern; None requests its default."""
    if requested is None and pattern in WITH_SPECIAL:
        return min(128, seq_len)
    return requested or 0


@implementation("block-sparse-multihead")
class BlockSparseMultihead(ProjectedAttention):
    """`block-sparse` between projections.

    The weights are (D, D): one for all heads of q, one for all heads of k, and so on, as the
    contract of `Attention.projections` says. Those of MultiheadBlockSparse are (Hq D, Hq D), mix
    heads, and take Hq times the FLOPs.
    """

    summary = "block-sparse with linear projections of q, k, v and the output"
    takes_sinks = True
    options_of, left_out = BlockSparse, ("placement", "ranks_per_node")

    def __init__(self, workload: Workload, group: Group, **options: Any) -> None:
        super().__init__(workload, group)
        self.inner = BlockSparse(workload, group, **options)

    @classmethod
    @override
    def kept_blocks(cls, workload: Workload, **options: Any) -> int:
        return BlockSparse.kept_blocks(workload, **options)

    def prepare(self, device: str) -> None:
        """Build the layout, the kernel and the weights."""
        super().prepare(device)
        self.inner.prepare(device)
        self.module = Projected(self.inner, self.workload.head_dim, self.torch_dtype, device)
        self.weights = self.module.weights
