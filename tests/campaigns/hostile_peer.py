"""Send hostile messages at each point of the control protocol, in both directions.

    python -m tests.campaigns.hostile_peer --count 200 --seed 1

A follower attacks node 0, and a node 0 attacks a follower: without the key, in the handshake, and
with the key, before and in a trial. No process is started. It counts tracebacks, forged records
(a verdict that no valid report of a node's own rank supports) and orders obeyed that differ from
the follower's command. Exit code 1 if there is one. A failure is repeated with its seed.
"""

import argparse
import json
import random
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest.mock import Mock, patch

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.cluster_env import LOOPBACK, NodeInfo
from longseq_bench.core.errors import LauncherError, UserError
from longseq_bench.core.model import Measurement, Outcome, Trial, Workload
from longseq_bench.launchers import control_channel, elastic, follower
from longseq_bench.launchers.control_messages import NodeIdentity
from longseq_bench.launchers.elastic import ElasticLauncher, _Run
from longseq_bench.launchers.follower import Follower
from longseq_bench.launchers.host_agent import HostJob
from longseq_bench.launchers.own_command import CHOSEN_BY_SWEEP, OwnCommand
from longseq_bench.launchers.rank_supervisor import RankSupervisor
from longseq_bench.launchers.secure_connection import (
    MAGIC,
    SecureConnection,
    accept_client,
    connect_to_server,
)

KEY = b"the key of the campaign"
SECRETS = (KEY, b"sweep a.yaml", b"2.13.0")
MUST_MATCH = {"the command": "sweep a.yaml", "torch": "2.13.0"}
ZERO = NodeIdentity(node=0, host="alpha", token="zero", must_match=MUST_MATCH)
ONE = NodeIdentity(node=1, host="beta", token="one", must_match=MUST_MATCH)
RUN = "zero-1"
TRIAL = Trial(implementation="ring", workload=Workload(seq_len=512), world_size=2, repeats=1)
OWN = Outcome(
    status="ok", measurements=(Measurement(name="time", unit="s", samples=(1.0,), rank=0),)
)
REPORT = {"outcome": OWN.model_dump(mode="json"), "at": 1}

REPORTS: list[dict[str, Any]] = [
    {"heartbeat": 1},
    {"ready": {"cpu": "a CPU"}},
    {"run_id": RUN, "event": {"started": True}},
    {"run_id": RUN, "event": {"rank": 1, "message": {"phase": "time", "part": ""}}},
    {"run_id": RUN, "event": {"rank": 1, "message": REPORT}},
    {"run_id": RUN, "event": {"rank": 0, "message": REPORT}},
    {"run_id": RUN, "event": {"rank": 1, "lost_peer": "gone", "at": 1}},
    {"run_id": RUN, "event": {"failed": "no torch"}},
    {"run_id": RUN, "event": {"rank": 1, "exit": -9, "printed": "", "killed": False, "at": 1}},
    {"run_id": RUN, "inspection": {"samples": {"1": [True, 0.5]}, "stacks": {"1": ["a:1 f"]}}},
    {"run_id": RUN, "orphans": ["python (1)"]},
]
HANDSHAKE_S = 0.1


@dataclass
class Verdict:
    """What went wrong, by kind; and how many messages were sent at each point."""

    problems: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)


# ---- hostile data --------------------------------------------------------------------------------


def junk(rng: random.Random) -> Any:
    nested: Any = 1
    for _ in range(rng.choice([1, 3, 300])):
        nested = [nested] if rng.random() < 0.5 else {"facts": nested}
    return rng.choice([
        None, True, False, -1, 0, 1, 2, 64, 2**31, 2**70, 1e308, float("nan"), float("-inf"), "",
        "ok", "\x1b[31m\x00\n", "x" * 10**5, "\ud800", "../../etc/passwd", "ring", "zero", [], {},
        nested, [1] * 10**4,
    ])  # fmt: skip


def mutate(rng: random.Random, value: Any) -> Any:
    """Return a message with one or more parts changed, left out or added."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        holder, key = rng.choice(list(places(copy))) if copy else ([copy], 0)
        change = rng.random()
        if change < 0.15 and isinstance(holder, dict):
            del holder[key]
        elif change < 0.25 and isinstance(holder, dict):
            holder[rng.choice(["shutdown", "interrupted", "start", "x", ""])] = junk(rng)
        elif change < 0.5 and type(holder[key]) in (int, float):
            holder[key] += rng.choice([-1, 1, 0.5, 2**40])
        else:
            holder[key] = junk(rng)
    return copy


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Return JSON with bits flipped, cut, repeated or buried in brackets."""
    if not data:
        return rng.randbytes(40)
    at = rng.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    deep = rng.choice([b"[", b'{"event":']) * rng.choice([200, 10**5])
    return rng.choice(
        [flipped, data[:at], data + data, data[:at] + data, deep + data, rng.randbytes(at + 1), b""]
    )


