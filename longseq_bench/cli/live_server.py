"""A page on 127.0.0.1 that shows a run as its records land, for as long as the run goes on.

A page is made between trials, never while one is measured, and again at the end, however that
comes; a request in between is answered with what was made last, which says how many records it
lacks.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.runner import Watcher
from longseq_bench.search.strategy import Step

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
HTTP_PORT = 80
"""Clients leave it out."""
SHARE = 10
"""A page is made anew once so many times as long has passed as making the last one took, or will
have when the trial that starts has ended."""
LAST_DRAW_S = 2.0
"""Whoever breaks a run off waits for no page that took longer."""
LOOKING_S, LAST_LOOK_S = 10.0, 5.0
"""Who asked within so many seconds looks; and how long the last page then stays, of which pages ask
every two seconds."""
_ENDED = "The run has ended; this is what it came to."
_BROKEN_OFF = "The run was broken off; this is what was known."

Draw = Callable[[list[Record], bool, str], str]


class Live(Watcher):
    """Serves a page of the records so far, at `url`.

    draw: a page of records, of whether the run goes on, and of how far it is. What it raises ends
    no run: the last page stays, and its status line says so.  said: how far it is.
    port: 0 for any that is free.  expected: about how long a trial will take (s); before a long one
    a page is made ahead of its time, so that no record waits for its end.  tell: given the address
    once it answers. Raises UserError where the port can't be had.
    """

    def __init__(
        self,
        draw: Draw,
        said: Callable[[], str],
        port: int = 0,
        expected: Callable[[Step], float] = lambda step: 0.0,
        tell: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._draw, self._said, self._expected, self._tell = draw, said, expected, tell
        self._records: list[Record] = []
        self._shown = 0
        self._state: dict[str, Any] = {"version": 0}
        self._page, self._looked = b"", -math.inf
        self._due = -math.inf
        self._server = _listen(port, self.answer)
        self._make(running=True, said="starting")
        self._took, self._due = 0.0, -math.inf  # the first also loads what the others have

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self._server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._tell(self.url)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._make(running=False, said=_ENDED)
            elif self._took <= LAST_DRAW_S:
                self._make(running=False, said=_BROKEN_OFF)
            else:
                lacking = self._lacking()
                said = f"The run was broken off; {lacking}." if lacking else _BROKEN_OFF
                self._state = {**self._state, "running": False, "said": said}
            if time.monotonic() - self._looked < LOOKING_S:
                time.sleep(LAST_LOOK_S)
        finally:
            self._server.shutdown()
            self._server.server_close()

    def starts(self, step: Step) -> None:
        if self._shown < len(self._records):
            self._update(self._expected(step))

    def ends(self, step: Step, record: Record, found: bool) -> None:
        self._records.append(record)
        self._update()

    def _update(self, ahead: float = 0.0) -> None:
        """Make the page where it is due within so many seconds, else say what it lacks."""
        if time.monotonic() + ahead > self._due:
            self._make(running=True, said=self._said())
        else:
            self._state = {**self._state, "said": f"{self._said()}; {self._lacking()}"}

    def _lacking(self) -> str:
        held, there = self._shown, len(self._records)
        return f"the page holds {held:,} of {there:,} records" if held < there else ""

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """What a path gives: status, type, body."""
        if path == "/state":
            self._looked = time.monotonic()
            return HTTPStatus.OK, "application/json", json.dumps(self._state).encode()
        if path == "/":
            self._looked = time.monotonic()
            return HTTPStatus.OK, "text/html; charset=utf-8", self._page
        return HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /state"

    def _make(self, running: bool, said: str) -> None:
        began, version = time.monotonic(), self._state["version"] + 1
        try:
            # the page before its state: who is told of a version is given it
            self._page = self._draw(self._records, running, said).encode()
            self._shown = len(self._records)
        except Exception as error:
            said = f"{said} This page could not be made anew: {type(error).__name__}: {error}"
        self._state = {"version": version, "running": running, "said": said}
        now = time.monotonic()
        self._took = now - began
        # what was made ahead of its time is paid for, even where the trial then was a short one
        self._due = max(now, self._due) + SHARE * self._took


def _listen(
    port: int, answer: Callable[[str], tuple[HTTPStatus, str, bytes]]
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 20.0

        def do_GET(self) -> None:
            # a page elsewhere whose name was made to mean this address must not read ours
            host = self.headers.get("Host", "")
            port = self.connection.getsockname()[1]
            ours = [f"{name}:{port}" for name in NAMES] + list(NAMES) * (port == HTTP_PORT)
            status, kind, body = (
                answer(self.path.split("?")[0])
                if host in ours
                else (HTTPStatus.FORBIDDEN, "text/plain", b"not the name of this page")
            )
            self.send_response(status)
            said = {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}
            for name, value in said.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Progress is on stderr; requests are not."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # a port that a killed run had is free at once; one that is listened on is not taken
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A reader who goes away, or stops reading, is no fault of the sweep's."""
            if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
                super().handle_error(request, client_address)

    try:
        return Server((ADDRESS, port), Handler)
    except OverflowError:
        raise UserError(f"--port {port} is no port; they go from 1 to 65535") from None
    except OSError as error:
        raise UserError(
            f"--port {port} on {ADDRESS} can't be had ({error.strerror}); name another, or leave "
            "--port out for a free one"
        ) from None


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
