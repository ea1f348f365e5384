"""Profiles of hardware, also of other machines: data/hardware.yaml, and users' own files."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from longseq_bench.core.cost import BACKWARD_MATMULS, FORWARD_MATMULS
from longseq_bench.core.errors import ConfigError, UnknownNameError, UserError
from longseq_bench.core.files import load_table, read_text_file
from longseq_bench.core.model import Device, DType, Frozen, Mode
from longseq_bench.core.units import parse_bytes

LOCAL_CPU = "cpu"
"""Name of the profile of this machine's processor."""

CPU_FLOPS_PER_CORE = 1e11
"""Assumed FLOP/s of a CPU core without records, in float32. Half of it for other dtypes, which not
all processors support. Two processors with AVX-512 reached 0.9e11 to 1.5e11 a core."""


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Bytes = Annotated[
    int, Field(ge=0), BeforeValidator(lambda v: parse_bytes(v) if isinstance(v, str) else v)
]


class Link(Frozen):
    """One direction of a device's network: latency in s per transfer, bandwidth in bytes/s."""

    latency: float = Field(ge=0, allow_inf_nan=False)
    bandwidth: Positive


class KernelRate(Frozen):
    """One figure: FLOP/s of a kernel in 16 bits on long sequences, of a backward if it is known."""

    kernel: str
    head_dim: int = Field(ge=1)
    mask: Literal["full", "causal"]
    forward: Positive
    backward: Positive | None = None
    source: str

    def flops(self, train: bool) -> float | None:
        """Return the FLOP/s of a forward, or of a forward and a backward; None if not known."""
        if not train or self.backward is None:
            return None if train else self.forward
        time = FORWARD_MATMULS / self.forward + BACKWARD_MATMULS / self.backward
        return (FORWARD_MATMULS + BACKWARD_MATMULS) / time

    def words(self, train: bool) -> str:
        """Return kernel, head_dim, mask, FLOP/s and source in words."""
        rates = [self.forward, *([self.backward] if train and self.backward else [])]
        tera = " / ".join(f"{rate / 1e12:,.0f}" for rate in rates)
        what = f"{self.kernel}, head_dim {self.head_dim}, {self.mask}"
        return (
            f"{what}: {tera} TFLOP/s {'forward / backward' if train else 'forward'} ({self.source})"
        )


CPU_LINK = Link(latency=5e-4, bandwidth=1e9)
"""Transfers between two ranks of a CPU by gloo, if each rank has a core; with them the times of
many-rank implementations were right within 25 % (benchmarks/plan_ratios.py)."""


class OutsideMemory(Frozen):
    """Bytes of a device that a rank needs outside its tensors.

    context: CUDA's context.  libraries: workspaces of cuBLAS.  connection: NCCL's buffers for one
    peer of a communicator on the same node.  network: NCCL's buffers of a communicator that leaves
    the node.
    """

    context: Bytes
    libraries: Bytes
    connection: Bytes
    network: Bytes


