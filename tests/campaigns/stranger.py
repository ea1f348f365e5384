"""Attack a real launch from the network, without its key: stop it, join it, forge, learn.

    python -m tests.campaigns.stranger
    python -m tests.campaigns.stranger --tree ../an-old-checkout

Two nodes run on an address of this machine that other hosts reach. The stranger knows the address,
the source code and the former default key, and speaks the former protocol too, so that the script
also attacks a checkout from before keys were required. Exit code 1 if an attack succeeds.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import psutil

from longseq_bench.launchers.secure_connection import (
    MAGIC,
    SecureConnection,
    connect_to_server,
)
from longseq_bench.launchers.secure_connection import AuthenticationError as WrongKeyError

ROOT = Path(__file__).parents[2]
CONFIG = """\
memory_budget: 64MiB
workload: {heads: 1, head_dim: 16}
tokens: 256
implementations: ring
rounds: 1
repeats: 1
threads: 1
"""
COMMAND = ["sweep", "secret-name.yaml", "--out", "out"]
GUESSES = (b"longseq", b"", b"812", b"812.0", b"alpha", b"secret")
TELLING = (b"secret-name", b"sweep", b"commit", b"hash", b"torch", b"--nnodes")
IDLE, PATIENCE_S = 200, 120
FORGED = 123.456


class Launch:
    """Node 0 of a launch and, on request, node 1. `prefix`: code that they run first."""

    def __init__(self, tree: Path, address: str, prefix: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="longseq-stranger-"))
        (self._folder / "secret-name.yaml").write_text(CONFIG)
        with socket.create_server((address, 0)) as found:
            self.endpoint = found.getsockname()
        self._tree, self._prefix = tree, prefix
        self.nodes = [self.start(0)]
        self.wait_until(lambda: "waiting at" in self.err(0) or self.nodes[0].poll() is not None)

    def start(self, node: int, port: int = 0, key: str = "") -> subprocess.Popen[bytes]:
        address, own_port = self.endpoint
        run = "from longseq_bench.cli import run; sys.exit(run(sys.argv[1:]))"
        code = f"import sys; {self._prefix}\n{run}"
        words = [
            "launch", "--nnodes", "2", "--node-rank", str(node), "--rdzv-timeout", "20",
            "--rdzv-endpoint", f"{address}:{port or own_port}", "--", *COMMAND,
        ]  # fmt: skip
        environ = {
            **os.environ,
            "PYTHONPATH": str(self._tree),
            **({"LONGSEQ_KEY": key} if key else {}),
        }
        with (self._folder / f"err{node}").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-c", code, *words],
                cwd=self._folder, env=environ, stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip

    def start_other(self) -> None:
        """Start node 1 as its user would: with the key that node 0 printed."""
        found = re.search(r"LONGSEQ_KEY=(\S+)", self.err(0))
        self.nodes.append(self.start(1, key=found[1] if found else ""))

    def wait(self) -> list[int]:
        return [node.wait(PATIENCE_S) for node in self.nodes]

    def wait_until(self, happened: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while not happened() and time.monotonic() < end:
            time.sleep(0.05)

    def err(self, node: int) -> str:
        return (self._folder / f"err{node}").read_text()

    def records(self) -> list[dict[str, Any]]:
        path = self._folder / "out" / "records.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        for node in self.nodes:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(node.pid).children(recursive=True):
                    child.kill()
            node.kill()
            node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def launch(tree: Path, address: str, prefix: str) -> Iterator[Launch]:
    one = Launch(tree, address, prefix)
    try:
        yield one
    finally:
        one.close()


# ---- what a stranger can do ----------------------------------------------------------------------


class Line:
    """A connection of either protocol to which a guess of the key was admitted."""

    def __init__(self, old: Connection | None, new: SecureConnection | None) -> None:
        self._old, self._new = old, new

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._old.send_bytes(data) if self._old else self._new and self._new.send(data)

    def receive(self) -> dict[str, Any]:
        if self._old:
            return dict(json.loads(self._old.recv_bytes()))
        assert self._new
        return dict(json.loads(self._new.receive(2**24)))


def guess(endpoint: tuple[str, int], key: bytes, heard: list[bytes]) -> Line | None:
    """Try a key in both protocols; None if it is wrong. heard: what the other end sent before."""
    with suppress(OSError, WrongKeyError, ValueError, EOFError):
        sock = socket.create_connection(endpoint, timeout=2)
        return Line(None, connect_to_server(sock, key, time.monotonic() + 2))
    with suppress(OSError, AuthenticationError, EOFError):
        sock = socket.create_connection(endpoint, timeout=2)
        start = sock.recv(2**16, socket.MSG_PEEK)  # node 0 speaks first in the former protocol
        heard.append(start)
        if start:
            sock.setblocking(True)
            connection = Connection(os.dup(sock.fileno()))
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return Line(connection, None)
    return None


def pester(endpoint: tuple[str, int], heard: list[bytes]) -> list[socket.socket]:
    """Send garbage, and open connections that say nothing, or a byte at a time."""
    garbage = [
        b"GET / HTTP/1.1\r\n\r\n", os.urandom(10**5), MAGIC + bytes(64), b"\xff" * 8, b"[" * 10**5,
        b'{"shutdown": "", "interrupted": true}', b'{"interrupted": true}',
    ]  # fmt: skip
    for data in garbage:
        with suppress(OSError), socket.create_connection(endpoint, timeout=2) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            heard.append(sock.recv(2**16))
    idle = []
    with suppress(OSError):
        for number in range(IDLE):
            idle.append(socket.create_connection(endpoint, timeout=2))
            idle[-1].sendall(MAGIC[: number % 8])
    return idle


def say_hello(line: Line, learned: dict[str, str]) -> dict[str, Any]:
    line.send({"node": 1, "host": "evil", "token": "evil", "must_match": learned})
    return line.receive()


def parse_refusal(text: str) -> dict[str, str]:
    """Return the values of node 0 that a refusal names."""
    parts = text.partition("the nodes differ: ")[2].split("; ")
    found = [re.fullmatch(r"(.+?) is (.*) on node 0 \(.*?\) and .*", part, re.S) for part in parts]
    return {one[1]: one[2] for one in found if one}


def forge(line: Line) -> None:
    """Play node 1: answer the order of a trial with an outcome for all ranks."""
    line.send({"ready": {"cpu": "CPU"}})
    while "start" not in (message := line.receive()):
        pass
    run_id = message["start"]["run_id"]
    samples = {"name": "time", "unit": "s", "samples": [FORGED], "rank": 0}
    outcome = {"status": "ok", "measurements": [samples]}
    for event in [{"started": True}] + [
        {"rank": rank, "message": {"outcome": outcome, "at": 1}} for rank in (0, 1)
    ]:
        line.send({"run_id": run_id, "event": event})
    with suppress(OSError, EOFError, ValueError):
        while "shutdown" not in (message := line.receive()):
            if "end" in message:
                line.send({"run_id": run_id, "orphans": []})


# ---- the attacks ---------------------------------------------------------------------------------


def stop_and_learn(one: Launch, results: dict[str, str]) -> dict[str, str]:
    """Pester node 0 and say hello with every guess; then node 1 starts as usual."""
    heard: list[bytes] = []
    learned: dict[str, str] = {}
    idle = pester(one.endpoint, heard)
    for key in GUESSES:
        if line := guess(one.endpoint, key, heard):
            with suppress(OSError, EOFError, ValueError):
                answer = say_hello(line, {})
                learned |= parse_refusal(str(answer.get("refused", "")))
                heard.append(json.dumps(answer).encode())
    one.start_other()
    codes = one.wait()
    for sock in idle:
        sock.close()
    statuses = [record["outcome"]["status"] for record in one.records()]
    if codes != [0, 0] or statuses != ["ok"]:
        results["stop"] = f"exit codes {codes}, records {statuses}: {one.err(0)[-300:]}"
    if telling := [data[:200] for data in heard if any(word in data for word in TELLING)]:
        results["learn"] = f"node 0 said {telling}"
    return learned


def join_and_forge(one: Launch, learned: dict[str, str], results: dict[str, str]) -> None:
    """Be node 1 before the real one is; then let that one start."""
    for key in GUESSES:
        with suppress(OSError, EOFError, ValueError):
            line = guess(one.endpoint, key, [])
            if line and "host" in say_hello(line, learned):
                results["join"] = f"admitted as node 1 with the key {key!r}"
                threading.Thread(target=forge, args=(line,), daemon=True).start()
                break
    one.start_other()
    one.wait()
    records = one.records()
    if str(FORGED) in json.dumps(records):
        results["forge"] = f"{len(records)} record(s), with a made-up time"
    if [record["outcome"]["status"] for record in records] != ["ok"]:
        results.setdefault("stop", f"no record of the real nodes: {one.err(0)[-300:]}")


def play_node_0(one: Launch, results: dict[str, str]) -> None:
    """Let a real node 1, with a key of its own, find a stranger at its endpoint."""
    heard = b""
    with socket.create_server((one.endpoint[0], 0)) as listener:
        listener.settimeout(30)
        follower = one.start(1, listener.getsockname()[1], key="the key of the real node 0")
        one.nodes.append(follower)
        sock, _ = listener.accept()
        sock.settimeout(2)
        with sock, suppress(OSError, AuthenticationError, EOFError):
            heard += sock.recv(2**16)  # the former protocol waits for the challenge
            sock.sendall(os.urandom(64))
            heard += sock.recv(2**16)
    follower.kill()
    if any(word in heard for word in TELLING):
        results["learn"] = f"node 1 said {heard[:200]!r}"
    arguments = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    found = re.search(r"LONGSEQ_KEY=(\S+)", one.err(0))
    if found and any(found[1] in text for text in arguments):
        results["learn"] = "`ps` shows the key"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to attack")
    parser.add_argument(
        "--address", help="address to bind; default: the first that is not loopback"
    )
    options = parser.parse_args()
    own = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    address = options.address or (own[0] if own else "127.0.0.2")
    # a loopback address counts as one that others reach, if this machine has no other
    prefix = ""
    if address.startswith("127."):
        prefix = (
            "import longseq_bench.launchers.endpoint as e; e.is_loopback = lambda address: False"
        )
    results: dict[str, str] = {}
    with launch(options.tree, address, prefix) as one:
        learned = stop_and_learn(one, results)
    with launch(options.tree, address, prefix) as one:
        join_and_forge(one, learned, results)
    with launch(options.tree, address, prefix) as one:
        play_node_0(one, results)
    for attack in ("stop", "join", "forge", "learn"):
        print(f"{attack:6} {results.get(attack, 'failed, as it must')}")
    return int(bool(results))


if __name__ == "__main__":
    sys.exit(main())
