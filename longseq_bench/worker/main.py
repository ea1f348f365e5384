"""What a child process does with a request; imported once by the fork server, before any fork."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from socket import socket

import torch

from longseq_bench import attention
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.core.cluster_env import Place
from longseq_bench.core.errors import UnsupportedError, UserError, WorldError
from longseq_bench.core.model import DTYPE_BYTES, Outcome, Trial
from longseq_bench.core.options import specs_of
from longseq_bench.distributed.group import Group
from longseq_bench.worker.dry_run import dry_run
from longseq_bench.worker.exception_mapping import outcome_of_exception
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.rendezvous import connect, share_cores
from longseq_bench.worker.trial import run_trial

TOKENS_A_RANK = 4096
"""Enough for any implementation that can be spread over so many ranks at all."""

# plug-ins wait until they are in a child: what they do when imported is not ours to know
IMPLEMENTATIONS.load_built_ins()


def serve(request: str, payload: str, pipe: Connection, listener: socket | None = None) -> None:
    """Answer one request: `trial` ends with an Outcome, `catalogue` with what can be run here,
    `check` with what is wrong with trials, `dry_run` with what trials would take.

    listener: of rank 0 among several, the open socket at which they meet.
    """
    sender = MessageSender(pipe)
    if request == "catalogue":
        sender.send_answer(catalogue().model_dump(mode="json"))
    elif request == "check":
        sender.send_answer(mistakes([Trial.model_validate(trial) for trial in json.loads(payload)]))
    elif request == "dry_run":
        trials = [Trial.model_validate(trial) for trial in json.loads(payload)]
        sender.send_answer([seen.model_dump(mode="json") for seen in dry_run(trials)])
    else:
        asked = json.loads(payload)
        trial, place = Trial.model_validate(asked["trial"]), Place(**asked["place"])
        outcome = run(trial, place, sender, listener)
        sender.send_outcome(outcome)
        if place.size > 1:
            _leave(outcome, sender)


def run(
    trial: Trial, place: Place, sender: MessageSender, listener: socket | None = None
) -> Outcome:
    """One rank's part of a trial. What can't be done is said before any rank is connected."""
    try:
        make = IMPLEMENTATIONS.get(trial.implementation)
        if unavailable_reason := make.unavailable_reason(trial.device):
            raise UnsupportedError(unavailable_reason)
        if place.size == 1:
            return run_trial(trial, sender, Group.alone())
        make(trial.workload, Group(place.rank, place.size), **trial.options)
        if trial.device == "cpu":
            share_cores(place.here or place.size)
        connect(place, trial.device, listener)
        group = Group.world(trial.device)
    except Exception as error:
        return outcome_of_exception(error, sender.phase)
    return run_trial(trial, sender, group)


def _leave(outcome: Outcome, sender: MessageSender) -> None:
    """End at once, whatever the process group still waits for. Who failed goes first, so that the
    others learn of it; who is done stays, as the others may still have to read what it sent."""
    if outcome.status == "ok":
        sender.wait_until_closed()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def mistakes(trials: Sequence[Trial]) -> list[str]:
    """What is wrong with the options of trials together, and with ranks that suit none of the
    trials of an implementation. Anything else it refuses is a result."""
    found, alike = [], defaultdict(list)
    for trial in trials:
        error = _refusal(trial)
        if isinstance(error, WorldError):
            # too few tokens for the ranks is no mistake: a search grows them
            error = _refusal(
                trial.at(max(trial.workload.seq_len, TOKENS_A_RANK * trial.world_size))
            )
        if isinstance(error, UserError):
            found.append(f"{trial.implementation}: {error}")
        alike[trial.implementation, str(trial.options)].append(error)
    for (name, _), errors in alike.items():
        if all(isinstance(error, WorldError) for error in errors):
            found.append(f"{name}: {errors[0]}")
    return found


def _refusal(trial: Trial) -> Exception | None:
    """What an implementation answers to a trial; None where it takes it."""
    try:
        make = IMPLEMENTATIONS.get(trial.implementation)
        make(trial.workload, Group(0, trial.world_size), **trial.options)
    except Exception as error:
        return error
    return None


def catalogue() -> Catalogue:
    """Every implementation with its options and why it can't run, and the devices here."""
    devices = {"cpu": _cpu(), "cuda": _cuda()}
    return Catalogue(
        implementations={name: _entry(name, devices) for name in IMPLEMENTATIONS.names()},
        devices=devices,
    )


def _entry(name: str, devices: dict[str, DeviceInfo]) -> Entry:
    reason = IMPLEMENTATIONS.unavailable_reason(name)
    if reason:
        return Entry(
            summary="can't be imported",
            unavailable=dict.fromkeys(devices, reason),
            source=IMPLEMENTATIONS.plugin_module(name) or "built-in",
        )
    make = IMPLEMENTATIONS.get(name)
    reasons = {d: info.unavailable or make.unavailable_reason(d) for d, info in devices.items()}
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
