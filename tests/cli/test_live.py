"""The page that is served while a sweep runs: requests, allowed hosts, and its end."""

import io
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, RemoteDisconnected
from pathlib import Path

import pytest
from rich.console import Console

from longseq_bench.cli import live_server as live_page
from longseq_bench.cli import progress, run
from longseq_bench.cli.live_server import ADDRESS, LivePage
from longseq_bench.cli.progress import SweepProgress
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.search.strategy import Step
from longseq_bench.store import RECORDS
from tests import make


def render(records: list[Record], running: bool, status: str) -> str:
    names = " ".join(record.trial.implementation for record in records)
    return f"<p>{names} {running} {status}</p>"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePage]:
    monkeypatch.setattr(live_page, "LAST_VIEW_S", 0.1)
    with LivePage(render, lambda: "half way") as served:
        yield served


def port_of(live: LivePage) -> int:
    return int(live.url.rstrip("/").rpartition(":")[2])


def ask(
    port: int, path: str, host: str | None = None, method: str = "GET"
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection(ADDRESS, port, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply, reply.read().decode()


def ends(live: LivePage, name: str) -> None:
    one = make.record(make.trial(name))
    live.ends(Step(one.trial, "measure"), one, from_store=False)


def test_the_page_and_its_state_grow_with_the_records(live: LivePage) -> None:
    assert live.url.startswith(f"http://{ADDRESS}:")
    before = json.loads(ask(port_of(live), "/state")[1])
    ends(live, "sdpa")
    reply, page = ask(port_of(live), "/")
    after = json.loads(ask(port_of(live), "/state")[1])
    assert (reply.status, page) == (200, "<p>sdpa True half way</p>")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert reply.headers["Cache-Control"] == "no-store"
    assert after == {"version": before["version"] + 1, "running": True, "said": "half way"}


def test_a_page_that_is_slow_to_render_is_rendered_less_often(live: LivePage) -> None:
    ends(live, "sdpa")
    live._due = time.monotonic() + 1e9
    ends(live, "ring")
    assert ask(port_of(live), "/")[1] == "<p>sdpa True half way</p>"
    status = json.loads(ask(port_of(live), "/state")[1])["said"]
    assert status == "half way; the page shows 1 of 2 records"


def starts(live: LivePage) -> None:
    live.starts(Step(make.trial("hilbert"), "measure"))


def test_before_a_long_trial_starts_the_page_has_every_record() -> None:
    """Without this, the latest records would appear only after that trial."""
    expected = [100.0]
    live = LivePage(render, lambda: "half way", expected=lambda step: expected[0])
    ends(live, "sdpa")
    live._due = time.monotonic() + 500  # rendering took 50 s
    ends(live, "ring")
    starts(live)
    assert live._page == b"<p>sdpa True half way</p>"
    expected[0] = 900.0
    starts(live)
    assert live._page == b"<p>sdpa ring True half way</p>"
    assert live._state["said"] == "half way"
    # the early rendering delays the next one
    assert live._due - time.monotonic() > 499
    version = live._state["version"]
    starts(live)
    assert live._state["version"] == version  # nothing is new
    live._server.server_close()


def test_the_expected_time_of_a_trial_follows_from_earlier_ones() -> None:
    one, two = (make.trial("sdpa", n, repeats=3) for n in (4096, 65536))
    watcher = SweepProgress(Console(file=io.StringIO()), [one, two], 2)
    step = Step(two, "measure")
    assert watcher.expected(step) == 0
    record = make.record(one).model_copy(update={"wall_s": 2.0})
    watcher.ends(Step(one, "measure"), record, from_store=True)
    assert watcher.expected(Step(one.replace(round=1), "measure")) == 2.0
    expected = 2.0 * progress._weight(two) / progress._weight(one)
    assert watcher.expected(step) == pytest.approx(expected)
    assert expected > 20


def test_only_requests_for_this_address_are_answered(live: LivePage) -> None:
    """DNS rebinding: a page whose name resolves to 127.0.0.1 can read nothing."""
    port = port_of(live)
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(port, "/", host)[0].status == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
        reply, body = ask(port, "/state", host)
        assert reply.status == 403
        assert "version" not in body


def test_other_paths_and_methods_are_refused(live: LivePage) -> None:
    assert ask(port_of(live), "/../../etc/passwd")[0].status == 404
    assert ask(port_of(live), "/records.jsonl")[0].status == 404
    assert ask(port_of(live), "/", method="POST")[0].status == 501


def test_it_listens_on_the_loopback_only_and_until_its_end(live: LivePage) -> None:
    port = port_of(live)
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", port))
    live.__exit__(None, None, None)
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect((ADDRESS, port))


def test_a_viewer_gets_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LAST_VIEW_S", 1.0)
    live = LivePage(render, lambda: "done")
    live.__enter__()
    port = port_of(live)
    ask(port, "/state")
    leaving = threading.Thread(target=live.__exit__, args=(None, None, None))
    leaving.start()
    state = {"running": True}
    while state["running"]:
        time.sleep(0.02)
        state = json.loads(ask(port, "/state")[1])
    pages = [ask(port, "/")[1] for _ in range(3)]  # each of several readers
    leaving.join(20)
    assert not leaving.is_alive()
    assert {page.split(";")[0] for page in pages} == {"<p> False The run has ended"}


def interrupted(live: LivePage) -> str:
    live.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert live._state["running"] is False
    return str(live._state["said"])


def test_an_interrupted_run_ends_with_a_page_of_all_records(live: LivePage) -> None:
    ends(live, "sdpa")
    live._due = time.monotonic() + 1e9
    ends(live, "ring")
    assert interrupted(live) == "The run was interrupted; this is what was known."
    page = "<p>sdpa ring False The run was interrupted; this is what was known.</p>"
    assert live._page.decode() == page


def test_an_interrupt_does_not_wait_for_a_slow_page(live: LivePage) -> None:
    ends(live, "sdpa")
    live._render_s, live._due = 60.0, time.monotonic() + 600
    ends(live, "ring")
    ends(live, "tiled")
    assert interrupted(live) == "The run was interrupted; the page shows 1 of 3 records."
    assert live._page == b"<p>sdpa True half way</p>"


def test_its_address_is_announced_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LAST_VIEW_S", 0.1)
    statuses: list[int] = []

    def announce(url: str) -> None:
        statuses.append(ask(int(url.rstrip("/").rpartition(":")[2]), "/")[0].status)

    with LivePage(render, str, announce=announce):
        assert statuses == [200]


def test_a_closed_connection_is_not_reported(
    live: LivePage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live._page = b"x" * 50_000_000
    for _ in range(3):
        with socket.create_connection((ADDRESS, port_of(live))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(f"GET / HTTP/1.1\r\nHost: {ADDRESS}:{port_of(live)}\r\n\r\n".encode())
            client.recv(1000)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    live._page = b""
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(20)
    assert capfd.readouterr().err == ""
    # an error of the server is reported
    monkeypatch.setattr(live, "_state", {**live._state, "said": object()})
    with pytest.raises(RemoteDisconnected):
        ask(port_of(live), "/state")
    assert "Exception occurred during processing" in capfd.readouterr().err


def test_an_error_of_the_page_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(records: list[Record], running: bool, status: str) -> str:
        if records:
            raise ZeroDivisionError("of a name")
        return "empty"

    with LivePage(fails, lambda: "half way") as served:
        ends(served, "sdpa")
        assert served.answer("/")[2] == b"empty"
        status = json.loads(served.answer("/state")[2])["said"]
        assert status == "half way This page could not be updated: ZeroDivisionError: of a name"
        served._requested = -1e9


def test_a_port_in_use_is_named(live: LivePage) -> None:
    port = port_of(live)
    with pytest.raises(UserError, match=rf"--port {port} on 127\.0\.0\.1 can't be used.*in use"):
        LivePage(render, str, port)
    with pytest.raises(UserError, match="--port 70000 is out of range; use 1 to 65535"):
        LivePage(render, str, 70000)


RUN = """\
import sys
from longseq_bench.cli import live_server, run
live_server.LAST_VIEW_S = 1.5
sys.exit(run(sys.argv[1:]))
"""
CONFIG = (
    "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\ntokens: [64, 128]\n"
    "implementations: sdpa\nrounds: 1\nrepeats: 2\nbaseline: sdpa\n"
)


def test_a_port_in_use_ends_a_sweep_before_it_begins(
    tmp_path: Path, live: LivePage, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "one.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    arguments = ["sweep", str(config), "--out", str(out)]
    assert run([*arguments, "--live", "--port", str(port_of(live))]) == 2
    assert "can't be used" in capsys.readouterr().err
    assert not out.exists()
    assert run([*arguments, "--port", "8000"]) == 2
    assert "--port needs --live" in capsys.readouterr().err
    for more in ([], ["--port", "80"]):
        assert run([*arguments, "--dry-run", "--live", *more]) == 2
        message = "--live can't be combined with --dry-run, which runs nothing; remove one"
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_is_served_while_it_runs(tmp_path: Path) -> None:
    config, out = tmp_path / "one.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    sweep = subprocess.Popen(
        [sys.executable, "-c", RUN, "sweep", config, "--out", out, "--live"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert sweep.stderr is not None
    line = next(line for line in sweep.stderr if line.startswith("live: "))
    port = int(re.findall(r":(\d+)/", line)[0])
    state = {"running": True}
    while state["running"]:
        time.sleep(0.1)
        state = json.loads(ask(port, "/state")[1])
    page = ask(port, "/")[1]
    assert sweep.wait(60) == 0, sweep.stderr.read()
    assert "2 runs in 2 processes" in page
    assert "Speed: time of sdpa" in page
    assert (out / RECORDS).read_text().count('"status":"ok"') == 2
