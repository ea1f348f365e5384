"""How this process, one rank of a trial, meets the others, and what of its host is its share."""

from __future__ import annotations

import os
import sys
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from longseq_bench.core.cluster_env import LOOPBACK, Place
from longseq_bench.core.model import Device
from longseq_bench.distributed.group import PATIENCE


def connect(place: Place, device: Device, listener: socket | None = None, trial: str = "") -> None:
    """Make this process one of the process group of all ranks; blocks until all are there.

    listener: rank 0's socket at the place's port, where somebody has opened it already. trial:
    keeps apart the trials that meet in one store, as a failed group can't be used again.
    """
    if place.address in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    keeps = place.rank == 0 and not place.store_is_up
    store: Any = TCPStore(
        place.address, place.port, place.size, keeps, PATIENCE, wait_for_workers=False,
        master_listen_fd=listener.detach() if keeps and listener else None,
    )  # fmt: skip
    if trial:
        store = PrefixStore(trial, store)
    on = None
    if device == "cuda":
        torch.cuda.set_device(place.local_rank)
        on = torch.device("cuda", place.local_rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=place.rank,
        world_size=place.size, timeout=PATIENCE, device_id=on,
    )  # fmt: skip


def share_cores(ranks: int) -> None:
    """As many threads as leave each of the ranks on this host cores of its own, until a trial says
    how many it wants."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // ranks))
