"""The start of a rank: its messages, the GPU it takes; the GPUs of the catalogue."""

import os
import sys
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from longseq_bench.core.catalogue import DeviceInfo
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Outcome, Phase, Trial
from longseq_bench.core.ranks import CONNECTING, LOADING, OPENING, RankInfo
from longseq_bench.distributed.group import Group
from longseq_bench.kernels import native
from longseq_bench.worker import main
from tests.make import outcome, trial


class Listener:
    """A sender that notes what is reported."""

    phase: Phase = "start"

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def start_phase(self, phase: Phase, part: str = "") -> None:
        self.phase = phase
        self._events.append(f"{phase}: {part}")


def start(monkeypatch: pytest.MonkeyPatch, of: Trial, rank: int = 0) -> tuple[Outcome, list[str]]:
    """Return the outcome of a rank, and the order of its messages and steps."""
    events: list[str] = []

    def step(name: str, result: Any = None) -> Any:
        return lambda *_: (events.append(name), result)[1]

    monkeypatch.setattr(main, "open_gpu", step("CUDA"))
    monkeypatch.setattr(main, "share_cores", step("cores"))
    monkeypatch.setattr(main, "join_process_group", step("NCCL"))
    monkeypatch.setattr(Group, "world", step("group", Group.alone()))
    monkeypatch.setattr(main, "run_trial", step("warm-up", outcome()))
    place = RankInfo(rank, of.world_size, rank)
    return main.run_rank(of, place, Listener(events)), events  # type: ignore[arg-type]


def test_a_rank_reports_before_cuda_nccl_and_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may take minutes with a cold file cache."""
    _, events = start(monkeypatch, trial("ring", 64, world_size=2, device="cuda"))
    assert events == [
        f"start: {OPENING}", "CUDA",
        f"start: {CONNECTING}", "NCCL", "group",
        f"start: {LOADING}", "warm-up",
    ]  # fmt: skip


def test_what_a_rank_can_not_run_is_refused_before_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, events = start(monkeypatch, trial("sdpa", 64, world_size=2))
    assert found.status == "unsupported"
    assert events == [f"start: {OPENING}"]


def test_a_rank_without_a_gpu_of_its_own_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    memory = MagicMock()
    monkeypatch.setattr(main, "own_gpu", memory)
    main.open_gpu(1)
    assert used == [1]
    assert [call[0] for call in memory.method_calls] == ["begin", "opened"]
    with pytest.raises(UnsupportedError, match=r"rank 2 of this host .* 2 are visible"):
        main.open_gpu(2)
    assert used == [1]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_trial_on_a_gpu_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    found = main.run_rank(
        trial("sdpa", 64, device="cuda"),
        RankInfo(0, 1, 0),
        Listener(events),  # type: ignore[arg-type]
    )
    assert (found.status, found.phase) == ("unsupported", "start")
    assert found.reason == "this torch is a CPU build; install a torch that is built for CUDA"
    assert main.build_catalogue().devices["cuda"].unavailable == "this torch is a CPU build"


# ---- the catalogue -----------------------------------------------------------------------------


def test_a_gpu_without_kernels_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"init": None, "set_device": None, "device_count": 1, "mem_get_info": (30, 80)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the")
    monkeypatch.setattr(torch, "ones", MagicMock(side_effect=error))
    monkeypatch.setattr(main, "own_gpu", MagicMock())
    found = main._cuda()
    assert "this GPU's architecture has no code in this torch" in (found.unavailable or "")
    assert found.remedy == "install a build for this GPU"


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_a_kernel_without_its_device_is_unavailable() -> None:
    """The kernel's own reason is about head_dim and dtype only."""
    devices = {"cuda": DeviceInfo(unavailable="no driver"), "cpu": DeviceInfo()}
    assert main._kernel("efficient", devices).unavailable == "no driver"
    assert main._kernel("aten-flash-cpu", devices).unavailable is None


def test_beside_a_gpu_no_compiler_runs_for_the_kernel_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda *_: "no compiler")
    devices = {"cuda": DeviceInfo(unavailable="no driver"), "cpu": DeviceInfo()}
    assert main._kernel("native", devices).unavailable == "no compiler"
    assert main._kernel("native", devices | {"cuda": DeviceInfo()}).unavailable is None


# ---- network interfaces, and threads -------------------------------------------------------------


def join(monkeypatch: pytest.MonkeyPatch, address: str, **variables: str) -> dict[str, str | None]:
    """Join a group at an address with variables that are left from a cluster; return them then."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(main, "TCPStore", MagicMock())
    monkeypatch.setattr(main.dist, "init_process_group", MagicMock())
    monkeypatch.setattr(main.psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
    main.join_process_group(RankInfo(1, 2, 1, address, 1), "cpu")
    return {name: os.environ.get(name) for name in variables}


def test_interfaces_left_from_a_cluster_are_ignored_on_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = {"GLOO_SOCKET_IFNAME": "ib7", "NCCL_SOCKET_IFNAME": "ib7"}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    found = join(monkeypatch, "127.0.0.1", **left)
    assert found == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": None}


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker", "ib7,eth0"])
def test_over_several_hosts_an_interface_that_exists_is_used(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    found = join(monkeypatch, "10.0.0.1", NCCL_SOCKET_IFNAME=value)
    assert found == {"NCCL_SOCKET_IFNAME": value}


def test_over_several_hosts_one_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = "GLOO_SOCKET_IFNAME is ib7, and .* has no such network interface; unset it, or name"
    with pytest.raises(UnsupportedError, match=expected):
        join(monkeypatch, "10.0.0.1", GLOO_SOCKET_IFNAME="ib7")


@pytest.mark.parametrize(("ranks", "threads"), [(1, 3), (2, 1), (9, 1)])
def test_a_quota_of_the_container_limits_threads(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int
) -> None:
    used: list[int] = []
    monkeypatch.setattr(main, "usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    main.share_cores(ranks)
    assert used == [threads]
