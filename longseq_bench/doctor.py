"""Check what this machine has and lacks for longseq, with remedies. Nothing is printed."""

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from longseq_bench.core.catalogue import Catalogue, Entry
from longseq_bench.core.gpus import (
    VISIBLE,
    GpuReport,
    c_compiler,
    missing_for_triton,
    read_installed_gpus,
    read_visible_gpus,
)
from longseq_bench.core.model import Environment
from longseq_bench.core.units import format_bytes
from longseq_bench.environment import NOT_INSTALLED
from longseq_bench.system_state import Finding, check, examine_system

MIN_PYTHON = (3, 11)
TRANSPORTS = ("deepspeed", "fairscale")
"""Libraries that a ring can use for transfers instead of torch's p2p."""

MIN_SHARED_MEMORY = 2**30
"""Bytes. Docker gives a container 64 MiB, which is too little for NCCL and data loaders."""

ACCEPTANCE_COMMAND = "python -m benchmarks.gpu smoke --out gpu-results"


def examine(
    catalogue: Catalogue | None, environment: Environment, results: Path = Path("results")
) -> list[Finding]:
    """Check everything that decides what can be measured on this machine.

    catalogue: None if the implementations could not be listed.
    results: the folder that records go to; it need not exist yet.
    """
    report = read_visible_gpus()
    return [
        _python(environment),
        _torch(environment),
        _data_limit(),
        _peak_reset(),
        _nvml(environment),
        *_gpus(report, environment),
        _cuda(catalogue),
        *_triton_build(catalogue),
        *_gpu_acceptance(catalogue),
        _ranks(catalogue, environment),
        _transports(),
        _shared_memory(),
        _threads(environment),
        _load(environment),
        *examine_system(),
        _compiler(),
        _results(results),
        *_implementations(catalogue),
    ]


def _python(environment: Environment) -> Finding:
    if _numbers(environment.python) >= MIN_PYTHON:
        return Finding("python", "ok", environment.python)
    minimum = ".".join(map(str, MIN_PYTHON))
    return Finding("python", "missing", environment.python, f"use Python {minimum} or newer")


def _torch(environment: Environment) -> Finding:
    clauses, version = torch_range(), environment.torch
    remedy = f"pip install 'torch{','.join(clauses)}'"
    if version == NOT_INSTALLED:
        return Finding("torch", "missing", NOT_INSTALLED, remedy)
    release = _numbers(version)
    in_range = all(
        release >= _numbers(clause[2:])
        if clause.startswith(">=")
        else release < _numbers(clause[1:])
        for clause in clauses
    )
    libraries = "".join(f", {name} {v}" for name, v in environment.gpu_libraries.items())
    note = "" if in_range else f", outside the tested range {', '.join(clauses)}"
    return check("torch", in_range, version + libraries + note, remedy)


def torch_range() -> list[str]:
    """Return the torch versions that the package requires, [">=2.11", "<2.14"]."""
    try:
        requirements = requires("longseq-bench") or []
    except PackageNotFoundError:
        return []
    line = next((r for r in requirements if re.match(r"torch\b(?![-_.])", r)), "")
    return sorted(re.findall(r">=[0-9.]+|<[0-9.]+", line.split(";")[0]), reverse=True)


def _data_limit() -> Finding:
    """Check RLIMIT_DATA, the hard CPU budget; it counts private anonymous memory on Linux only."""
    name = "memory budget on cpu"
    if platform.system() == "Linux":
        return Finding(name, "ok", "RLIMIT_DATA enforces the budget of a trial")
    found = f"{platform.system()} has no RLIMIT_DATA that counts mapped memory"
    remedy = "a budget is checked after the pass rather than enforced; use Linux"
    return Finding(name, "note", found, remedy)


def _peak_reset(path: Path = Path("/proc/self/clear_refs")) -> Finding:
    """Check by writing: root passes an access check even where a container forbids writes."""
    name = "peak memory on cpu"
    try:
        path.write_text("5")
    except OSError as error:
        remedy = "peaks come from slower accounting; on Linux, run outside the sandbox"
        return Finding(name, "note", f"{path} can't be written: {error.strerror}", remedy)
    return Finding(name, "ok", f"{path} resets the peak")


