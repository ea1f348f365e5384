"""The exact heap peak of a Linux process, from the kernel's own high-water mark.

`5` written to /proc/self/clear_refs resets the mark (VmHWM) to what is resident now; the peak is
the mark's rise over that. It is exact to a page only while glibc gives every larger block back at
once, which worker/limits.py arranges; with glibc's own thresholds it reads three times too much.
"""

from __future__ import annotations

from pathlib import Path

from longseq_bench.core.model import Measurement
from longseq_bench.meters.base import Meter

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class HeapPeak(Meter):
    """Peak bytes beyond what was resident at the start, and what of it is `kept` at the end."""

    name = "heap peak (VmHWM)"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError as error:
            return f"the kernel's high-water mark can't be reset: {error.strerror or error}"
        return None

    def start(self) -> None:
        _CLEAR_REFS.write_text("5")
        self._before = status_bytes("VmRSS")
        self._files = status_bytes("RssFile")

    def stop(self) -> None:
        # code first run meanwhile is resident too, but nobody allocated it
        code = max(0, status_bytes("RssFile") - self._files)
        self.peak = max(0, status_bytes("VmHWM") - self._before - code)
        self.kept = max(0, status_bytes("VmRSS") - self._before - code)

    def measurements(self) -> list[Measurement]:
        return [Measurement(name="peak", unit="B", samples=(self.peak,))]


def status_bytes(field: str) -> int:
    """A kB field of /proc/self/status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