def hostile(rng: random.Random, messages: list[dict[str, Any]]) -> bytes:
    message = rng.choice(messages)
    data = json.dumps(mutate(rng, message) if rng.random() < 0.7 else message)
    encoded = data.encode("utf-8", "replace")
    return spoil(rng, encoded) if rng.random() < 0.3 else encoded


def attack(
    rng: random.Random, connection: SecureConnection, sock: socket.socket, data: bytes
) -> None:
    """Send a message as it should be, or break, repeat or forge its frame."""
    if rng.random() < 0.8:
        connection.send(data)
        return
    sent: list[bytes] = []
    real, connection._socket = connection._socket, Mock(send=lambda v: sent.append(v) or len(v))
    connection.send(data)
    connection._socket, frame = real, bytes(sent[0])
    at = rng.randrange(4, len(frame))
    sock.sendall(rng.choice([
        frame + frame, frame[:at], frame[:at] + bytes([frame[at] ^ 8]) + frame[at + 1 :],
        b"\xff\xff\xff\xff" + frame, frame[:-32] + bytes(32), rng.randbytes(at),
    ]))  # fmt: skip


# ---- a follower attacks node 0 -------------------------------------------------------------------


@contextmanager
def node_0() -> Iterator[ElasticLauncher]:
    with socket.create_server((LOOPBACK, 0)) as found:
        cluster = NodeInfo(2, 1, 0, LOOPBACK, found.getsockname()[1])
    launcher = ElasticLauncher(cluster, ZERO, KEY, 1.0, lambda text: None)
    try:
        yield launcher
    finally:
        assert launcher._server
        launcher._server.close()


def connect(launcher: ElasticLauncher) -> socket.socket:
    return socket.create_connection((LOOPBACK, launcher.cluster.port), timeout=5)


def join(launcher: ElasticLauncher) -> tuple[SecureConnection, socket.socket]:
    """Join as node 1, as who knows the key."""
    assert launcher._server
    sock = connect(launcher)
    connection = connect_to_server(sock, KEY, time.monotonic() + 5)
    before = launcher._server.links.get(1)
    connection.send(ONE.model_dump_json().encode())
    connection.receive(2**20)
    end = time.monotonic() + 5
    while launcher._server.links.get(1) is before and time.monotonic() < end:
        time.sleep(0.0005)
    return connection, sock


def stranger_before_hello(rng: random.Random, launcher: ElasticLauncher, seen: Verdict) -> None:
    with connect(launcher) as sock, suppress(OSError):
        sock.sendall(rng.choice([b"", MAGIC, b"GET / HTTP/1.1\r\n\r\n", spoil(rng, MAGIC * 9)]))
        sock.shutdown(socket.SHUT_WR)
        check_answer(sock.recv(2**16), 32, seen)  # a nonce, after a hello that is one


def stranger_in_handshake(rng: random.Random, launcher: ElasticLauncher, seen: Verdict) -> None:
    with connect(launcher) as sock, suppress(OSError):
        sock.sendall(MAGIC + rng.randbytes(32))
        nonce = sock.recv(2**16)
        check_answer(nonce, 32, seen)
        sock.sendall(rng.choice([nonce, bytes(32), rng.randbytes(rng.choice([1, 32, 500]))]))
        sock.shutdown(socket.SHUT_WR)
        check_answer(sock.recv(2**16), 0, seen)


def check_answer(data: bytes, limit: int, seen: Verdict) -> None:
    if len(data) > limit or any(secret in data for secret in SECRETS):
        seen.problems.append(f"disclosed to a stranger: {data[:100]!r}")


def hostile_identity(rng: random.Random, launcher: ElasticLauncher, seen: Verdict) -> None:
    assert launcher._server
    with connect(launcher) as sock, suppress(OSError, EOFError):
        connection = connect_to_server(sock, KEY, time.monotonic() + 5)
        attack(rng, connection, sock, hostile(rng, [ONE.model_dump()]))
        sock.shutdown(socket.SHUT_WR)
        connection.receive(2**20)
    launcher._server._mismatch = ""  # a node that knows the key may end the launch by a difference


