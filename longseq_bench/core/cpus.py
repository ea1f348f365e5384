"""The CPUs that this process may use: fewer under taskset, and under a quota of a container."""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from longseq_bench.core.files import read_text

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def own_cpus() -> Collection[int]:
    """Return the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def own_cores(root: Path = Path("/sys/devices/system/cpu")) -> list[str]:
    """Return as many CPUs as can be busy all the time; threads of a core are side by side."""

    def place(cpu: int) -> list[int]:
        named = (root / f"cpu{cpu}/topology" / name for name in ("physical_package_id", "core_id"))
        return [*(int(read_text(file) or 0) for file in named), cpu]

    return [str(cpu) for cpu in sorted(own_cpus(), key=place)[: usable_cores()]]


def usable_cores() -> int:
    """Return how many cores can be busy all the time: whole ones of the quota, at least one."""
    cores, quota = len(own_cpus()), cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return the cores that the tightest cgroup of this process allows; None without a limit."""
    limits = (read_text(level / "cpu.max").split() for level in cgroup_levels(root, own))
    quotas = [int(of[0]) / int(of[1]) for of in limits if len(of) == 2 and of[0].isdigit()]
    return min(quotas, default=None)


def cgroup_levels(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Iterator[Path]:
    """Yield the folders of this process's cgroup (v2) and of those that it lies in."""
    path = re.search("^0::/(.*)$", read_text(own), re.MULTILINE)
    group = root / (path[1] if path else "")
    yield from (group, *group.parents)
