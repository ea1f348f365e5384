"""Field declarations of typed rows, and the fields that every row has: trial, machine and memory.

A row is a frozen dataclass whose fields are made with `declare`, or by the merge rule, each written
once: heading, kind, help and rule. Tables, filters, JSON and data frames read them by `fields_of`.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from longseq_bench.core.model import (
    Allocator,
    Device,
    DType,
    Keep,
    Mode,
    OptionValue,
    Record,
    Timing,
    options_key,
)

ValueKind = Literal[
    "text", "tokens", "bytes", "seconds", "flop_rate", "byte_rate", "share", "count", "ratio",
    "error", "flag", "list", "options",
]  # fmt: skip
"""The kind of quantity; it decides the unit, and the format for printing and parsing."""

Merge = Literal["same", "worst", "median", "largest", "each rank", "search", "derived"]
"""The rule that merges the values of several rounds and ranks into one.

same: equal in all of them.  worst: of the round with the most severe status.
median: over all iterations, each as slow as its slowest rank.
largest: over ranks and rounds.  each rank: a list in the order of ranks.
search: from all steps of a search.  derived: computed from other fields or other rows.
"""


@dataclass(frozen=True)
class Field:
    """The declaration of one field of a row.

    measurement: name of the measurement that gives the value; default: that of the field without
    its unit.
    in_frame: a column of data frames and a key of rows in JSON; False for a field that only reports
    can fill in.
    choices: allowed words of a Literal; empty for free text and numbers.
    """

    heading: str
    kind: ValueKind
    help: str
    merge: Merge = "derived"
    measurement: str = ""
    in_frame: bool = True
    name: str = ""
    choices: tuple[str, ...] = ()


def declare(*arguments: Any, default: Any = None, **more: Any) -> Any:
    """Declare a field of a row dataclass; the arguments are those of Field.

    default: value of rows built without this field. Fields of rules same, worst and search, which
    need no measurement, are required.
    """
    field = Field(*arguments, **more)
    if field.merge in ("same", "worst", "search"):
        return dataclasses.field(metadata={"field": field})
    return dataclasses.field(default=default, metadata={"field": field})


def same(*arguments: str) -> Any:
    """Declare a field that is equal in all rounds and on all ranks."""
    return declare(*arguments, merge="same")


def largest(*arguments: str, **more: str) -> Any:
    """Declare a field that is the largest over ranks and rounds."""
    return declare(*arguments, merge="largest", **more)


@cache
def fields_of(row_type: type) -> dict[str, Field]:
    """Return the declarations of a row class by field name, in order of declaration."""
    fields, types = {}, get_type_hints(row_type)
    for name, field in ((one.name, one.metadata["field"]) for one in dataclasses.fields(row_type)):
        measurement = field.measurement or name.removesuffix("_s").removesuffix("_bytes")
        choices = _literals(types[name])
        fields[name] = replace(field, name=name, measurement=measurement, choices=choices)
    return fields


def _literals(annotation: Any) -> tuple[str, ...]:
    """Return the words of a Literal, also of `Literal[...] | None`."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in _literals(part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial, or one search, on one machine, with its rounds and ranks merged.

    Units are SI: seconds, bytes, FLOP. None is a value that was not measured.
    """

    implementation: str = same("Implementation", "text", "Name of the implementation.")
    options: Mapping[str, OptionValue] = same(
        "Options", "options", "Options of the implementation by name."
    )
    world_size: int = same("Ranks", "count", "Number of ranks.")
    device: Device = same("Device", "text", "Device type of every rank.")
    dtype: DType = same("Dtype", "text", "Element type of q, k and v.")
    mode: Mode = same(
        "Mode", "text", "forward, train (and backward), or decode (against a KV cache)."
    )
    causal: bool = same("Causal", "flag", "Whether the mask is causal.")
    mask: str = same(
        "Mask", "text", "Keys that a query sees: full, causal, sliding-window:4096, ..."
    )
    soft_cap: float | None = same(
        "Soft cap", "count", "Bound c of scores z, c·tanh(z/c); none: no bound."
    )
    batch: int = same("Batch", "count", "Batch size.")
    heads: int = same("Heads", "count", "Number of query heads.")
    kv_heads: int = same("KV heads", "count", "Number of key and value heads.")
    head_dim: int = same("Head dim", "count", "Dimension of one head of q and k.")
    v_head_dim: int = same("V head dim", "count", "Dimension of one head of v.")
    model: str = same(
        "Model", "text", "Model of the shape, with what was changed; empty: no model."
    )
    layers: int = same("Layers", "count", "Layers in a step of decoding: all with a cache, or 1.")
    new_tokens: int = same(
        "New tokens", "count", "Tokens that a step of decoding adds; 0 in other modes."
    )
    sink: bool = same("Sink", "flag", "Whether each query head has a learnable sink.")
    latent: str | None = same(
        "Latent", "text", "What MLA caches of a token, 512+64/192; none: keys and values."
    )
    kv_dtype: str | None = same("KV dtype", "text", "That of a quantised cache, or none.")
    memory_budget: int | None = same("Memory budget", "bytes", "Memory that one rank may allocate.")
    time_budget: float | None = same("Time budget", "seconds", "Time that one pass may take.")
    threads: int | None = same("Threads", "count", "CPU threads per rank; none: chosen by torch.")
    fit_only: bool = same("Fit only", "flag", "Shortened loops: nothing was timed or checked.")
    keep: Keep = same("Keep", "text", "What a pass preserves: all, inputs, or nothing (in place).")
    allocator: Allocator = same(
        "Allocator", "text", "Allocator mode: default, expandable (CUDA), fresh (CPU)."
    )
    timing: Timing = same("Timing", "text", "Timed passes: warm, cold (flushed caches), graph.")
    source: str | None = same(
        "File hash", "text", "Hash of the file of an own function; none for any other."
    )
    requested_dense_kernel: str | None = same(
        "Requested dense kernel", "text", "Asked for; none: that of the sparse one."
    )
    peak_bytes: int | None = largest("Peak memory", "bytes", "Largest peak memory of any rank.")
    tokens_per_rank: int | None = largest(
        "Tokens per rank", "tokens", "Most on any rank.", measurement="own_tokens"
    )
    rank_peaks: Sequence[int | None] | None = declare(
        "Peak of each rank", "bytes", "Peak memory of each rank.", "each rank"
    )
    imbalance: float | None = declare(
        "Imbalance", "ratio", "Largest peak divided by the smallest; none with one rank."
    )
    alloc_retries: float | None = largest(
        "Allocator retries", "count", "Times CUDA's allocator freed its cache."
    )
    outside_allocator_bytes: int | None = largest(
        "Memory outside the allocator",
        "bytes",
        "CUDA memory of the fullest rank after the pass that torch's allocator does not hold: "
        "context, NCCL buffers, workspaces of libraries.",
    )
    density_achieved: float | None = largest(
        "Achieved density", "share", "Kept share of visible blocks or pairs."
    )
    fingerprint: str = same("Fingerprint", "text", "Hash of the machine and its software.")
    host: str = same("Host", "text", "Name of the machine.")
    workers: int | None = same(
        "Workers", "count", "Trials that ran side by side, each on devices of its own."
    )
    check_limits: str | None = declare(
        "Check", "text", "What the check left out, and a coarser dtype by which it judged."
    )
    label: str = declare("Implementation", "text", "With its options that differ.", default="")

    @property
    def name(self) -> str:
        """The label, with the number of ranks if there are several: "ring ×2"."""
        return self.label + ranks_mark(self.world_size)

    @property
    def claim_name(self) -> str:
        """The name for a sentence that calls it the best, with what its check left out."""
        return f"{self.name} (check: {self.check_limits})" if self.check_limits else self.name

    @property
    def is_sparse(self) -> bool:
        """True if the pattern skips any pair that dense attention computes."""
        return self.density_achieved is not None and self.density_achieved < 1

    @property
    def density(self) -> float:
        """The share of the visible blocks that is kept, 0 to 1; 1 for exact attention."""
        kept = self.density_achieved
        return 1.0 if kept is None or kept >= 1 else max(0.0, kept)

    @property
    def is_full_pass(self) -> bool:
        """True if passes ran in full and preserved their inputs."""
        return not self.fit_only and self.keep != "nothing"

    @property
    def offloads(self) -> bool:
        """True if tensors are in the host's memory instead of the device's."""
        return self.options.get("offload", "none") != "none"

    @property
    def options_key(self) -> str:
        """Text that is equal for equal options."""
        return options_key(self.options)

    @property
    def workload_key(self) -> Hashable:
        """Equal for rows of one workload on one machine, which may be compared."""
        return _same_workload(self)

    @property
    def growth_key(self) -> Hashable:
        """Equal for rows that differ in length, ranks, threads and time budget only."""
        return _same_growth(self), self.options_key

    @property
    def ranks_key(self) -> Hashable:
        """Equal for rows that differ in their number of ranks only."""
        return self.workload_key, _same_trial(self), self.options_key


def _find_path(name: str) -> str:
    if name in ("fingerprint", "host", "workers"):
        return f"environment.{name}"
    if name in (paths := {"mask": "visibility.text", "layers": "layer_count"}):
        return f"trial.workload.{paths[name]}"
    return f"trial.workload.{name}" if name in _WORKLOAD else f"trial.{name}"


_WORKLOAD = (
    *("batch", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "causal", "mask", "mode"),
    *("new_tokens", "sink", "soft_cap", "latent", "kv_dtype", "model", "layers"),
)
IDENTITY = [name for name, field in fields_of(Row).items() if field.merge == "same"]
"""Fields that identify a trial and its machine."""
_find_identity = attrgetter(*map(_find_path, IDENTITY))

SAME_WORKLOAD = (*_WORKLOAD, "device", "threads", "fingerprint")
"""Fields that are equal for comparable figures; rows of sweeps also need equal lengths."""
SAME_TRIAL = (
    *("implementation", "source", "memory_budget", "time_budget", "fit_only", "keep", "allocator"),
    *("requested_dense_kernel", "timing"),
)
_same_workload, _same_trial = attrgetter(*SAME_WORKLOAD), attrgetter(*SAME_TRIAL)
_same_growth = attrgetter(*({*SAME_WORKLOAD, *SAME_TRIAL} - {"threads", "time_budget"}))

R = TypeVar("R", bound=Row)
T = TypeVar("T")


def ranks_mark(ranks: int) -> str:
    """Return " ×2" for two ranks; "" for one."""
    return f" ×{ranks}" if ranks > 1 else ""


def require(value: T | None) -> T:
    """Return a value that the row must have. Raises ValueError if it was not measured."""
    if value is None:
        raise ValueError("the row was not selected for having this value")
    return value


def identity(record: Record) -> dict[str, Any]:
    """Return the fields of a row that identify its trial and machine."""
    return dict(zip(IDENTITY, _find_identity(record), strict=True))
