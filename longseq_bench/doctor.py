"""Check what this machine has and lacks for longseq, with remedies. Nothing is printed."""

import os
import platform
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longseq_bench.core.catalogue import Catalogue, KernelInfo
from longseq_bench.core.cpus import cpu_quota, own_cpus, usable_cores
from longseq_bench.core.files import read_text
from longseq_bench.core.gpus import VISIBLE, python_header, read_visible_gpus
from longseq_bench.core.model import Environment
from longseq_bench.core.units import format_bytes
from longseq_bench.environment import NOT_INSTALLED

CPUS = "sys/devices/system/cpu"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
HIDDEN = "not visible here"
"""A virtual machine and a container often hide these files."""

OLDEST_TORCH, NEWEST_TESTED_TORCH = "2.11", "2.14"

MIN_SHARED_MEMORY = 2**30
"""Bytes. Docker gives a container 64 MiB, which is too little for NCCL and data loaders."""


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


def examine(catalogue: Catalogue | None, environment: Environment) -> list[Finding]:
    """Check everything that decides what can be measured on this machine.

    catalogue: None if the implementations could not be listed.
    """
    return [
        Finding("python", "ok", environment.python),
        _torch(environment),
        _memory(),
        *_gpus(environment),
        *_cuda(catalogue),
        _shared_memory(),
        _cpus(),
        _load(environment),
        _governor(),
        _turbo(),
        _huge_pages(),
        _compiler(),
        _implementations(catalogue),
    ]


def _torch(environment: Environment) -> Finding:
    least, version = OLDEST_TORCH, environment.torch
    remedy = f"pip install 'torch>={least}'"
    if version == NOT_INSTALLED:
        return Finding("torch", "missing", NOT_INSTALLED, remedy)
    is_new, tested = _numbers(version) >= _numbers(least), _numbers(NEWEST_TESTED_TORCH)
    libraries = "".join(f", {name} {v}" for name, v in environment.gpu_libraries.items())
    note = "" if is_new else f", older than {least}"
    if _numbers(version)[: len(tested)] > tested:
        note = f", newer than any that was tested ({NEWEST_TESTED_TORCH})"
    return check("torch", is_new, version + libraries + note, remedy)


def _memory(system: str = platform.system(), path: Path = Path("/proc/self/clear_refs")) -> Finding:
    """Check what enforces a budget (RLIMIT_DATA counts mapped memory on Linux only) and a peak."""
    name = "memory on cpu"
    if system != "Linux":
        found, remedy = f"{system} enforces no budget", "the peak is compared with it; use Linux"
        return Finding(name, "note", found, remedy)
    try:
        path.write_text("5")  # root passes an access check even where a container forbids writes
    except OSError as error:
        remedy = "peaks come from slower accounting; run outside the sandbox"
        return Finding(name, "note", f"{path} can't be written: {error.strerror}", remedy)
    return Finding(name, "ok", f"RLIMIT_DATA enforces budgets, {path} resets peaks")


def _gpus(environment: Environment) -> list[Finding]:
    """Report the driver, the GPUs that CUDA shows here, and other processes that use them."""
    report, names = read_visible_gpus(), ", ".join(environment.gpus)
    found = f"driver {environment.driver}, {names}" if names else report.reason
    remedy = "to measure a GPU, install NVIDIA's driver"
    findings = [check("nvml", bool(names), found or "no GPU", remedy)]
    if report.driver is None:
        return findings
    shown = "; ".join(map(str, report.visible)) or report.reason or "none"
    remedy = f"set {VISIBLE} to an index or a UUID of nvidia-smi -L"
    findings.append(check("visible gpus", bool(report.visible), shown, remedy))
    if in_use := [reason for gpu in report.visible if (reason := gpu.in_use_reason())]:
        remedy = f"figures would be wrong; end that process, or choose another GPU with {VISIBLE}"
        findings.append(Finding("gpus in use", "note", "; ".join(in_use), remedy))
    if report.shared:
        remedy = "trials of several workers may slow each other down; compare with --workers 1"
        findings.append(Finding("gpus side by side", "note", "; ".join(report.shared), remedy))
    return findings


def _cuda(catalogue: Catalogue | None) -> list[Finding]:
    """Report CUDA, Triton's compiler, the fastest kernel if missing, and how little was run."""
    if catalogue is None or (info := catalogue.devices.get("cuda")) is None:
        return [Finding("cuda", "note", "unknown, the devices could not be listed")]
    if info.unavailable:
        remedy = f"trials run on the cpu; {info.remedy or 'see the reason'}"
        return [Finding("cuda", "note", info.unavailable, remedy)]
    memory = f"{format_bytes(info.free_bytes)} of {format_bytes(info.total_bytes)} free"
    missing = missing_for_triton()
    names = ", ".join(what for what, _ in missing)
    built = f"{names}: Triton's kernels can't start" if missing else str(c_compiler())
    kernel = catalogue.kernels.get("flash-attn-4", KernelInfo(summary="", device="cuda"))
    install = (kernel.unavailable or "").partition(" is not installed: ")[2]
    slower = "not installed: most exact attention on this GPU takes a slower kernel"
    return [
        Finding("cuda", "ok", f"{info.count} x {info.name}, {memory}"),
        check("triton on cuda", not missing, built, "; ".join(todo for _, todo in missing)),
        *([Finding("flash-attn-4", "note", slower, install)] if install else []),
    ]


