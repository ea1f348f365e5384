"""Check system settings that make times vary, and say what each of them changes.

Everything is read from /proc and /sys below a root. A file that is missing is said to be missing:
a virtual machine and a container often hide them.
"""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_PRESSURE = 1.0
"""Percent of the last ten seconds in which a process waited for memory."""
_CPUS = "sys/devices/system/cpu"
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    state: ok; missing (something cannot work); note (it works less well or differently).
    found: the observation.  remedy: what to do; empty if nothing has to be done.
    """

    name: str
    state: Literal["ok", "missing", "note"]
    found: str
    remedy: str = ""


def check(name: str, is_ok: bool, found: str, remedy: str) -> Finding:
    """Return an ok finding without a remedy, or a note with its remedy."""
    return Finding(name, "ok", found) if is_ok else Finding(name, "note", found, remedy)


def examine_system(root: Path = Path("/"), cpus: Collection[int] | None = None) -> list[Finding]:
    """Return a finding per setting. cpus: those that this process may use; default: as it is."""
    own = frozenset(_own_cpus() if cpus is None else cpus)
    return [
        _governor(root, own),
        _turbo(root),
        _smt(root, own),
        _huge_pages(root),
        _memory_pressure(root),
    ]


def _governor(root: Path, own: frozenset[int]) -> Finding:
    name = "cpu governor"
    files = (root / _CPUS / f"cpu{cpu}/cpufreq/scaling_governor" for cpu in sorted(own))
    governors = [text for file in files if (text := _read(file))]
    if not governors:
        return Finding(name, "ok", "not visible here; the clock is set outside this system")
    found = ", ".join(f"{g} on {governors.count(g)} CPUs" for g in dict.fromkeys(governors))
    remedy = (
        "the clock follows the load with a delay, so that short passes vary: "
        "sudo cpupower frequency-set -g performance"
    )
    return check(name, set(governors) == {"performance"}, found, remedy)


def _turbo(root: Path) -> Finding:
    name = "turbo"
    off, boost = (
        _read(root / _CPUS / "intel_pstate/no_turbo"),
        _read(root / _CPUS / "cpufreq/boost"),
    )
    if off is None and boost is None:
        return Finding(name, "ok", "not visible here; the clock is set outside this system")
    is_on = off == "0" if off is not None else boost == "1"
    switch = "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"
    if off is None:
        switch = "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost"
    remedy = f"the clock falls as the chip gets warm, so that times drift upwards: {switch}"
    return check(name, not is_on, f"turbo is {'on' if is_on else 'off'}", remedy)


def _smt(root: Path, own: frozenset[int]) -> Finding:
    """Check that no two CPUs of this process are threads of one core."""
    name = "smt siblings"
    cores = {
        tuple(_parse_cpus(text))
        for cpu in own
        if (text := _read(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list"))
    }
    if not cores:
        return Finding(name, "ok", "not visible here")
    shared = sum(len(own & set(siblings)) > 1 for siblings in cores)
    found = f"{len(own)} CPUs on {len(cores)} cores"
    remedy = (
        "two threads of a core slow each other, and a thread alone is faster: set threads to "
        f"{len(cores)}, or choose one CPU per core with taskset"
    )
    return check(name, not shared, found, remedy)


def _huge_pages(root: Path) -> Finding:
    name = "transparent huge pages"
    text = _read(root / _HUGE_PAGES) or ""
    mode = re.search(r"\[(\w+)\]", text)
    if mode is None:
        return Finding(name, "ok", "not visible here")
    effects = {
        "always": "large tensors get pages of 2 MiB: peaks grow in such steps, first writes are "
        "faster, and the kernel merges pages while passes run",
        "madvise": "only memory that asks for it gets pages of 2 MiB",
        "never": "all pages have 4 KiB: first writes of large tensors are slower",
    }
    found = f"{mode[1]}: {effects.get(mode[1], 'an unknown mode')}"
    remedy = "for steady peaks: echo madvise | sudo tee /" + _HUGE_PAGES
    return check(name, mode[1] != "always", found, remedy)


def _memory_pressure(root: Path) -> Finding:
    name = "memory pressure"
    text = _read(root / "proc/pressure/memory") or ""
    waited = re.search(r"^some avg10=([0-9.]+)", text, re.MULTILINE)
    if waited is None:
        return Finding(name, "ok", "not visible here: the kernel has no /proc/pressure/memory")
    share = float(waited[1])
    found = f"processes waited for memory in {share:.1f} % of the last 10 s"
    remedy = "passes wait for pages, and long ones are slower: end other work that needs memory"
    return check(name, share < MIN_PRESSURE, found, remedy)


def _own_cpus() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
