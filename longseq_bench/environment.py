"""Describe this machine, so that records can be compared.

The parent runs this code, so it neither starts CUDA nor imports torch. GPUs are read through NVML.
A value that can't be read is left out, never guessed.
"""

import os
import platform
import re
import socket
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from longseq_bench import __version__
from longseq_bench.core.errors import UserError, escape_surrogates
from longseq_bench.core.gpus import read_visible_gpus
from longseq_bench.core.model import Device, Environment

NOT_INSTALLED = "not installed"

_CHANGES_FIGURES = re.compile(
    r"(OMP|GOMP|KMP|MKL|MALLOC|NCCL|TORCH|TRITON|CUDNN|GLOO)_|PYTORCH_(CUDA_)?ALLOC_CONF$"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS)$"
    r"|(PYTORCH_NO_CUDA_MEMORY_CACHING|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE)$"
    r"|(OPENBLAS_NUM_THREADS|GLIBC_TUNABLES|LD_PRELOAD)$"
)
_ONLY_A_PLACE = re.compile("TORCH_(HOME|LOGS|LOGS_OUT|TRACE)|TRITON_(HOME|CACHE_DIR|DUMP_DIR)")
"""Variables that match the first, but name a folder or a log alone, and change no figure."""
_NO_LIMIT = 2**60  # larger limits mean none: cgroup v1 writes a number near 2^63


def collect() -> Environment:
    """Return the machine and versions as they are now, within a second."""
    gpus = read_visible_gpus()
    total, limit = psutil.virtual_memory().total, cgroup_memory()
    return Environment(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        cpu=_cpu_model(),
        cores=len(own_cpus()),
        memory_bytes=min(total, limit[0]) if limit else total,
        gpus=gpus.names,
        driver=gpus.driver,
        python=platform.python_version(),
        torch=installed_version("torch"),
        longseq=__version__,
        commit=commit_of(Path(__file__).parent),
        variables={
            escape_surrogates(name): escape_surrogates(value)
            for name, value in sorted(os.environ.items())
            if _CHANGES_FIGURES.match(name) and not _ONLY_A_PLACE.fullmatch(name)
        },
        load=os.getloadavg(),
        clock_mhz=_clock_mhz(),
        power_limits_w=gpus.power_limits_w,
        sm_clocks_mhz=gpus.sm_clocks_mhz,
        **cuda_versions(),
    )


def cuda_versions() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN, NCCL and Triton by field, without importing torch.

    CUDA's is the one that torch was built for. The others are those of the installed packages; a
    library that came another way, such as from the system, is left out. A CPU build has none.
    """
    spec = find_spec("torch")
    text = (_read(Path(spec.origin).parent / "version.py") if spec and spec.origin else None) or ""
    built = re.search(r"""^cuda\b.*=\s*['"]([0-9.]+)['"]""", text, re.MULTILINE)
    if built is None:
        return {}
    major = built[1].partition(".")[0]
    packages = {name: f"nvidia-{name}-cu{major}" for name in ("cudnn", "nccl")}
    packages["triton"] = "triton"
    found = {field: installed_version(package) for field, package in packages.items()}
    return {"cuda": built[1]} | {k: v for k, v in found.items() if v != NOT_INSTALLED}


def free_memory(device: Device, ranks: int = 1) -> int:
    """Return the bytes that can be allocated on the device now, without starting the device.

    cpu: the smaller of the system's available memory and the rest of the cgroup's limit.
    cuda: the least of the first visible GPUs, one per rank, by NVML.

    Raises:
        UserError: there is no such GPU; the message has the reason.
    """
    if device == "cuda":
        report = read_visible_gpus()
        free = [gpu.free for gpu in report.visible[:ranks]]
        known = [size for size in free if size is not None]
        if known and len(known) == len(free):
            return min(known)
        reason = report.reason or f"NVML has no memory size of {report.visible[0]}"
        raise UserError(f"the free memory of cuda can't be read: {reason}")
    available, limit = psutil.virtual_memory().available, cgroup_memory()
    return max(0, min(available, limit[1])) if limit else available


def cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[int, int] | None:
    """Return (limit, bytes left) of this process's tightest memory cgroup; None without a limit.

    Page cache that can be dropped counts as left. Every level of v1 and v2 up to the root counts.
    """
    v2 = (root, "memory.max", "memory.current", "inactive_file")
    v1 = (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    levels = list[tuple[int, int]]()
    for line in (_read(own) or "").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        is_v2 = number == "0" and not controllers
        if is_v2 or "memory" in controllers.split(","):
            base, *names = v2 if is_v2 else v1
            group = base / path.lstrip("/")
            parents = [one for one in (group, *group.parents) if one.is_relative_to(base)]
            levels += filter(None, [_limit_at(level, *names) for level in parents])
    return (min(limit for limit, _ in levels), min(left for _, left in levels)) if levels else None


def commit_of(folder: Path) -> str | None:
    """Return the short commit of the checkout of this folder, with "-dirty" if files differ.

    None if git does not track the folder, or is not installed.
    """
    if not _git(folder, "ls-files", "--", "__init__.py"):
        return None
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--", ".")
    head = re.search(r"^# branch\.oid ([0-9a-f]{12})", status or "", re.MULTILINE)
    if status is None or head is None:
        return None
    dirty = any(line and not line.startswith("#") for line in status.splitlines())
    return head[1] + ("-dirty" if dirty else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output, or None. Drop variables of a git hook, which name another folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        result = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None


def _limit_at(level: Path, limit: str, usage: str, cache: str) -> tuple[int, int] | None:
    maximum, used = _read(level / limit), _read(level / usage)
    if not maximum or not used or not maximum.strip().isdigit() or int(maximum) >= _NO_LIMIT:
        return None
    match = re.search(rf"^{cache} (\d+)$", _read(level / "memory.stat") or "", re.MULTILINE)
    return int(maximum), int(maximum) - int(used) + (int(match[1]) if match else 0)


def own_cpus() -> Collection[int]:
    """Return the CPUs that this process may use (fewer under taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _clock_mhz() -> float | None:
    """Return the clock of the fastest core now; None if the kernel does not report it."""
    text = _read(Path("/proc/cpuinfo")) or ""
    clocks = re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", text, re.MULTILINE)
    return max(map(float, clocks), default=None)


def installed_version(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


# ---- settings that make times vary ---------------------------------------------------------------
# Everything is read from /proc and /sys below a root. A file that is missing is said to be missing:
# a virtual machine and a container often hide them.

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


Look = tuple[bool, str, str] | None
"""Whether a setting is as it should be, what it is, and a remedy; None if it is not visible."""


def examine_system(root: Path = Path("/"), cpus: Collection[int] | None = None) -> list[Finding]:
    """Return a finding per setting. cpus: those that this process may use; default: as it is."""
    own = frozenset(own_cpus() if cpus is None else cpus)
    looks = {
        "cpu governor": _governor(root, own),
        "turbo": _turbo(root),
        "smt siblings": _smt(root, own),
        "transparent huge pages": _huge_pages(root),
        "memory pressure": _memory_pressure(root),
    }
    return [
        check(name, *look) if look else Finding(name, "ok", "not visible here")
        for name, look in looks.items()
    ]


def _governor(root: Path, own: frozenset[int]) -> Look:
    files = (root / _CPUS / f"cpu{cpu}/cpufreq/scaling_governor" for cpu in sorted(own))
    governors = [text for file in files if (text := _read(file))]
    found = ", ".join(f"{g} on {governors.count(g)} CPUs" for g in dict.fromkeys(governors))
    remedy = (
        "the clock follows the load with a delay, so that short passes vary: "
        "sudo cpupower frequency-set -g performance"
    )
    return (set(governors) == {"performance"}, found, remedy) if governors else None


def _turbo(root: Path) -> Look:
    for file, on, off in (("intel_pstate/no_turbo", "0", 1), ("cpufreq/boost", "1", 0)):
        value = _read(root / _CPUS / file)
        if value is not None:
            drift = "the clock falls as the chip gets warm, so that times drift upwards"
            remedy = f"{drift}: echo {off} | sudo tee /{_CPUS}/{file}"
            return value != on, f"turbo is {'on' if value == on else 'off'}", remedy
    return None


def _smt(root: Path, own: frozenset[int]) -> Look:
    """Check that no two CPUs of this process are threads of one core."""
    cores = {
        tuple(_parse_cpus(text))
        for cpu in own
        if (text := _read(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list"))
    }
    shared = any(len(own & set(siblings)) > 1 for siblings in cores)
    remedy = (
        "two threads of a core slow each other, and a thread alone is faster: set threads to "
        f"{len(cores)}, or choose one CPU per core with taskset"
    )
    return (not shared, f"{len(own)} CPUs on {len(cores)} cores", remedy) if cores else None


def _huge_pages(root: Path) -> Look:
    mode = re.search(r"\[(\w+)\]", _read(root / _HUGE_PAGES) or "")
    effects = {
        "always": "large tensors get pages of 2 MiB: peaks grow in such steps, first writes are "
        "faster, and the kernel merges pages while passes run",
        "madvise": "only memory that asks for it gets pages of 2 MiB",
        "never": "all pages have 4 KiB: first writes of large tensors are slower",
    }
    if mode is None:
        return None
    remedy = f"for steady peaks: echo madvise | sudo tee /{_HUGE_PAGES}"
    return mode[1] != "always", f"{mode[1]}: {effects.get(mode[1], 'an unknown mode')}", remedy


def _memory_pressure(root: Path) -> Look:
    text = _read(root / "proc/pressure/memory") or ""
    waited = re.search(r"^some avg10=([0-9.]+)", text, re.MULTILINE)
    if waited is None:
        return None
    share = float(waited[1])
    found = f"processes waited for memory in {share:.1f} % of the last 10 s"
    remedy = "passes wait for pages, and long ones are slower: end other work that needs memory"
    return share < MIN_PRESSURE, found, remedy


def _parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found