def before_a_trial(rng: random.Random, launcher: ElasticLauncher, seen: Verdict) -> None:
    connection, sock = join(launcher)
    with sock, suppress(OSError):
        for _ in range(rng.choice([1, 1, 3])):
            attack(rng, connection, sock, hostile(rng, [*REPORTS, {"interrupted": True}]))
    with suppress(KeyboardInterrupt, LauncherError):  # its user pressed Ctrl-C, it has no torch
        wait_lost(launcher)
        launcher._read_messages()


def wait_lost(launcher: ElasticLauncher) -> None:
    assert launcher._server
    end = time.monotonic() + 5
    while not launcher._server.links[1].lost_reason and time.monotonic() < end:
        time.sleep(0.0005)


def in_a_trial(rng: random.Random, launcher: ElasticLauncher, seen: Verdict) -> None:
    """Rank 0 is done; node 1 reports hostile things about the others, then its connection ends."""
    assert launcher._server
    connection, sock = join(launcher)
    link = launcher._server.links[1]
    job = HostJob(RUN, TRIAL.model_dump(mode="json"), 2, 1, LOOPBACK, 20000, 1.0)
    supervisor = RankSupervisor(TRIAL, time.monotonic())
    ranks = Mock(handles=[], events=lambda ready: [])
    ranks.inspect.return_value = {"samples": {}, "stacks": {}}
    ranks.end.return_value = []
    one = _Run(job, supervisor, ranks, {1: link}, "alpha", lambda phase, part: None)
    supervisor.add_outcome(0, OWN, time.monotonic(), 1)
    sent = [hostile(rng, REPORTS) for _ in range(rng.choice([1, 2, 4]))]
    with sock, suppress(OSError):
        for data in sent:
            attack(rng, connection, sock, data)
    one.follow()
    with suppress(KeyboardInterrupt):
        one._diagnose() if rng.random() < 0.3 and supervisor.running else None
    one.end(supervisor.outcome())
    judge(supervisor.outcome(), sent, seen)


def judge(outcome: Outcome, sent: list[bytes], seen: Verdict) -> None:
    """Note a verdict that no valid report of rank 1 supports."""
    Outcome.model_validate_json(outcome.model_dump_json())
    own = [m for m in outcome.measurements if m.rank == 0]
    if own != list(OWN.measurements):
        seen.problems.append(f"forged: the samples of rank 0 are {own}")
    if outcome.status == "ok" and not any(map(is_valid_report, sent)):
        seen.problems.append(f"forged: ok after {sent}"[:500])


def is_valid_report(data: bytes) -> bool:
    """Return True for a report that rank 1 passed; written apart from the models."""
    try:
        message = json.loads(data)
        event = message["event"]
        return bool(
            message["run_id"] == RUN and event["rank"] in (1, "1")
            and event["message"]["outcome"]["status"] == "ok"
        )  # fmt: skip
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


# ---- a node 0 attacks a follower -----------------------------------------------------------------


ORDER = {
    "start": asdict(HostJob(
        RUN, TRIAL.model_dump(mode="json"), 2, 1, LOOPBACK, 20000, 60.0, 1, LOOPBACK
    ))
}  # fmt: skip
ORDERS: list[dict[str, Any]] = [
    ORDER, ORDER, ORDER, {"heartbeat": 1}, {"inspect": RUN},
    {"end": RUN, "outcome": {"status": "ok", "reason": None}},
    {"end": RUN, "outcome": None}, {"shutdown": "", "interrupted": False},
]  # fmt: skip


