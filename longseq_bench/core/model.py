"""Data of longseq: frozen, validated once when created, JSON both ways.

A Trial crosses to the child and an Outcome comes back. Environment and Record stay in the parent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict, Field, computed_field
from pydantic.dataclasses import dataclass

from longseq_bench.core.settings import SAME_KERNEL as SAME_KERNEL
from longseq_bench.core.settings import TRIAL
from longseq_bench.core.settings import Allocator as Allocator
from longseq_bench.core.settings import Device as Device
from longseq_bench.core.settings import DeviceChoice as DeviceChoice
from longseq_bench.core.settings import DType as DType
from longseq_bench.core.settings import Keep as Keep
from longseq_bench.core.settings import Mode as Mode
from longseq_bench.core.settings import Timing as Timing
from longseq_bench.core.workload import DTYPE_ALIASES as DTYPE_ALIASES
from longseq_bench.core.workload import DTYPE_BYTES as DTYPE_BYTES
from longseq_bench.core.workload import Frozen as Frozen
from longseq_bench.core.workload import Layers as Layers
from longseq_bench.core.workload import Workload as Workload
from longseq_bench.core.workload import canonical_dtype as canonical_dtype
from longseq_bench.core.workload import declared

SCHEMA = 4

MAX_HEADS = 65_535
"""Heads of all sequences of a batch on a rank; each is checked by itself, in milliseconds."""

Status = Literal[
    "ok", "oom", "timeout", "hang", "crashed", "limit", "wrong", "unsupported", "error"
]
Phase = Literal["start", "inputs", "plan", "forward", "backward", "communication", "check", "time"]
Purpose = Literal["measure", "probe", "edge", "confirm", "density"]
OptionValue = bool | int | float | str | tuple[int, ...] | None

SDPA = "sdpa"
"""Dense kernel: the one that torch's scaled_dot_product_attention chooses."""


class Trial(Frozen):
    """One implementation, with all its options, on one workload, under one budget.

    core/settings.py describes the settings. memory_budget and time_budget are in bytes and seconds.
    round: repetition index in an interleaved comparison, or of a length in a search, from 0.
    fit_only: loops are cut short; memory is that of a complete pass, time is not. Results are not
    checked, and such trials are never compared with complete passes.
    source: hash of an own function (core/registry.py), else None.
    """

    implementation: str
    options: dict[str, OptionValue] = Field(default_factory=dict)
    workload: Workload
    device: Device = "cpu"
    world_size: int = declared(TRIAL["world_size"])
    memory_budget: int | None = Field(default=None, ge=1)
    time_budget: float | None = Field(default=None, gt=0)
    repeats: int = declared(TRIAL["repeats"])
    time_cap: float = Field(default=TRIAL["time_cap"].default, gt=0)
    threads: int | None = declared(TRIAL["threads"])
    seed: int = 0
    round: int = Field(default=0, ge=0)
    fit_only: bool = False
    keep: Keep = declared(TRIAL["keep"])
    allocator: Allocator = declared(TRIAL["allocator"])
    timing: Timing = declared(TRIAL["timing"])
    dense_kernel: str = declared(TRIAL["dense_kernel"])
    source: str | None = None

    @property
    def requested_dense_kernel(self) -> str | None:
        """The requested dense kernel; None: that of the sparse attention."""
        return None if self.dense_kernel == SAME_KERNEL else self.dense_kernel

    @property
    def unsupported_reason(self) -> str | None:
        """The reason why a setting has no meaning with the others; None: each has one."""
        w = self.workload
        if w.batch * w.heads > MAX_HEADS * self.world_size:
            heads = f"batch {w.batch:,} with {w.heads:,} heads"
            return f"{heads}: more than {MAX_HEADS:,} heads in all would take minutes to check"
        if self.keep == "inputs" and not w.train:
            return "keep=inputs needs mode=train: a forward pass keeps nothing for a backward"
        if self.keep == "nothing" and w.decode:
            return "keep=nothing has no meaning with mode=decode: the cache stays as it is"
        if self.keep == "nothing" and w.sink:
            return "keep=nothing keeps no log-sum-exp, which a sink needs; use keep=all"
        if self.keep == "nothing" and not w.train and w.v_head_dim != w.head_dim:
            return (
                f"keep=nothing: the output has v_head_dim {w.v_head_dim}, so it can't overwrite q "
                f"with head_dim {w.head_dim}"
            )
        if self.timing == "graph" and (self.device != "cuda" or self.world_size > 1):
            return "timing=graph needs device=cuda and one rank: the pass is a CUDA graph"
        if self.timing == "cold" and self.allocator == "fresh":
            return "timing=cold has no meaning with allocator=fresh: its memory is in no cache"
        needed = {"expandable": "cuda", "fresh": "cpu"}.get(self.allocator, self.device)
        if self.device != needed:
            return f"allocator={self.allocator} needs device={needed}"
        return None

    @property
    def key(self) -> str:
        """16 hex digits that identify this trial: equal trials have equal keys on any machine."""
        w = self.workload
        # records from before a field keep their keys; a model is a label, and so are its weights
        later = "mask", "new_tokens", "layers", "sink", "latent", "kv_dtype", *vars(w.scores)
        absent = {"model", "weights"} | {name for name in later if not getattr(w, name, None)}
        absent |= {"v_head_dim"} if w.v_head_dim == w.head_dim else set()
        own = {"dense_kernel": self.requested_dense_kernel is None, "source": self.source is None}
        own["timing"] = self.timing == "warm"
        data = self.model_dump(mode="json", exclude={"workload": absent, **own})
        if self.source is not None:
            # the file's bytes and the function identify it, wherever the file lies
            data["implementation"] = data["implementation"].rpartition(":")[2]
        return _digest(data)

    def key_without(self, *names: str) -> Hashable:
        """Return a key that is equal for trials that differ only in these fields.

        The fields are those of the trial or of its workload. Valid in this process only.
        """
        left_out = {*names, "workload", "options"}
        fields = [*vars(self).items(), *vars(self.workload).items()]
        values = tuple([value for name, value in fields if name not in left_out])
        return options_key({} if "options" in names else self.options), values

    def at(self, seq_len: int) -> Trial:
        """Return the same trial at another length, which is at least that of the new tokens."""
        tokens = max(seq_len, self.workload.new_tokens)
        workload = self.workload.model_copy(update={"seq_len": tokens})
        return self.model_copy(update={"workload": Workload.model_validate(workload.model_dump())})

    def replace(self, **changes: Any) -> Trial:
        """Return the same trial with other fields, validated again."""
        return Trial.model_validate({**self.model_dump(), **changes})