def _nvml(environment: Environment) -> Finding:
    if environment.gpus:
        limits = environment.power_limits_w or (None,) * len(environment.gpus)
        gpus = [
            f"{gpu} (power limit {watts:.0f} W)" if watts else gpu
            for gpu, watts in zip(environment.gpus, limits, strict=True)
        ]
        return Finding("nvml", "ok", f"driver {environment.driver}, {', '.join(gpus)}")
    found = read_installed_gpus().reason or "no GPU"
    return Finding("nvml", "note", found, "to measure a GPU, install NVIDIA's driver")


def _gpus(report: GpuReport, environment: Environment) -> list[Finding]:
    """Report the GPUs that CUDA shows to this process, and other processes that use them."""
    if report.driver is None:
        return []  # the finding `nvml` has the reason
    if not report.visible:
        remedy = f"set {VISIBLE} to an index or a UUID of nvidia-smi -L"
        return [Finding("visible gpus", "note", report.reason or "none", remedy)]
    findings = [Finding("visible gpus", "ok", "; ".join(map(str, report.visible)))]
    if in_use := [reason for gpu in report.visible if (reason := gpu.in_use_reason())]:
        remedy = f"figures would be wrong; end that process, or choose another GPU with {VISIBLE}"
        findings.append(Finding("gpus in use", "note", "; ".join(in_use), remedy))
    by_pci = environment.variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(set(environment.gpus)) > 1 and not by_pci:
        found = "these GPUs differ; CUDA numbers them by speed, this tool by PCI bus"
        remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        findings.append(Finding("order of gpus", "note", found, remedy))
    return findings


def _triton_build(catalogue: Catalogue | None) -> list[Finding]:
    """Check what Triton needs to build its launcher: a C compiler and Python's headers."""
    info = catalogue.devices.get("cuda") if catalogue else None
    if info is None or info.unavailable:
        return []
    missing = missing_for_triton()
    names = ", ".join(what for what, _ in missing)
    found = f"{names}: Triton's kernels can't start" if missing else str(c_compiler())
    return [check("triton on cuda", not missing, found, "; ".join(todo for _, todo in missing))]


def _cuda(catalogue: Catalogue | None) -> Finding:
    info = catalogue.devices.get("cuda") if catalogue else None
    if info is None:
        return Finding("cuda", "note", "unknown, the devices could not be listed")
    if info.unavailable:
        remedy = f"trials run on the cpu; {info.remedy or 'see the reason'}"
        return Finding("cuda", "note", info.unavailable, remedy)
    memory = f"{format_bytes(info.free_bytes)} of {format_bytes(info.total_bytes)} free"
    return Finding("cuda", "ok", f"{info.count} x {info.name}, {memory}")


def _gpu_acceptance(catalogue: Catalogue | None) -> list[Finding]:
    """Report, where there is a GPU, how little has run on one, and the command to run."""
    info = catalogue.devices.get("cuda") if catalogue else None
    if info is None or info.unavailable:
        return []
    remedy = f"please run {ACCEPTANCE_COMMAND} in a checkout, and send the folder (docs/gpu.md)"
    found = "longseq has run on one H100 only, for minutes"
    return [Finding("gpu acceptance", "note", found, remedy)]


def _ranks(catalogue: Catalogue | None, environment: Environment) -> Finding:
    found = f"any number on cpu, where they share {environment.cores} cores"
    info = catalogue.devices.get("cuda") if catalogue else None
    if info is not None and not info.unavailable:
        found += f"; up to {info.count} on cuda, one per device: two ranks can't share one"
    return Finding("ranks of a trial", "ok", found)


def _transports() -> Finding:
    missing = [module for module in TRANSPORTS if not find_spec(module)]
    found = f"no {' and no '.join(missing)}, so ring can't use them"
    return check(
        "transports", not missing, found if missing else f"p2p, {', '.join(TRANSPORTS)}",
        "optional: pip install 'longseq-bench[transports]'",
    )  # fmt: skip


