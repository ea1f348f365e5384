"""Implementations and devices of this machine, as data: a child lists them, the parent reads them.

The parent never imports an implementation. It asks a child for this catalogue once, also for the
functions of the user that a command names, and checks names, options and devices against it.
"""

from typing import Any

from pydantic import Field

from longseq_bench.core.errors import UnknownNameError, UserError
from longseq_bench.core.files import load_table
from longseq_bench.core.model import Device, DeviceChoice, DType, Frozen, OptionValue
from longseq_bench.core.options import OptionSpec, fill
from longseq_bench.core.registry import canonical_name


class Entry(Frozen):
    """One implementation. `unavailable` maps a device to the reason why it cannot run there.

    source: built-in, the module of a plug-in, or file and line of an own function.
    missing: why workloads are unsupported by an own function, from its signature.  hash: of its
    source; None for any other implementation.
    """

    summary: str
    options: tuple[OptionSpec, ...] = ()
    unavailable: dict[str, str] = Field(default_factory=dict)
    source: str = "built-in"
    missing: tuple[str, ...] = ()
    hash: str | None = None


class KernelInfo(Frozen):
    """A kernel of exact attention, the device that it runs on, and why it can't run here.

    unavailable: for bfloat16 on CUDA, float32 on a CPU, with a head_dim of 64.
    """

    summary: str
    device: str
    unavailable: str | None = None


class DeviceInfo(Frozen):
    """One kind of device.

    unavailable: the reason why this machine has none.  remedy: what to do about it.
    """

    name: str = ""
    unavailable: str | None = None
    remedy: str = ""
    dtypes: tuple[str, ...] = ()
    free_bytes: int = 0
    total_bytes: int = 0
    count: int = 0


class Catalogue(Frozen):
    """Implementations, devices and kernels of exact attention of this machine, by name.

    mistakes: why own functions can't be used, by name.
    """

    implementations: dict[str, Entry]
    devices: dict[str, DeviceInfo]
    kernels: dict[str, KernelInfo] = Field(default_factory=dict)
    mistakes: dict[str, str] = Field(default_factory=dict)

    def entry(self, name: str, place: str = "") -> Entry:
        """Return the implementation of that name.

        Raises UserError for a well-known library that is not included and for an own function that
        can't be used, else UnknownNameError with the nearest name.
        """
        own = canonical_name(name)
        if own in self.implementations:
            return self.implementations[own]
        if own in self.mistakes:
            raise UserError(self.mistakes[own])
        libraries = load_table("libraries.yaml").items()
        library = name.lower().replace("_", "-")
        close = next((k for k, names in libraries if library in names.split()), "")
        where = f" in {place}" if place else ""
        if kernels := [k for k in self.kernels if f"{k}-".startswith(f"{library}-")]:
            raise UserError(
                f"{name!r}{where} is a kernel, not an implementation; write fused with the option "
                f"{' or '.join(f'kernel={kernel}' for kernel in kernels)}"
            )
        for owner, entry in self.implementations.items():
            # rows are labelled by their pattern
            if any(library in spec.choices for spec in entry.options if spec.name == "pattern"):
                raise UserError(
                    f"{name!r}{where} is a pattern; write {owner} with the option pattern={library}"
                )
        if close in self.implementations:
            raise UserError(
                f"implementation {name!r}{where} is not included; the nearest one is {close!r}, "
                "and a function of your own can call it (docs/getting-started.md)"
            )
        raise UnknownNameError("implementation", name, self.implementations, place)

    def options(self, name: str, given: dict[str, Any]) -> dict[str, OptionValue]:
        """Return all options of an implementation, as `fill` does."""
        return fill(self.entry(name).options, given, owner=name)

    def resolve_device(self, choice: DeviceChoice, ranks: int = 1) -> Device:
        """Return the device to use: auto is cuda if each rank can have its own device, else cpu."""
        if choice != "auto":
            return choice
        cuda = self.devices.get("cuda")
        has_cuda = cuda is not None and not cuda.unavailable and cuda.count >= ranks
        return "cuda" if has_cuda else "cpu"

    def default_dtype(self, device: Device) -> DType:
        """Return the dtype used if none is given: bfloat16 on cuda if it has it, else float32."""
        info = self.devices.get(device)
        has_bfloat16 = info is not None and "bfloat16" in info.dtypes
        return "bfloat16" if device == "cuda" and has_bfloat16 else "float32"

    def check_device(self, device: str) -> None:
        """Raise UserError if there is no such device."""
        info = self.devices.get(device)
        if info is None or info.unavailable:
            reason = info.unavailable if info else "this machine lists no such device"
            remedy = f"; {info.remedy}" if info and info.remedy else ""
            available = [name for name, other in self.devices.items() if not other.unavailable]
            hint = f"; available: {', '.join(available)}" if available else ""
            raise UserError(f"device {device} is not available: {reason}{remedy}{hint}")

    def check_dtype(self, device: str, dtype: str) -> None:
        """Raise UserError if a device does not have a dtype."""
        dtypes = self.devices[device].dtypes
        if dtypes and dtype not in dtypes:
            known = " or ".join(dtypes)
            raise UserError(f"dtype {dtype} is not available on {device}; use {known}")

    def check_ranks(self, device: str, ranks: int, option: str) -> None:
        """Raise UserError for more ranks than CUDA devices; a CPU is shared by any number."""
        count = self.devices[device].count
        if device == "cuda" and ranks > count:
            devices = "1 CUDA device" if count == 1 else f"{count} CUDA devices"
            raise UserError(
                f"{option} {ranks} is too large: this machine has {devices}, and two ranks can't "
                "share one"
            )
