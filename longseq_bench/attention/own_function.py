"""A function of the user as an implementation: imported in a child, called, its output compared.

own_source.py finds the function and reads its signature. Exact attention under the
workload's mask is assumed, unless the function or its module has a `pattern`:

    def pattern(q_positions, k_positions, head, *, window=256): ...

It returns how often each query sees each key, (queries, keys), and is given those options of the
function that it names. The mask of the workload applies in addition.
"""

import inspect
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from longseq_bench.attention.base import IMPLEMENTATIONS, Attention, Counts
from longseq_bench.attention.one_rank import visible_pairs_of
from longseq_bench.attention.own_source import (
    ATTN_MASK,
    GROUP,
    MASK_MOD,
    OwnFile,
    OwnFunction,
    files,
    find_file,
    import_function,
    missing_reasons,
    passed_values,
)
from longseq_bench.core.catalogue import Entry
from longseq_bench.core.cost import mask_pairs
from longseq_bench.core.errors import (
    OwnFunctionError,
    UnsupportedError,
    UserError,
    WorldError,
    one_line,
)
from longseq_bench.core.model import Workload
from longseq_bench.core.registry import is_own
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import Positions, TokenOrder
from longseq_bench.kernels.exact.base import AUTO, select
from longseq_bench.kernels.flex_blocks import interval_mask_mod
from longseq_bench.meta_mode import device_for, is_meta, refuse_limited_loops
from longseq_bench.patterns.visible_keys import visible_keys

COUNTED_PAIRS, MIN_COUNTED_ROWS = 2**24, 8
"""Pairs of a pattern, over all heads, that are counted for its density: of evenly spaced rows."""

_SDPA_ARGUMENTS = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"


def find_implementation(name: str, source: str | None = None) -> type[Attention]:
    """Return the class of a registered implementation, or one for a user's function.

    source: the expected hash of its file; None: any. Raises OwnFunctionError for another
    one, and whatever the file raises when it is imported.
    """
    if not is_own(name):
        return IMPLEMENTATIONS.get(name)
    try:
        own = find_file(name)
        if source is None or own.source == source:
            return _make_class(own)
    except UserError as error:
        raise OwnFunctionError(str(error)) from None
    raise OwnFunctionError(
        f"{own.file} is not the file that the command read (its hash is {own.source}, expected "
        f"{source}); run the command again, with the same file on every host"
    )


def describe_own_function(name: str) -> Entry:
    """Describe a user's function for the catalogue.

    Raises UserError if it can't be used, also for whatever its file raises when it is imported.
    """
    own = find_file(name)
    try:
        function = import_function(own)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{find_place(error) or own.file}: {reason}") from None
    return Entry(
        summary=function.summary,
        options=function.options,
        source=function.place,
        hash=own.source,
        missing=tuple(missing_reasons(own.function, function.takes)),
    )


@cache
def _make_class(own: OwnFile) -> type[Attention]:
    function = import_function(own)
    base = OwnSparseAttention if function.pattern else OwnAttention
    members = {
        "own": function,
        "function": staticmethod(function.call),
        "pattern": staticmethod(function.pattern) if function.pattern else None,
        "summary": function.summary,
        "many_ranks": GROUP in function.takes,
        "takes_masks": True,  # or the reason names the missing parameter
        "takes_sinks": True,  # the same
        # a pattern depends on positions, which a step of decoding has only with this parameter
        "takes_decode": function.pattern is None or "new_tokens" in function.takes,
    }
    return type(own.function, (base,), members)


