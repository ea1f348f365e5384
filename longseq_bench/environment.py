"""Describe this machine, so that records can be compared.

The parent runs this code, so it neither starts CUDA nor imports torch. GPUs are read through NVML.
A value that can't be read is left out, never guessed.
"""

import os
import platform
import re
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from longseq_bench import __version__
from longseq_bench.core.cpus import CGROUPS, OWN_CGROUP, cgroup_levels, usable_cores
from longseq_bench.core.errors import UserError, escape_surrogates
from longseq_bench.core.files import read_text
from longseq_bench.core.gpus import VISIBLE, read_visible_gpus
from longseq_bench.core.model import Device, Environment

NOT_INSTALLED = "not installed"
_CPUS = Path("/proc/cpuinfo")

_CHANGES_FIGURES = re.compile(
    r"(OMP|GOMP|KMP|MKL|MALLOC|NCCL|TORCH|TRITON|CUDNN|GLOO)_|PYTORCH_(CUDA_)?ALLOC_CONF$"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS)$"
    r"|(PYTORCH_NO_CUDA_MEMORY_CACHING|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE)$"
    r"|(OPENBLAS_NUM_THREADS|GLIBC_TUNABLES|LD_PRELOAD)$"
)
_ONLY_A_PLACE = re.compile("TORCH_(HOME|LOGS|LOGS_OUT|TRACE)|TRITON_(HOME|CACHE_DIR|DUMP_DIR)")
"""Variables that match the first, but name a folder or a log alone, and change no figure."""


def collect(workers: int | None = None, cores: int | None = None) -> Environment:
    """Return the machine and versions as they are now, within a second.

    workers: trials that run side by side.  cores: those of one of them; default: all.
    """
    gpus, cpus = read_visible_gpus(), read_text(_CPUS)
    model = re.search(r"^model name\s*:\s*(.+)$", cpus, re.MULTILINE)
    clocks = re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", cpus, re.MULTILINE)
    total, limit = psutil.virtual_memory().total, cgroup_memory()
    return Environment(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        cpu=model[1].strip() if model else platform.processor() or platform.machine(),
        cores=cores or usable_cores(),
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
            if _CHANGES_FIGURES.match(name)
            and not _ONLY_A_PLACE.fullmatch(name)
            # which one of equal GPUs it is changes no figure
            and (name != VISIBLE or len({*gpus.names}) > 1)
        },
        load=os.getloadavg(),
        clock_mhz=max(map(float, clocks), default=None),  # of the fastest core
        power_limits_w=gpus.power_limits_w,
        sm_clocks_mhz=gpus.sm_clocks_mhz,
        workers=workers,
        **cuda_versions(),
    )


def cuda_versions() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN, NCCL and Triton by field, without importing torch.

    CUDA's is the one that torch was built for. The others are those of the installed packages; a
    library that came another way, such as from the system, is left out. A CPU build has none.
    """
    spec = find_spec("torch")
    text = read_text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
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
    cuda: the least of the first visible GPUs, one per rank, by NVML. Raises UserError with the
    reason if there is no such GPU.
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


def cgroup_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int, int] | None:
    """Return (limit, bytes left) of this process's tightest memory cgroup; None without a limit.

    Page cache that can be dropped counts as left.
    """
    levels = []
    for level in cgroup_levels(root, own):
        limit, used = (read_text(level / f"memory.{name}") for name in ("max", "current"))
        if used and limit and limit.isdigit():
            stat = read_text(level / "memory.stat")
            cache = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
            left = int(limit) - int(used) + (int(cache[1]) if cache else 0)
            levels.append((int(limit), left))
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


def busy_elsewhere(file: Path = Path("/proc/loadavg")) -> int:
    """Return how many other threads of the host want a core, the least of some looks within 10 ms.

    A load average would count the command that ran before. 0 where the system does not say.
    """
    looks = []
    for _ in range(5):
        looks += [int(n) for n in re.findall(r" (\d+)/", read_text(file))]
        time.sleep(0.002)
    return min(looks, default=1) - 1


def installed_version(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED
