"""The ranks of one host, started by torch's own elastic agent, as torchrun starts them.

The agent meets those of the other hosts, forks the ranks from this process, which has torch loaded,
and ends them all when one dies. Each rank finds its place in the environment, like any process of
torchrun's, and speaks to the host's parent by a pipe that it inherits.

Beside torch's own ways: no folder of logs, no look-up of host names (ten seconds each where no name
server answers), and a short wait for the other hosts' agents at the end (else five minutes).
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed.elastic.agent.server.api as agents
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from longseq_bench.core.cluster_env import LOOPBACK, adopted
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Trial
from longseq_bench.core.stack_markers import longseq_child_main
from longseq_bench.worker.main import run
from longseq_bench.worker.messages import MessageSender

MONITOR_S = 0.05
EXIT_BARRIER_S = 2.0
"""How long an agent waits for those of the other hosts, when its own ranks are done."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915


def run_agent(order: str, words: Connection, pipes: list[Connection], outputs: list[int]) -> None:
    """Start this host's ranks and stay until they have ended. Says over `words`:

    {"started": [pid, ...]}                        they are there: all hosts have met
    {"exit": -9, "local_rank": 1, "at": 17...}     one is gone, and when, in ns since 1970
    {"failed": "..."}                              they could not be started
    """
    asked = json.loads(order)
    _quiet()
    _name_interface(asked["address"])
    # ranks are numbered host by host, without asking the others how many they have
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    handler = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="static", endpoint=f"{asked['host']}:{asked['port']}", run_id=asked["run"],
            min_nodes=asked["nodes"], max_nodes=asked["nodes"], local_addr=asked["address"],
            rank=asked["node"], timeout=math.ceil(asked["patience"]),
        )
    )  # fmt: skip
    spec = WorkerSpec(
        role="rank", local_world_size=asked["per"], rdzv_handler=handler, entrypoint=_rank,
        args=(json.dumps(asked["trial"]), words, pipes, outputs), max_restarts=0,
        monitor_interval=MONITOR_S, master_addr=asked["host"], master_port=asked["port"],
        local_addr=asked["address"],
    )  # fmt: skip
    agent = _Agent(spec, words, pipes)
    try:
        agent.run()
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().splitlines()[:1] or [""]
        agent.say({"failed": f"{type(error).__name__}: {first[0]}"})


class _Agent(LocalElasticAgent):
    """torch's agent, which tells the parent which ranks it has started, and how each ended."""

    def __init__(self, spec: WorkerSpec, words: Connection, pipes: Sequence[Connection]) -> None:
        logs = DefaultLogsSpecs(log_dir=os.devnull)
        super().__init__(spec, logs, start_method="fork", exit_barrier_timeout=EXIT_BARRIER_S)
        self._words, self._pipes, self._saying = words, pipes, threading.Lock()

    def say(self, message: dict[str, Any]) -> None:
        with self._saying:
            self._words.send_bytes(json.dumps(message).encode())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for pipe in self._pipes:
            pipe.close()
        self.say({"started": [pids[local_rank] for local_rank in sorted(pids)]})
        for local_rank, pid in pids.items():
            threading.Thread(target=self._wait_for, args=(local_rank, pid), daemon=True).start()
        return pids

    def _wait_for(self, local_rank: int, pid: int) -> None:
        """Say how a rank ended, at once and of each one: torch names one, when all are gone."""
        # left as it is: the agent has to find it dead itself
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        at = time.time_ns()
        if found is not None:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            self.say({"exit": code, "local_rank": local_rank, "at": at})


def _rank(trial: str, words: Connection, pipes: Sequence[Connection], outputs: list[int]) -> None:
    """One rank, forked from the agent: as `worker.serve`, with its place from the environment."""
    try:
        local_rank = int(os.environ["LOCAL_RANK"])
        _become_a_child(outputs[local_rank])
        words.close()
        for other, pipe in enumerate(pipes):
            if other != local_rank:
                pipe.close()
        place = adopted(os.environ)
        if place is None:
            raise UserError("torch's agent gave this rank no place")
        sender = MessageSender(pipes[local_rank])
        outcome = longseq_child_main(run, Trial.model_validate_json(trial), place, sender)
        sender.send_outcome(outcome)
        if outcome.status == "ok":
            sender.wait_until_closed()
            return
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # not by returning, which would keep the connections open that the peers wait at; and not with
    # another code, or the agent would end those before they have said what they saw
    os._exit(0)


def _become_a_child(output: int) -> None:
    """What the agent has set up for itself is not for a rank."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _quiet() -> None:
    """torch's log format takes 0.9 s to import, and each of its events a look-up of this host."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
    logging.root.handlers[:] = [logging.StreamHandler()]
    agents._get_fq_hostname = socket.gethostname
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def _name_interface(address: str) -> None:
    """Tell gloo which interface leads to the other hosts: it would take what the host's name stands
    for, which often is the loopback."""
    if address != LOOPBACK and (name := _interface_of(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
