"""A page served while a sweep runs: what it answers, to whom, and for how long."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from longseq_bench.cli import live as live_page
from longseq_bench.cli import run
from longseq_bench.cli.live import ADDRESS, Live
from longseq_bench.errors import UserError
from longseq_bench.model import Record
from longseq_bench.plan import Step
from longseq_bench.store import RECORDS
from tests import make


def draw(records: list[Record], running: bool, said: str) -> str:
    names = " ".join(record.trial.implementation for record in records)
    return f"<p>{names} {running} {said}</p>"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(live_page, "LAST_LOOK_S", 0.1)
    with Live(draw, lambda: "half way") as served:
        yield served


def port_of(live: Live) -> int:
    return int(live.url.rstrip("/").rpartition(":")[2])


def ask(
    port: int, path: str, host: str | None = None, method: str = "GET"
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection(ADDRESS, port, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply, reply.read().decode()


def ends(live: Live, name: str) -> None:
    one = make.record(make.trial(name))
    live.ends(Step(one.trial, "measure"), one, found=False)


def test_the_page_and_its_state_grow_with_the_records(live: Live) -> None:
    assert live.url.startswith(f"http://{ADDRESS}:")
    before = json.loads(ask(port_of(live), "/state")[1])
    ends(live, "sdpa")
    reply, page = ask(port_of(live), "/")
    after = json.loads(ask(port_of(live), "/state")[1])
    assert (reply.status, page) == (200, "<p>sdpa True half way</p>")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert reply.headers["Cache-Control"] == "no-store"
    assert after == {"version": before["version"] + 1, "running": True, "said": "half way"}


def test_a_page_that_takes_long_to_make_is_made_less_often(live: Live) -> None:
    ends(live, "sdpa")
    live._took = 1e9
    ends(live, "ring")
    assert ask(port_of(live), "/")[1] == "<p>sdpa True half way</p>"
    assert json.loads(ask(port_of(live), "/state")[1])["said"] == "half way"


def test_only_the_names_of_this_address_are_answered(live: Live) -> None:
    """A page of another site whose name was made to mean 127.0.0.1 reads nothing."""
    port = port_of(live)
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(port, "/", host)[0].status == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
        reply, said = ask(port, "/state", host)
        assert reply.status == 403
        assert "version" not in said


def test_nothing_else_is_there(live: Live) -> None:
    assert ask(port_of(live), "/../../etc/passwd")[0].status == 404
    assert ask(port_of(live), "/records.jsonl")[0].status == 404
    assert ask(port_of(live), "/", method="POST")[0].status == 501


def test_it_listens_on_this_address_alone_and_not_after(live: Live) -> None:
    port = port_of(live)
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", port))
    live.__exit__(None, None, None)
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect((ADDRESS, port))


def test_who_looks_is_given_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LAST_LOOK_S", 1.0)
    live = Live(draw, lambda: "done")
    live.__enter__()
    port = port_of(live)
    ask(port, "/state")
    leaving = threading.Thread(target=live.__exit__, args=(None, None, None))
    leaving.start()
    state = {"running": True}
    while state["running"]:
        state = json.loads(ask(port, "/state")[1])
    pages = [ask(port, "/")[1] for _ in range(3)]  # each of several readers
    leaving.join(20)
    assert not leaving.is_alive()
    assert {page.split(";")[0] for page in pages} == {"<p> False The run has ended"}


def test_a_run_that_is_broken_off_is_not_said_to_have_ended(live: Live) -> None:
    live.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert live._state["said"].startswith("The run was broken off")
    assert live._state["running"] is False


def test_a_page_that_cannot_be_made_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(records: list[Record], running: bool, said: str) -> str:
        if records:
            raise ZeroDivisionError("of a name")
        return "empty"

    with Live(fails, lambda: "half way") as served:
        ends(served, "sdpa")
        assert served.answer("/")[2] == b"empty"
        said = json.loads(served.answer("/state")[2])["said"]
        assert said == "half way This page could not be made anew: ZeroDivisionError: of a name"
        served._looked = -1e9


def test_a_port_in_use_is_named(live: Live) -> None:
    port = port_of(live)
    with pytest.raises(UserError, match=rf"--port {port} on 127\.0\.0\.1 can't be had.*in use"):
        Live(draw, str, port)
    with pytest.raises(UserError, match="--port 70000 is no port; they go from 1 to 65535"):
        Live(draw, str, 70000)


CONFIG = (
    "memory_budget: 64MiB\nworkload: {heads: 1, head_dim: 16}\ntokens: [64, 128]\n"
    "implementations: sdpa\nrounds: 1\nrepeats: 2\nbaseline: sdpa\n"
)


def test_a_port_in_use_ends_a_sweep_before_it_begins(
    tmp_path: Path, live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "one.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    arguments = ["sweep", str(config), "--out", str(out)]
    assert run([*arguments, "--live", "--port", str(port_of(live))]) == 2
    assert "can't be had" in capsys.readouterr().err
    assert not out.exists()
    assert run([*arguments, "--port", "8000"]) == 2
    assert "--port is that of --live, which is not given" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_is_served_while_it_runs(tmp_path: Path) -> None:
    config, out = tmp_path / "one.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    sweep = subprocess.Popen(
        [sys.executable, "-m", "longseq_bench", "sweep", config, "--out", out, "--live"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert sweep.stderr is not None
    line = next(line for line in sweep.stderr if line.startswith("live: "))
    port = int(re.findall(r":(\d+)/", line)[0])
    state = {"running": True}
    while state["running"]:
        state = json.loads(ask(port, "/state")[1])
    page = ask(port, "/")[1]
    assert sweep.wait(60) == 0, sweep.stderr.read()
    assert "2 runs in 2 processes" in page
    assert "speed of sdpa" in page or "Speed is the time of sdpa" in page
    assert (out / RECORDS).read_text().count('"status":"ok"') == 2
