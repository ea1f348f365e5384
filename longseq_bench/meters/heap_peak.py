"""The heap peak of a Linux process, from the kernel's high-water mark (VmHWM).

Writing `5` to /proc/self/clear_refs resets VmHWM to the resident size. The peak is the rise of the
mark above that. It is close only while glibc returns every larger block at once, which
worker/limits.py arranges. With glibc's default thresholds it reads three times too much.

What remains is a few hundred KiB: the kernel counts resident pages in batches of 32 or more per
core, and a page that was mapped before the start may be written later. An enforced data limit is
exact, so no peak above it is reported.
"""

from pathlib import Path

from typing_extensions import override

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import METERS, ON_CPU, Meter, MeterContext

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@METERS.register("heap-peak")
class HeapPeak(Meter):
    """Peak bytes above the level at the start. kept: bytes that are not freed at the end."""

    name = "heap peak (VmHWM)"
    role = "memory"
    priority = 30

    @classmethod
    @override
    def unavailable_reason(cls, context: MeterContext = ON_CPU) -> str | None:
        if context.device != "cpu":
            return "measures the host's heap only"
        if context.maps_files:
            return "pages of mapped files are resident too, and don't count for the budget"
        try:
            _CLEAR_REFS.write_text("5")
        except OSError as error:
            return f"the kernel's high-water mark can't be reset: {error.strerror or error}"
        return None

    @override
    def start(self) -> None:
        _CLEAR_REFS.write_text("5")
        self._before = status_bytes("VmRSS")
        self._files = status_bytes("RssFile")

    @override
    def stop(self) -> None:
        # code that runs for the first time becomes resident too, but is not allocated
        code = max(0, status_bytes("RssFile") - self._files)
        peak, limit = max(0, status_bytes("VmHWM") - self._before - code), self.context.data_limit
        self.peak = peak if limit is None else min(peak, limit)
        self.kept = max(0, status_bytes("VmRSS") - self._before - code)

    @override
    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]


def status_bytes(field: str) -> int:
    """Return a kB field of /proc/self/status, in bytes. Raises KeyError if there is none."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