def fake_node_0(rng: random.Random, seen: Verdict, point: str) -> None:
    """Let a follower connect to a hostile node 0, which ends it or leaves it alone in the end."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        cluster = NodeInfo(2, 1, 1, LOOPBACK, listener.getsockname()[1])
        command = OwnCommand(lambda catalogue: [TRIAL], CHOSEN_BY_SWEEP)
        node_1 = Follower(cluster, ONE, KEY, command, 0.1, lambda text: None, lambda *trial: None)
        catalogue = Catalogue(implementations={}, devices={})
        node_1._local = Mock(catalogue=lambda: catalogue)
        node_1._ranks = Mock(handles=[], events=lambda ready: [])
        node_1._ranks.end.return_value = []
        node_1._ranks.inspect.return_value = {"samples": {}, "stacks": {}}
        running = threading.Thread(target=follow, args=(node_1, seen))
        running.start()
        listener.settimeout(0.15)
        with suppress(OSError, EOFError, ValueError, control_channel.AuthenticationError):
            while running.is_alive():
                sock, _ = listener.accept()
                with sock:
                    sock.settimeout(1)
                    play_node_0(rng, sock, point, seen)
        listener.close()
        running.join(30)
        if running.is_alive():
            seen.problems.append(f"a follower hangs after {point}")
        for call in node_1._ranks.start.call_args_list:
            judge_order(call.args[0], seen)


def follow(node_1: Follower, seen: Verdict) -> None:
    try:
        node_1.follow()
    except (UserError, LauncherError, KeyboardInterrupt):
        pass
    except BaseException:
        seen.problems.append(traceback.format_exc())


def play_node_0(rng: random.Random, sock: socket.socket, point: str, seen: Verdict) -> None:
    if point == "without the key":
        sock.sendall(rng.choice([b"", bytes(64), rng.randbytes(100), b"HTTP/1.1 400\r\n\r\n" * 9]))
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while part := sock.recv(2**16):
            data += part
        check_answer(data, len(MAGIC) + 64, seen)
        return
    connection = accept_client(sock, KEY, time.monotonic() + 1)
    connection.receive(2**20)
    if point == "welcome":
        welcome = [ZERO.model_dump(), {"refused": "no"}]
        attack(rng, connection, sock, hostile(rng, welcome))
        return
    connection.send(ZERO.model_dump_json().encode())
    for _ in range(rng.choice([1, 2, 4])):
        attack(rng, connection, sock, hostile(rng, ORDERS))
    sock.shutdown(socket.SHUT_WR)
    with suppress(OSError, EOFError, ValueError):
        while True:
            connection.receive(2**24)


def judge_order(job: HostJob, seen: Verdict) -> None:
    """Note ranks that were started and are not in the follower's command."""
    trial = Trial.model_validate(job.trial).replace(round=0, memory_budget=None)
    obeyed = replace(job, run_id="", port=0, timeout_s=0.0, trial={})
    expected = HostJob("", {}, 2, 1, LOOPBACK, 0, 0.0, 1, LOOPBACK)
    if trial != TRIAL or obeyed != expected or not 0 < job.timeout_s <= 1e7:
        seen.problems.append(f"obeyed another order: {job}")


# ---- the campaign --------------------------------------------------------------------------------

AGAINST_NODE_0: dict[str, Callable[[random.Random, ElasticLauncher, Verdict], None]] = {
    "before the hello": stranger_before_hello,
    "in the handshake": stranger_in_handshake,
    "identity": hostile_identity,
    "before a trial": before_a_trial,
    "in a trial": in_a_trial,
}
AGAINST_A_FOLLOWER = ("without the key", "welcome", "orders")


def run(count: int, seed: int) -> Verdict:
    """Send `count` hostile messages at each point."""
    seen = Verdict()
    with ExitStack() as stack:
        stack.enter_context(patch.object(threading, "excepthook", lambda hook: seen.problems.append(
            "".join(traceback.format_exception(hook.exc_value))
        )))  # fmt: skip
        stack.enter_context(patch.object(control_channel, "HANDSHAKE_TIMEOUT_S", HANDSHAKE_S))
        stack.enter_context(patch.object(control_channel, "RETRY_S", 0.001))
        for module in (elastic, follower):
            stack.enter_context(patch.object(module, "HEARTBEAT_S", 0.02))
        launcher = stack.enter_context(node_0())
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            for point, send in AGAINST_NODE_0.items():
                attempt(lambda: send(rng, launcher, seen), f"{point} {number}", seen)  # noqa: B023
                seen.sent[f"node 0, {point}"] += 1
            for point in AGAINST_A_FOLLOWER:
                attempt(lambda: fake_node_0(rng, seen, point), f"{point} {number}", seen)  # noqa: B023
                seen.sent[f"follower, {point}"] += 1
        _, sock = join(launcher)  # after all of it, a node can still join
        sock.close()
    return seen


def attempt(action: Callable[[], None], name: str, seen: Verdict) -> None:
    before = len(seen.problems)
    try:
        action()
    except Exception:
        seen.problems.append(traceback.format_exc())
    seen.problems[before:] = [f"{name}: {problem}" for problem in seen.problems[before:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="hostile messages at each point")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"--count {options.count} --seed {options.seed}", flush=True)
    seen = run(options.count, options.seed)
    for point, count in seen.sent.items():
        print(f"{count:6} {point}")
    for problem in seen.problems:
        print(problem, file=sys.stderr)
    print(f"{len(seen.problems)} problem(s)")
    return int(bool(seen.problems))


if __name__ == "__main__":
    sys.exit(main())