class Hardware(Frozen):
    """One device and its networks; data/hardware.yaml explains the keys (fields or aliases)."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    name: str
    device: Device
    capability: tuple[int, int] | None = None
    memory: Bytes = Field(gt=0)
    flops: dict[DType, Positive] = Field(min_length=1)
    bandwidth: Positive
    efficiency: dict[Literal["forward", "train"], Share] = Field(alias="reaches", min_length=2)
    """Shares of the peak FLOP/s that fused attention reaches."""
    per_node: int = Field(ge=1)
    shared: bool = False
    """True: all ranks run on one device. They share its cores, which also copy what is sent."""
    intra_node: Link = Field(alias="inside")
    inter_node: Link = Field(alias="between")
    outside: OutsideMemory | None = None
    kernels: tuple[KernelRate, ...] = ()
    source: str

    def link(self, ranks: int) -> Link:
        """The slowest network that a ring over this number of ranks crosses."""
        if not self.shared:
            return self.intra_node if ranks <= self.per_node else self.inter_node
        per_core = max(1.0, ranks / self.per_node)
        one = self.intra_node
        return Link(latency=one.latency * per_core, bandwidth=one.bandwidth / per_core)

    def rate(self, dtype: DType, mode: Mode) -> float:
        """Return the FLOP/s of fused attention. Raises UserError if the dtype is not supported.

        That of a forward is valid for decode, which memory bandwidth limits.
        """
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise UserError(f"the profile of {self.name} has no {dtype}; it has {known}")
        return self.flops[dtype] * self.efficiency["train" if mode == "train" else "forward"]

    def figures(self, train: bool, head_dim: int, causal: bool) -> dict[str, KernelRate]:
        """Return the figure of each kernel that has one, in 16 bits.

        That of the head_dim, else the next lower one, else the next higher one; of the other mask
        if there is none of this one.
        """
        mask = "causal" if causal else "full"

        def fit(rate: KernelRate) -> tuple[bool, int, bool]:
            return rate.head_dim <= head_dim, -abs(rate.head_dim - head_dim), rate.mask == mask

        known = [rate for rate in reversed(self.kernels) if rate.flops(train)]
        return {rate.kernel: rate for rate in sorted(known, key=fit)}

    def of_tensor_parallel(self, tp: int) -> "Hardware":
        """Return the device as the ranks that share the tokens see it: tp ranks of a node are one.

        NCCL's connection between those is added to the libraries. Raises UserError for a tp that
        does not divide a node.
        """
        if self.per_node % tp:
            raise UserError(f"--tp {tp} does not divide the {self.per_node} devices of a node")
        outside = self.outside
        if outside and tp > 1:
            libraries = outside.libraries + outside.connection
            outside = outside.model_copy(update={"libraries": libraries})
        return self.model_copy(update={"per_node": self.per_node // tp, "outside": outside})

    def outside_tensors(self, ranks: int, peers: Sequence[int]) -> dict[str, int]:
        """Return the bytes outside the tensors of a rank by their use; empty if they are unknown.

        peers: for each communicator the number of ranks that this one sends to.
        """
        if self.outside is None:
            return {}
        near = sum(min(of_one, self.per_node - 1) for of_one in peers)
        network = len(peers) if ranks > self.per_node else 0
        nccl = near * self.outside.connection + network * self.outside.network
        own = {"context": self.outside.context, "libraries": self.outside.libraries}
        return own | ({"nccl": nccl} if ranks > 1 else {})


def this_cpu(name: str, cores: int, memory: int) -> Hardware:
    """Return a profile of a CPU from its cores alone; records of the machine are more exact."""
    flops = CPU_FLOPS_PER_CORE * cores
    peaks: dict[DType, float] = {"float32": flops, "bfloat16": flops / 2, "float16": flops / 2}
    whole = {"forward": 1.0, "train": 1.0}
    own = {"name": name, "device": "cpu", "memory": memory, "flops": peaks, "bandwidth": 1e10}
    ranks = {"per_node": cores, "shared": True, "intra_node": CPU_LINK, "inter_node": CPU_LINK}
    source = "estimated from its number of cores"
    return Hardware.model_validate({**own, **ranks, "efficiency": whole, "source": source})


@cache
def _built_in() -> dict[str, Hardware]:
    data = load_table("hardware.yaml")
    for group in load_table("kernel_rates.yaml"):
        source, names = f"{group['source']}, {group['date']}", KernelRate.model_fields
        rows = [dict(zip(names, (*row, source), strict=True)) for row in group["rows"]]
        for gpu in group["gpus"]:
            data[gpu].setdefault("kernels", []).extend(rows)
    return _check(data, "data/hardware.yaml")


def find_profile(name: str, capability: tuple[int, int] | None = None) -> Hardware | None:
    """Return the profile by CUDA's name of a GPU (a GB200 is a B200), else of its generation."""
    words, known, same = re.split("[^a-z0-9]+", name.lower()), _built_in(), capability or (0, 0)
    named = [one for key, one in known.items() if any(word.endswith(key) for word in words)]
    alike = [one for one in known.values() if one.capability and one.capability[0] == same[0]]
    return next(iter(named + alike), None)


def profiles(own: Path | None = None) -> dict[str, Hardware]:
    """Return all profiles by name. Raises ConfigError, with the key, for an invalid file."""
    found = dict(_built_in())
    if own is not None:
        try:
            data = yaml.safe_load(read_text_file(own)) or {}
        except yaml.YAMLError as error:
            raise ConfigError(f"{own}: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{own}: expected names with profiles, not {type(data).__name__}")
        found |= _check(data, str(own))
        if LOCAL_CPU in found:
            raise ConfigError(f"{own}: {LOCAL_CPU} is this machine's processor; use another name")
    return found


def profile(name: str, own: Path | None = None) -> Hardware:
    """Return the profile of that name. Raises UnknownNameError with the nearest one."""
    known = profiles(own)
    if name.lower() not in known:
        raise UnknownNameError("hardware", name, [*known, LOCAL_CPU], str(own) if own else "")
    return known[name.lower()]


def _check(data: dict[str, Any], place: str) -> dict[str, Hardware]:
    return {str(name).lower(): _profile(str(name), entry, place) for name, entry in data.items()}


def _profile(name: str, entry: Any, place: str) -> Hardware:
    keys = [field.alias or key for key, field in Hardware.model_fields.items()]
    try:
        return Hardware.model_validate(entry)
    except ValidationError as error:
        # a key is missing because another is misspelt
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UnknownNameError("key", where, keys, f"{name} of {place}") from None
        reason = first["msg"].removeprefix("Value error, ")
        if where.startswith("kernels") and first["type"] in ("tuple_type", "model_type"):
            reason = f"write a list of rows with {', '.join(KernelRate.model_fields)}"
        raise ConfigError(": ".join(filter(None, (place, name, where, reason)))) from None
