"""Take a GPU or a share of the host's cores, and join the other ranks of a trial."""

import os
import sys
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Device
from longseq_bench.core.ranks import RankInfo
from longseq_bench.distributed.group import GROUP_TIMEOUT
from longseq_bench.worker import flight_recorder


def open_gpu(number: int) -> None:
    """Initialise CUDA and use this GPU of the visible ones, counted from 0.

    Raises UnsupportedError if there are fewer, and torch's own error if it can't use any.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    visible = torch.cuda.device_count()
    if number >= visible:
        raise UnsupportedError(
            f"rank {number} of this host needs a GPU of its own, and {visible} are visible; use "
            "fewer ranks, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(number)


def join_process_group(place: RankInfo, device: Device, listener: socket | None = None) -> None:
    """Join torch's process group of all ranks; block until every rank has joined.

    Args:
        place: rank, world size and address of the store.
        device: `cuda` selects NCCL, after `open_gpu`; `cpu` gloo.
        listener: an open socket at the store's port, if rank 0 inherited one.
    """
    if place.address.startswith("127.") or place.address in ("::1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    is_host = place.rank == 0
    store: Any = TCPStore(
        place.address, place.port, place.size, is_host, GROUP_TIMEOUT, wait_for_workers=False,
        master_listen_fd=listener.detach() if is_host and listener else None,
    )  # fmt: skip
    device_id = None
    if device == "cuda":
        flight_recorder.enable()
        device_id = torch.device("cuda", place.local_rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=place.rank,
        world_size=place.size, timeout=GROUP_TIMEOUT, device_id=device_id,
    )  # fmt: skip


def share_cores(ranks: int) -> None:
    """Set torch's threads to this rank's share of the host's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // ranks))