class OwnAttention(Attention):
    """Exact attention by a function of the user."""

    takes_decode = takes_latent = sends_itself = True
    takes_scores = ("soft_cap",)  # or the reason names the missing parameter

    own: ClassVar[OwnFunction]
    function: ClassVar[Callable[..., Any]]
    pattern: ClassVar[Callable[..., Any] | None]

    def __init__(self, workload: Workload, group: Group, **options: Any) -> None:
        takes, name = self.own.takes, type(self).__name__
        for reason in missing_reasons(name, takes, workload, group.size):
            if f"`{GROUP}`" in reason:
                raise WorldError(f"{reason}; it runs on one, not {group.size}")
            raise UnsupportedError(reason)
        options = {spec.name: spec.default for spec in self.own.options} | options
        self.order = TokenOrder("contiguous", workload.seq_len, group.size)
        super().__init__(workload, group)
        values = passed_values(takes, workload, group.rank, group.size)
        if GROUP in values:
            values[GROUP] = group.data
        self._options, self._arguments = options, values | options

    @override
    def prepare(self, device: str) -> None:
        super().prepare(device)
        if is_meta() and self.group.size > 1:
            raise UnsupportedError(
                f"{type(self).__name__} sends by itself, so it can't run without its other ranks"
            )
        w, place = self.workload, device_for(device)
        if "sinks" in self._arguments:
            self._arguments["sinks"] = self.sinks
        if w.mask is not None and ATTN_MASK in self._arguments:
            self._arguments[ATTN_MASK] = visible_pairs_of(w, place, self.shard.queries)
        if w.mask is not None and MASK_MOD in self._arguments:
            mask_mod = interval_mask_mod(visible_keys(w), self.shard.queries, place)
            self._arguments[MASK_MOD] = mask_mod

    @override
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        refuse_limited_loops()
        with _FusedOnMeta(self) if q.is_meta else nullcontext():
            out = type(self).function(q, k, v, **self._arguments)
        expected, got = _describe(q[..., : v.shape[3]]), _describe(out)
        if got != expected:
            raise OwnFunctionError(
                f"{type(self).__name__} returned {got}; expected {expected}, like q (batch, heads, "
                f"tokens, head_dim) ({self.own.place})"
            )
        return out  # type: ignore[no-any-return]

    @override
    def facts(self) -> dict[str, Any]:
        return {"own_function": self.own.place}


class OwnSparseAttention(OwnAttention):
    """Attention by a function of the user that has a `pattern`."""

    def __init__(self, workload: Workload, group: Group, **options: Any) -> None:
        super().__init__(workload, group, **options)
        assert self.pattern is not None
        named = inspect.signature(self.pattern).parameters
        given = {name: value for name, value in self._options.items() if name in named}
        self._pattern = partial(self.pattern, **given)

    @override
    def multiplicity(self, q_positions: Positions, k_positions: Positions, head: int) -> Counts:
        counts = np.asarray(self._pattern(q_positions, k_positions, head))
        expected, name = (len(q_positions), len(k_positions)), type(self).__name__
        if counts.shape != expected or counts.dtype.kind not in "biu":
            raise OwnFunctionError(
                f"pattern of {name} returned {counts.dtype} {counts.shape}; expected "
                f"booleans or whole numbers {expected}, one for each query and key "
                f"({self.own.place})"
            )
        return counts * visible_keys(self.workload).multiplicity(q_positions, k_positions)

    @override
    def kept_pairs(self) -> float:
        return self._kept_share * mask_pairs(self.workload)

    @override
    def measures(self) -> dict[str, float]:
        return {"density_achieved": self._kept_share}

    @override
    def facts(self) -> dict[str, Any]:
        rows, every = len(self._counted_rows), len(self.workload.queries)
        return super().facts() | {"density_of": f"{rows} of {every} query rows"}

    @cached_property
    def _kept_share(self) -> float:
        """The share of the visible pairs that the pattern keeps, from some of the rows."""
        w, rows, keys = self.workload, self._counted_rows, np.arange(self.workload.seq_len)
        kept = sum(float(self.multiplicity(rows, keys, head).sum()) for head in range(w.heads))
        return kept / (visible_keys(w).pairs(rows) * w.heads)

    @property
    def _counted_rows(self) -> Positions:
        """The middle rows of equally long parts; all rows if they are few."""
        w, rows = self.workload, len(self.workload.queries)
        count = min(rows, max(MIN_COUNTED_ROWS, COUNTED_PAIRS // (w.seq_len * w.heads)))
        return w.queries.start + (2 * np.arange(count) + 1) * rows // (2 * count)


class _FusedOnMeta(TorchFunctionMode):
    """Gives scaled_dot_product_attention the memory that it has on the device.

    On meta tensors torch would choose the kernel that holds all scores.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
        q, mask = given["query"], given.get("attn_mask")
        name = "aten-flash-cpu" if self._attention.device == "cpu" else AUTO
        kernel, _ = select(name, self._attention.kernel_use)
        if mask is not None and mask.dim() != 2:
            return func(*args, **kwargs)
        causal, keep_lse = given.get("is_causal", False), q.requires_grad
        return kernel.forward(q, given["key"], given["value"], causal, mask, keep_lse)[0]


def find_place(error: BaseException) -> str | None:
    """Return the last line of an own function's file that an exception passed: "a.py:12"."""
    places = [
        f"{files[file]}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if (file := os.path.realpath(frame.f_code.co_filename)) in files
    ]
    return places[-1] if places else None


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
