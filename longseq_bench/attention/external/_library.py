"""The base of rows of other libraries: versions, devices, masks and facts of the record.

A library is imported by `prepare`, in the process that measures. Until then only its version is
read, so that a list of all implementations stays quick.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from longseq_bench.attention.base import Attention
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.token_order import TokenOrder
from longseq_bench.kernels.exact._packages import Package
from longseq_bench.meta_mode import is_meta


@dataclass(frozen=True)
class Library(Package):
    """A library that the user installs.

    versions: the first one that is supported, and the first one that is not any more.
    devices: kinds of devices that it runs on.
    """

    versions: tuple[str, str] = ("0", "0")
    devices: tuple[str, ...] = ("cuda",)

    def unavailable_reason(self, device: str = "cuda") -> str | None:
        """Return why it can't be used on this kind of device; None if it can."""
        if reason := super().unavailable_reason():
            return reason
        found, (oldest, before) = self.version, self.versions
        if not _numbers(oldest) <= _numbers(found) < _numbers(before):
            return (
                f"{self.distribution} {found} is not supported; versions from {oldest} to below "
                f"{before} are: {self.install}"
            )
        if device not in self.devices:
            return f"{self.distribution} needs {' or '.join(self.devices)}, not {device}"
        return None

    def facts(self) -> dict[str, str]:
        """Return the name and the version for the record."""
        return {"library": f"{self.distribution} {self.version}"}

    @override
    def load(self) -> Any:
        if is_meta():
            raise UnsupportedError(f"memory of {self.distribution} is measured, not predicted")
        return super().load()


class External(Attention):
    """Attention of another library.

    A subclass names the library and overrides `__call__`.
    """

    library: ClassVar[Library]

    mask_kinds: ClassVar[frozenset[str]] = frozenset()
    """Kinds of masks beside full and causal ones that the library computes."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    """The dtypes that it computes; empty for all."""

    takes_masks = True  # those of `mask_kinds`; the constructor refuses the others
    sends_itself = True

    def __init__(self, workload: Workload, group: Group) -> None:
        """Refuse what the library does not compute. Ranks have equally many tokens."""
        w, name = workload, self.library.distribution
        if self.many_ranks and w.seq_len % group.size:
            raise WorldError(f"{w.seq_len} tokens can't be split evenly into {group.size} parts")
        self.order = TokenOrder("contiguous", w.seq_len, group.size)
        self.mask = w.visibility
        super().__init__(workload, group)
        if not self.mask.is_plain and self.mask.kind not in self.mask_kinds:
            known = ", ".join(["full", "causal", *sorted(self.mask_kinds)])
            raise UnsupportedError(f"{name} has no mask {self.mask.kind}; it has {known}")
        if self.dtypes and w.dtype not in self.dtypes:
            raise UnsupportedError(f"{name} computes {' and '.join(self.dtypes)} only")

    @classmethod
    @override
    def unavailable_reason(cls, device: str) -> str | None:
        return cls.library.unavailable_reason(device)

    def prepare(self, device: str) -> None:
        """Import the library. Raises UnsupportedError if that fails, and in a prediction."""
        super().prepare(device)
        self.module = self.library.load()

    @override
    def facts(self) -> dict[str, Any]:
        return self.library.facts()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: 0.5.20+cu128 is (0, 5, 20)."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", text, maxsplit=1)[0]))
