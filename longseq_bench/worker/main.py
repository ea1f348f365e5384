"""Requests that a child process answers. The fork server imports this module before any fork."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from socket import gethostname, socket
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from longseq_bench import attention
from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.own_function import describe_own_function, find_implementation
from longseq_bench.attention.signature_options import specs_of
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry, KernelInfo
from longseq_bench.core.cpus import usable_cores
from longseq_bench.core.errors import UnsupportedError, UserError, WorldError
from longseq_bench.core.model import DTYPE_BYTES, SAME_KERNEL, SDPA, Device, Outcome, Trial
from longseq_bench.core.ranks import CONNECTING, LOADING, OPENING, RankInfo
from longseq_bench.distributed.group import GROUP_TIMEOUT, Group
from longseq_bench.kernels.exact.base import KERNELS, Use, check_name
from longseq_bench.meters.own_gpu import own_gpu
from longseq_bench.worker.dry_run import dry_run
from longseq_bench.worker.memory import name_other_processes
from longseq_bench.worker.messages import MessageSender
from longseq_bench.worker.trial import run_trial
from longseq_bench.worker.verdicts import explain_unusable, outcome_of_exception

TOKENS_PER_RANK = 4096
"""Enough tokens for every implementation that can run over many ranks at all."""

# plug-ins are imported in a child only: an import may have any side effect
IMPLEMENTATIONS.load_built_ins()


def serve(request: str, payload: str, pipe: Connection, listener: socket | None = None) -> None:
    """Answer one request over the pipe.

    request: `trial` (answered by an Outcome), `catalogue` (what can run here), `check` (mistakes in
    trials) or `dry_run` (the predicted cost of trials).
    payload: JSON: the trial and the place of this rank; names of own functions to describe; or
    trials and the compute capability of the GPU for which to plan.
    listener: the open socket to which the ranks connect, for rank 0 of several.
    """
    sender, data = MessageSender(pipe), json.loads(payload)
    trials = [Trial.model_validate(trial) for trial in data.get("trials", ())]
    match request:
        case "trial":
            trial, place = Trial.model_validate(data["trial"]), RankInfo(**data["place"])
            outcome = run_rank(trial, place, sender, listener)
            sender.send_outcome(outcome)
            if place.size > 1:
                # the process group may still wait. A rank that failed ends at once, so that the
                # others notice; one that is done stays until all have reported, because the others
                # may still read data that it sent
                if outcome.status == "ok":
                    sender.wait_until_closed()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        case "catalogue":
            sender.send_answer(build_catalogue(data["own"]).model_dump(mode="json"))
        case "check":
            sender.send_answer(find_mistakes(trials))
        case "dry_run":
            capability = data["capability"] and tuple(data["capability"])
            estimates = dry_run(trials, capability)
            sender.send_answer([estimate.model_dump(mode="json") for estimate in estimates])


def run_rank(
    trial: Trial, place: RankInfo, sender: MessageSender, listener: socket | None = None
) -> Outcome:
    """Run one rank of a trial. Unsupported trials are refused before the ranks connect."""
    # the first message: a cold file cache makes the first use of a GPU or of NCCL slow
    sender.start_phase("start", OPENING)
    try:
        make = find_implementation(trial.implementation, trial.source)
        if reason := make.unavailable_reason(trial.device) or trial.unsupported_reason:
            raise UnsupportedError(reason)
        if trial.device == "cuda":
            open_gpu(place.local_rank)
        group = Group.alone()
        if place.size > 1:
            make(trial.workload, Group(place.rank, place.size), **trial.options)
            sender.start_phase("start", CONNECTING)
            join_process_group(place, trial.device, listener)
            group = Group.world(trial.device)
        if trial.device == "cpu":
            share_cores(place.local_ranks or place.size)
    except Exception as error:
        return name_other_processes(outcome_of_exception(error, sender.phase), trial)
    sender.start_phase("start", LOADING)
    return run_trial(trial, sender, group, place)


def find_mistakes(trials: Sequence[Trial]) -> list[str]:
    """Return contradicting options, and world sizes with which an implementation can't run at all.

    Any other exception is a result of the trial.
    """
    found, by_options = [], defaultdict(list)
    for trial in trials:
        error = _find_exception(trial)
        if isinstance(error, WorldError):
            # too few tokens for the ranks is not a mistake: a search increases them
            enough = TOKENS_PER_RANK * trial.world_size
            error = _find_exception(trial.at(max(trial.workload.seq_len, enough)))
        if isinstance(error, UserError):
            found.append(f"{trial.implementation}: {error}")
        by_options[trial.implementation, str(trial.options)].append(error)
    for (name, _), errors in by_options.items():
        if all(isinstance(error, WorldError) for error in errors):
            found.append(f"{name}: {errors[0]}")
    return found


def _find_exception(trial: Trial) -> Exception | None:
    try:
        make = find_implementation(trial.implementation, trial.source)
        make(trial.workload, Group(0, trial.world_size), **trial.options)
        check_name(trial.dense_kernel, "dense_kernel", (SAME_KERNEL, SDPA))
    except Exception as error:
        return error
    return None


def build_catalogue(own: Sequence[str] = ()) -> Catalogue:
    """Describe every device and implementation, and functions of the user by their names."""
    cpu = DeviceInfo(name="CPU", dtypes=tuple(DTYPE_BYTES), count=1)
    devices = {"cpu": cpu, "cuda": _cuda()}
    entries = {name: _entry(name, devices) for name in IMPLEMENTATIONS.names()}
    kernels = {name: _kernel(name, devices) for name in KERNELS.names()}
    mistakes = {}
    for name in own:
        try:
            entries[name] = describe_own_function(name)
        except UserError as error:
            mistakes[name] = str(error)
    return Catalogue(implementations=entries, devices=devices, kernels=kernels, mistakes=mistakes)


def _kernel(name: str, devices: dict[str, DeviceInfo]) -> KernelInfo:
    if reason := KERNELS.unavailable_reason(name):
        return KernelInfo(summary="can't be imported", device="", unavailable=reason)
    kernel = KERNELS.get(name)
    dtype = torch.bfloat16 if kernel.device == "cuda" else torch.float32
    reason = devices[kernel.device].unavailable if kernel.device in devices else None
    if reason is None and (kernel.device == "cuda" or devices["cuda"].unavailable):
        # beside a GPU the compiler of a CPU's kernel, several seconds, waits for its first use
        reason = kernel.unavailable_reason(Use(kernel.device, dtype, head_dim=64, train=False))
    summary = (kernel.__doc__ or "").partition("\n")[0].rstrip(".")
    return KernelInfo(summary=summary, device=kernel.device, unavailable=reason)


def _entry(name: str, devices: dict[str, DeviceInfo]) -> Entry:
    if reason := IMPLEMENTATIONS.unavailable_reason(name):
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


def _cuda() -> DeviceInfo:
    try:
        open_gpu(0)
        free, total = torch.cuda.mem_get_info()
        for number in range(torch.cuda.device_count()):
            # a build of torch has kernels for some architectures only
            torch.ones(1, device=f"cuda:{number}").add_(1)
    except Exception as error:
        sentence = explain_unusable(error) or str(error).partition("\n")[0]
        reason, _, remedy = sentence.partition("; ")
        return DeviceInfo(unavailable=reason, remedy=remedy)
    half = ("bfloat16",) if torch.cuda.is_bf16_supported(including_emulation=False) else ()
    return DeviceInfo(
        name=torch.cuda.get_device_name(),
        dtypes=("float32", *half, "float16"),
        free_bytes=free,
        total_bytes=total,
        count=torch.cuda.device_count(),
    )


def open_gpu(number: int) -> None:
    """Initialise CUDA and use this GPU of the visible ones, counted from 0."""
    own_gpu.begin(number)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if number >= (visible := torch.cuda.device_count()):
        needed = f"rank {number} of this host needs a GPU of its own, and {visible} are visible"
        raise UnsupportedError(f"{needed}; use fewer ranks, or make more visible")
    torch.cuda.set_device(number)
    own_gpu.opened(number)


def join_process_group(place: RankInfo, device: Device, listener: socket | None = None) -> None:
    """Join torch's process group of all ranks; block until every rank has joined.

    listener: an open socket at the store's port, if rank 0 inherited one.
    """
    if place.address.startswith("127.") or place.address in ("::1", "localhost"):
        # a value that is left from a cluster would end every trial
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        _check_interface(name)
    is_host = place.rank == 0
    options: dict[str, Any] = {"wait_for_workers": False}
    if is_host and listener:
        options["master_listen_fd"] = listener.detach()
    store = TCPStore(place.address, place.port, place.size, is_host, GROUP_TIMEOUT, **options)
    own: dict[str, Any] = {"store": store, "rank": place.rank, "world_size": place.size}
    if device == "cuda":
        own["device_id"] = torch.device("cuda", place.local_rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=GROUP_TIMEOUT, **own)


def _check_interface(name: str) -> None:
    """Raise UnsupportedError if a variable asks for network interfaces that this host lacks."""
    asked, here = os.environ.get(name, "").lstrip("="), psutil.net_if_addrs()
    if asked.startswith("^") or any(n.startswith(tuple(asked.split(","))) for n in here):
        return
    raise UnsupportedError(
        f"{name} is {asked}, and {gethostname()} has no such network interface; "
        f"unset it, or name one of {', '.join(here)}"
    )


def share_cores(ranks: int) -> None:
    """Set torch's threads to this rank's share of the host's cores; of one rank, to all at most."""
    threads = max(1, usable_cores() // ranks)
    torch.set_num_threads(threads if ranks > 1 else min(threads, torch.get_num_threads()))
