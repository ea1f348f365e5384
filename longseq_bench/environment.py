"""Describe this machine, so that records can be compared.

The parent runs this code, so it neither starts CUDA nor imports torch. GPUs are read through NVML.
A value that can't be read is left out, never guessed.
"""

import os
import platform
import re
import socket
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from longseq_bench import __version__
from longseq_bench.core.errors import UserError, escape_surrogates
from longseq_bench.core.gpus import read_installed_gpus, read_visible_gpus
from longseq_bench.core.model import Device, Environment

NOT_INSTALLED = "not installed"

_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "NCCL_", "TORCH_", "TRITON_", "CUDNN_", "GLOO_",
)  # fmt: skip
_PLACES = frozenset({
    "TORCH_HOME", "TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TRITON_HOME", "TRITON_CACHE_DIR",
    "TRITON_DUMP_DIR",
})  # fmt: skip
"""Variables with these prefixes that only name a folder or a log, and change no figure."""
_NAMES = frozenset({
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "OPENBLAS_NUM_THREADS", "GLIBC_TUNABLES", "LD_PRELOAD",
})  # fmt: skip
_NO_LIMIT = 2**60  # larger limits mean none: cgroup v1 writes a number near 2^63


def collect() -> Environment:
    """Return the machine and versions as they are now, within a second."""
    gpus = read_installed_gpus()
    total, limit = psutil.virtual_memory().total, cgroup_memory()
    return Environment(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        cpu=_cpu_model(),
        cores=count_cores(),
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
            if _changes_figures(name)
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
    packages = {
        "cudnn": f"nvidia-cudnn-cu{major}", "nccl": f"nvidia-nccl-cu{major}", "triton": "triton"
    }  # fmt: skip
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
    levels = [
        limits
        for base, path, names in _hierarchies(root, own)
        for level in (base / path, *(base / path).parents)
        if level.is_relative_to(base) and (limits := _limit_at(level, *names))
    ]
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
        result = subprocess.run(
            ["git", *arguments], cwd=folder, env={**clean, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True, text=True, timeout=2,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None


def _hierarchies(root: Path, own: Path) -> list[tuple[Path, Path, tuple[str, str, str]]]:
    """Return (mount, path of this process's group, names of limit, usage and droppable cache)."""
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    hierarchies = []
    for line in (_read(own) or "").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        group = Path(path.lstrip("/"))
        if number == "0" and not controllers:
            hierarchies.append((root, group, v2))
        elif "memory" in controllers.split(","):
            hierarchies.append((root / "memory", group, v1))
    return hierarchies


def _limit_at(level: Path, limit: str, usage: str, cache: str) -> tuple[int, int] | None:
    maximum, used = _read(level / limit), _read(level / usage)
    if not maximum or not used or not maximum.strip().isdigit() or int(maximum) >= _NO_LIMIT:
        return None
    match = re.search(rf"^{cache} (\d+)$", _read(level / "memory.stat") or "", re.MULTILINE)
    return int(maximum), int(maximum) - int(used) + (int(match[1]) if match else 0)


def _changes_figures(variable: str) -> bool:
    return variable in _NAMES or (variable.startswith(_PREFIXES) and variable not in _PLACES)


def count_cores() -> int:
    """Return the number of cores that this process may use (fewer under taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def examine_system(root: Path = Path("/")) -> list[Finding]:
    """Return a finding on the clocks of the CPUs, and on the size of their pages."""
    return [_governor(root), _huge_pages(root)]


def _governor(root: Path) -> Finding:
    name = "cpu governor"
    files = sorted((root / _CPUS).glob("cpu*/cpufreq/scaling_governor"))
    governors = [text for file in files if (text := _read(file))]
    if not governors:
        return Finding(name, "ok", "not visible here; the clock is set outside this system")
    found = ", ".join(f"{g} on {governors.count(g)} CPUs" for g in dict.fromkeys(governors))
    remedy = (
        "the clock follows the load with a delay, so that short passes vary: "
        "sudo cpupower frequency-set -g performance"
    )
    return check(name, set(governors) == {"performance"}, found, remedy)


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
