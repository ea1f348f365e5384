"""What a child process does with a request; imported once by the fork server, before any fork."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection

import torch

from longseq_bench import attention
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.comm.group import Group
from longseq_bench.errors import UnsupportedError, UserError
from longseq_bench.model import DTYPE_BYTES, Outcome, Trial
from longseq_bench.options import specs_of
from longseq_bench.probe.probe import probe
from longseq_bench.probe.tell import Teller

# plug-ins wait until they are in a child: what they do when imported is not ours to know
IMPLEMENTATIONS.load_built_ins()


def serve(request: str, payload: str, pipe: Connection) -> None:
    """Answer one request: `trial` ends with an Outcome, `catalogue` with what can be run here."""
    teller = Teller(pipe)
    if request == "catalogue":
        teller.answer(catalogue().model_dump(mode="json"))
    elif request == "check":
        teller.answer([_mistake(Trial.model_validate(trial)) for trial in json.loads(payload)])
    else:
        teller.end(_trial(Trial.model_validate_json(payload), teller))


def _mistake(trial: Trial) -> str | None:
    """What is wrong with a trial's options together; None where nothing is, or where it is no
    mistake but a limit of the implementation, which is a result."""
    try:
        IMPLEMENTATIONS.get(trial.implementation)(trial.workload, Group.alone(), **trial.options)
    except UserError as error:
        return f"{trial.implementation}: {error}"
    except Exception:
        return None
    return None


def _trial(trial: Trial, teller: Teller) -> Outcome:
    if trial.world_size > 1:
        reason = "several ranks in a trial are not part of this version; world_size 1 is"
        return Outcome(status="unsupported", reason=reason, phase="start")
    try:
        why_not = IMPLEMENTATIONS.get(trial.implementation).unavailable(trial.device)
    except UnsupportedError as error:
        why_not = str(error)
    if why_not:
        return Outcome(status="unsupported", reason=why_not, phase="start")
    return probe(trial, teller)


def catalogue() -> Catalogue:
    """Every implementation with its options and why it can't run, and the devices here."""
    devices = {"cpu": _cpu(), "cuda": _cuda()}
    return Catalogue(
        implementations={name: _entry(name, devices) for name in IMPLEMENTATIONS.names()},
        devices=devices,
    )


def _entry(name: str, devices: dict[str, DeviceInfo]) -> Entry:
    reason = IMPLEMENTATIONS.why_not(name)
    if reason:
        return Entry(summary="can't be imported", unavailable=dict.fromkeys(devices, reason))
    make = IMPLEMENTATIONS.get(name)
    reasons = {d: info.unavailable or make.unavailable(d) for d, info in devices.items()}
    built_in = make.__module__.startswith(attention.__name__ + ".")
    return Entry(
        summary=make.summary,
        options=specs_of(make),
        unavailable={d: r for d, r in reasons.items() if r},
        source="built-in" if built_in else make.__module__,
    )


def _cpu() -> DeviceInfo:
    return DeviceInfo(name="CPU", dtypes=tuple(DTYPE_BYTES), count=1)


def _cuda() -> DeviceInfo:
    if not torch.version.cuda:
        return DeviceInfo(unavailable="this torch is a CPU build")
    if not torch.cuda.is_available():
        return DeviceInfo(unavailable="torch finds no CUDA device or driver")
    free, total = torch.cuda.mem_get_info()
    half = ("bfloat16",) if torch.cuda.is_bf16_supported(including_emulation=False) else ()
    return DeviceInfo(
        name=torch.cuda.get_device_name(),
        dtypes=("float32", *half, "float16"),
        free_bytes=free,
        total_bytes=total,
        count=torch.cuda.device_count(),
    )