def _shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    name = "shared memory"
    try:
        size = shutil.disk_usage(path)
    except OSError:
        return Finding(name, "note", f"there is no {path}", "ranks use sockets instead")
    found = f"{format_bytes(size.free)} of {format_bytes(size.total)} free in {path}"
    remedy = "start the container with --shm-size=8g for many ranks"
    return check(name, size.total >= MIN_SHARED_MEMORY, found, remedy)


def _threads(environment: Environment) -> Finding:
    threads = environment.variables.get("OMP_NUM_THREADS", "").split(",")[0]
    cores = environment.cores
    if not threads.isdigit():
        return Finding("threads", "ok", f"{cores} cores, torch chooses")
    found = f"OMP_NUM_THREADS is {threads} on {cores} cores"
    remedy = f"set it to {cores} or less; more threads than cores wait"
    return check("threads", int(threads) <= cores, found, remedy)


def _load(environment: Environment) -> Finding:
    if not environment.load:
        return Finding("load", "note", "the load average can't be read here")
    load, cores = environment.load[0], environment.cores
    found = f"{load:.2f} on {cores} cores over the last minute"
    return check("load", load <= cores / 2, found, "times will spread; end other work or wait")


def _compiler() -> Finding:
    cxx = os.environ.get("CXX")
    commands = (text.split() for text in ([cxx] if cxx else ["c++", "g++", "clang++"]))
    path = next((path for words in commands if words and (path := shutil.which(words[0]))), None)
    found = path or (f"CXX={cxx} was not found" if cxx else "none was found on PATH")
    remedy = "optional: install g++ or clang++ for implementations that torch compiles on cpu"
    return check("c++ compiler", path is not None, found, remedy)


def _results(folder: Path) -> Finding:
    path = folder.absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not nearest.is_dir():
        return Finding("results", "missing", f"{nearest} is a file, not a folder", "move it away")
    if not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "choose another folder for results, or make this one writable"
        return Finding("results", "missing", f"{nearest} can't be written", remedy)
    free = format_bytes(shutil.disk_usage(nearest).free)
    return Finding("results", "ok", f"{folder} can be written, {free} free")


def _implementations(catalogue: Catalogue | None) -> list[Finding]:
    """Report implementations that can't run on an available device, and the number that can."""
    if catalogue is None:
        remedy = "see torch above; longseq list says why"
        return [Finding("implementations", "missing", "could not be listed", remedy)]
    available = [name for name, info in catalogue.devices.items() if not info.unavailable]
    reasons_by_name = {
        name: {d: entry.unavailable[d] for d in available if d in entry.unavailable}
        for name, entry in sorted(catalogue.implementations.items())
    }
    usable = sum(len(reasons) < len(available) for reasons in reasons_by_name.values())
    device_names = " or ".join(available) or "no device"
    summary = Finding(
        "implementations",
        "ok" if usable else "missing",
        f"{usable} of {len(reasons_by_name)} can run on {device_names}",
        "" if usable else "see each one's reason below",
    )
    return [summary] + [
        Finding(name, "note", _reasons(reasons), _remedy(catalogue.implementations[name], reasons))
        for name, reasons in reasons_by_name.items()
        if reasons
    ]


def _reasons(reasons: dict[str, str]) -> str:
    if len(set(reasons.values())) == 1:
        return f"not on {' or '.join(reasons)}: {next(iter(reasons.values()))}"
    return "; ".join(f"not on {device}: {reason}" for device, reason in reasons.items())


def _remedy(entry: Entry, reasons: dict[str, str]) -> str:
    if module := re.search(r"No module named '(\w+)", "\n".join(reasons.values())):
        return f"pip install {module[1]}"
    if any("is not installed: pip install " in reason for reason in reasons.values()):
        return "install it as named, or leave it out"
    if entry.source != "built-in":
        return f"ask its author; it comes from {entry.source}"
    return "leave it out, or run it on another device or machine"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