def options_key(options: Mapping[str, OptionValue]) -> str:
    """Return text that is equal for equal options in any order; valid in this process only."""
    # by repr: 1, 1.0 and True are equal, but are different options
    return repr(sorted(options.items()))


# A dataclass with slots: a record has a dozen of these, and a model takes three times the memory.
_CONFIG = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Measurement:
    """Raw samples of one quantity on one rank, in SI units (s, B, J, W, FLOP, 1)."""

    name: str
    unit: str
    samples: tuple[float, ...]
    rank: int = 0


class Outcome(Frozen):
    """The result of a trial. `facts` describe how it ran: backend, meters, reasons."""

    status: Status
    reason: str | None = None
    phase: Phase | None = None
    measurements: tuple[Measurement, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """True for ok, False for out of memory; None: the status says nothing about memory."""
        return {"ok": True, "oom": False}.get(self.status)

    def samples(self, name: str) -> tuple[float, ...]:
        """Return all samples of a measurement, over ranks; empty if it was not taken."""
        return tuple([s for m in self.measurements if m.name == name for s in m.samples])

    def largest(self, name: str) -> float | None:
        """Return the largest sample of a measurement over ranks; None if it was not taken."""
        return max(self.samples(name), default=None)


ENVIRONMENT_FAILURE = "environment_failure"
"""Fact of a failure of the processes around a trial, such as a killed fork server. It says nothing
about the implementation: a launcher runs the trial once more, and resuming runs it again."""


def environment_failure(reason: str, phase: Phase | None = None) -> Outcome:
    """Return the outcome of a trial that something other than the trial has ended."""
    return Outcome(status="error", reason=reason, phase=phase, facts={ENVIRONMENT_FAILURE: True})


def is_environment_failure(outcome: Outcome) -> bool:
    """Return True if the outcome says nothing about the trial, so that it has to run again."""
    return bool(outcome.facts.get(ENVIRONMENT_FAILURE))


class DryRunEstimate(Frozen):
    """The predicted cost of a trial, without running it, on the rank that needs most memory.

    inside_bytes: the part of the peak that fused kernels hold, from a table.  index_bytes: the part
    in tensors of integers, such as the lists of a layout.  most_index_bytes, peak_at_most_index:
    bytes of such tensors, and of all, when there are most of them.  host_bytes: tensors
    in host memory, not in the peak.  untabled: fused kernels that are missing in the table.
    flops: per pass, the mean of the ranks.  busiest: FLOPs of the busiest rank over that mean.
    bytes_sent, transfers: per pass, of the fullest rank.  overlaps: transfers overlap with compute.
    unsupported: the reason why nothing is known.  too_long: the reason is the limit of a kernel.

    kernel: name of the kernel that does most of the work; empty if none is named.  peers: for each
    communicator the number of ranks that this one sends to.  outside: bytes of the device outside
    tensors by their use; empty if they are not counted.  smaller_layouts: tokens and block of the
    block layouts from which it is extrapolated; empty for a dry run of the trial itself.
    rest_bytes: the other layers of a model, its weights and what training keeps of them.
    """

    peak_bytes: int = 0
    inside_bytes: int = 0
    index_bytes: int = 0
    most_index_bytes: int = 0
    peak_at_most_index: int = 0
    host_bytes: int = 0
    untabled: tuple[str, ...] = ()
    flops: float = 0.0
    busiest: float = 1.0
    floor_bytes: int = 0
    bytes_sent: int = 0
    transfers: int = 0
    overlaps: bool = True
    unsupported: str | None = None
    too_long: bool = False
    kernel: str = ""
    peers: tuple[int, ...] = ()
    outside: dict[str, int] = Field(default_factory=dict)
    smaller_layouts: tuple[tuple[int, int], ...] = ()
    rest_bytes: int = 0

    @property
    def outside_bytes(self) -> int:
        """Bytes of the device outside tensors."""
        return sum(self.outside.values())

    @property
    def budget_bytes(self) -> int:
        """Bytes that count for a memory budget: tensors and what is outside them."""
        return self.peak_bytes + self.rest_bytes + self.outside_bytes


class TrialPrediction(Frozen):
    """The prediction for a trial before it ran; None where nothing was predicted."""

    peak_bytes: int | None = None
    outside_bytes: int = Field(default=0, description="of a GPU, outside tensors")
    seconds: float | None = Field(default=None, description="of one pass")
    rate: str | None = Field(default=None, description="where the seconds come from")
    fits_tokens: int | None = Field(default=None, description="longest that fits in memory")
    fits_seconds: float | None = Field(default=None, description="of one pass of that length")
    asked: dict[int, tuple[float, float | None]] = Field(
        default_factory=dict,
        description="seconds of one pass, and share of dense FLOPs, at each length asked for",
    )


class Environment(Frozen):
    """Machine and versions; records with equal fingerprints may be compared.

    `fingerprint` covers all fields except load, clocks and commit.

    cuda: the version that torch was built for.  cudnn, nccl, triton: of the installed packages;
    all four are None with a CPU build of torch.
    power_limits_w, sm_clocks_mhz: of each GPU; None if the driver gives no number.
    cores: those that a trial may use.  workers: trials that ran side by side; None for one.
    """

    host: str
    os: str
    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    python: str
    torch: str
    longseq: str
    commit: str | None = None
    variables: dict[str, str] = Field(default_factory=dict, description="allocator, threads, CUDA")
    load: tuple[float, ...] = Field(default=(), description="1, 5, 15 minutes")
    clock_mhz: float | None = None
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    triton: str | None = None
    power_limits_w: tuple[float | None, ...] = ()
    sm_clocks_mhz: tuple[float | None, ...] = Field(default=(), description="of multiprocessors")
    workers: int | None = None

    model_config = ConfigDict(extra="ignore")  # the stored fingerprint

    @property
    def gpu_libraries(self) -> dict[str, str]:
        """Versions of CUDA's libraries by their usual names; without those that are not known."""
        known = {"CUDA": self.cuda, "cuDNN": self.cudnn, "NCCL": self.nccl, "Triton": self.triton}
        return {name: version for name, version in known.items() if version}

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def fingerprint(self) -> str:
        """Hash of the parts that make figures comparable."""
        data = {name: getattr(self, name) for name in STABLE_FIELDS}
        known = {name: value for name, value in data.items() if value or name not in _ADDED}
        return _digest({**known, "variables": self.variables})


_VOLATILE = {"load", "clock_mhz", "sm_clocks_mhz", "commit"}
_ADDED = {"cuda", "cudnn", "nccl", "triton", "power_limits_w", "workers"}
"""Fields that older records lack: a fingerprint covers them only if they have a value."""
STABLE_FIELDS = [name for name in Environment.model_fields if name not in {"variables", *_VOLATILE}]


class Place(Frozen):
    """The worker of a host that ran a trial beside others.

    worker: from 1.  devices: its GPUs by UUID, or its cores by number.
    neighbours: implementations that ran beside the trial at any time.
    """

    worker: int
    devices: tuple[str, ...]
    neighbours: tuple[str, ...] = ()


class Record(Frozen):
    """One line of a results file.

    processes: the trial's child processes, retries included.
    purpose: measure (a row of a sweep); probe, edge, confirm (steps of a search for the longest
    length); density (of earlier versions, not shown).
    predicted_tokens: the maximum that the search expected when it requested this run.
    foreseen: the memory and time predicted for this run.
    part, place: of a run with several workers. part: position of the trials that belong together.
    """

    schema_: int = Field(default=SCHEMA, alias="schema", strict=True, ge=1, le=SCHEMA)
    trial: Trial
    outcome: Outcome
    environment: Environment
    started_at: str = Field(description="ISO 8601, UTC")
    wall_s: float
    processes: int = 1
    purpose: Purpose = "measure"
    predicted_tokens: int | None = None
    foreseen: TrialPrediction | None = None
    command: str | None = None
    part: int | None = None
    place: Place | None = None

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @property
    def key(self) -> str:
        """Key of the trial."""
        return self.trial.key


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