def _shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    name = "shared memory"
    try:
        size = shutil.disk_usage(path)
    except OSError:
        return Finding(name, "note", f"there is no {path}", "ranks use sockets instead")
    found = f"{format_bytes(size.free)} of {format_bytes(size.total)} free in {path}"
    remedy = "start the container with --shm-size=8g for many ranks"
    return check(name, size.total >= MIN_SHARED_MEMORY, found, remedy)


def _cpus() -> Finding:
    cores, quota = len(own_cpus()), cpu_quota()
    limit = f"the container's quota is {quota:.2g} of {cores} cores" if quota else ""
    remedy = f"trials use {usable_cores()} thread(s); docker run --cpus N allows more"
    return check("cpus", not quota or quota >= cores, limit or f"{cores} cores", remedy)


def _load(environment: Environment) -> Finding:
    load, cores = environment.load[0] if environment.load else 0.0, environment.cores
    found = f"{load:.2f} on {cores} cores over the last minute"
    return check("load", load <= cores / 2, found, "times will spread; end other work or wait")


def _governor(root: Path = Path("/")) -> Finding:
    files = (root / CPUS / f"cpu{cpu}/cpufreq/scaling_governor" for cpu in sorted(own_cpus()))
    governors = Counter(filter(None, map(read_text, files)))
    found = ", ".join(f"{name} on {count} CPUs" for name, count in governors.items()) or HIDDEN
    slow = "the clock follows the load with a delay, so that short passes vary"
    remedy = f"{slow}: sudo cpupower frequency-set -g performance"
    return check("cpu governor", governors.keys() <= {"performance"}, found, remedy)


def _turbo(root: Path = Path("/")) -> Finding:
    for file, on, off in (("intel_pstate/no_turbo", "0", 1), ("cpufreq/boost", "1", 0)):
        if value := read_text(root / CPUS / file):
            drift = "the clock falls as the chip gets warm, so that times drift upwards"
            remedy = f"{drift}: echo {off} | sudo tee /{CPUS}/{file}"
            return check("turbo", value != on, "on" if value == on else "off", remedy)
    return Finding("turbo", "ok", HIDDEN)


def _huge_pages(root: Path = Path("/")) -> Finding:
    mode = re.search(r"\[(\w+)\]", read_text(root / HUGE_PAGES))
    found = mode[1] if mode else HIDDEN
    effect = "peaks grow in steps of 2 MiB, and the kernel merges pages while passes run"
    remedy = f"{effect}: echo madvise | sudo tee /{HUGE_PAGES}"
    return check("transparent huge pages", found != "always", found, remedy)


def _compiler() -> Finding:
    cxx = os.environ.get("CXX")
    commands = [cxx.split()[0]] if cxx else ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, commands)), None)
    found = path or f"none of {', '.join(commands)} was found"
    remedy = "optional: install g++ or clang++ for implementations that torch compiles on cpu"
    return check("c++ compiler", path is not None, found, remedy)


def _implementations(catalogue: Catalogue | None) -> Finding:
    """Report how many implementations can run on an available device."""
    if catalogue is None:
        remedy = "see torch above; longseq list says why"
        return Finding("implementations", "missing", "could not be listed", remedy)
    available = {name for name, info in catalogue.devices.items() if not info.unavailable}
    entries = catalogue.implementations.values()
    usable = sum(bool(available - entry.unavailable.keys()) for entry in entries)
    found = f"{usable} of {len(entries)} can run on {' or '.join(sorted(available)) or 'no device'}"
    remedy = "longseq list says why the others can't"
    if not usable:
        return Finding("implementations", "missing", found, remedy)
    return check("implementations", usable == len(entries), found, remedy)


def _numbers(version: str) -> list[int]:
    """Return the release numbers: "2.13.0+cpu" -> [2, 13, 0]."""
    return [int(part) for part in re.findall("[0-9]+", version.partition("+")[0])]


def c_compiler() -> str | None:
    """Return the command of the C compiler: CC, otherwise gcc or clang; None without any."""
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)


def missing_for_triton() -> list[tuple[str, str]]:
    """Return what Triton needs to compile the launcher of a kernel, with what to do about it."""
    found, compiler, header = [], c_compiler(), python_header()
    if compiler is None or not shutil.which(compiler.split()[0]):
        what = f"CC={compiler} was not found" if compiler else "there is no gcc or clang"
        found.append((what, "install gcc"))
    if not header.is_file():
        headers = "install Python's headers (python3-dev or python3-devel)"
        found.append((f"there is no {header}", headers))
    return found
