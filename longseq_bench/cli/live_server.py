"""A web page on 127.0.0.1 that shows the records of a run so far.

The page is rendered between trials, never while one is measured, and again when the run ends or is
interrupted. A request in between gets the last page; the status says how many records it lacks.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Record
from longseq_bench.runner import Watcher
from longseq_bench.search.strategy import Step

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
HTTP_PORT = 80  # clients leave this port out of the Host header
INTERVAL_FACTOR = 10  # time between renderings, as a multiple of the last rendering time
LAST_RENDER_S = 2.0
"""After an interrupt, render the last page only if rendering took less than this."""
VIEWER_S, LAST_VIEW_S = 10.0, 5.0
"""A request within VIEWER_S counts as a viewer. The last page is served for LAST_VIEW_S, because
open pages send a request every two seconds."""
_ENDED = "The run has ended; this is the result."
_INTERRUPTED = "The run was interrupted; this is what was known."

Render = Callable[[list[Record], bool, str], str]


class LivePage(Watcher):
    """Serves a page of the records so far, at `url`.

    render: returns the page; called with the records, True while the run goes on, and the status.
    An error in it does not end the run: the last page stays, and its status names the error.
    status: returns the progress of the run.  port: 0 for any free port.
    expected: returns the expected time of a trial (s). The page is rendered early before a long
    trial, so that it has all records meanwhile.  announce: called with the address of the page.
    Raises UserError if the port can't be used.
    """

    def __init__(
        self,
        render: Render,
        status: Callable[[], str],
        port: int = 0,
        expected: Callable[[Step], float] = lambda step: 0.0,
        announce: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._render, self._status = render, status
        self._expected, self._announce = expected, announce
        self._records: list[Record] = []
        self._shown = 0
        self._state: dict[str, Any] = {"version": 0}
        self._page, self._requested = b"", -math.inf
        self._due = -math.inf
        self._server = _listen(port, self.answer)
        self._update_page(running=True, status="starting")
        # ignore the time of the first rendering, which also imports modules
        self._render_s, self._due = 0.0, -math.inf

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self._server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._announce(self.url)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._update_page(running=False, status=_ENDED)
            elif self._render_s <= LAST_RENDER_S:
                self._update_page(running=False, status=_INTERRUPTED)
            else:
                missing = self._describe_missing()
                status = f"The run was interrupted; {missing}." if missing else _INTERRUPTED
                self._state = {**self._state, "running": False, "said": status}
            if time.monotonic() - self._requested < VIEWER_S:
                time.sleep(LAST_VIEW_S)
        finally:
            self._server.shutdown()
            self._server.server_close()

    def starts(self, step: Step) -> None:
        """Render the page before a trial during which it would be due."""
        if self._shown < len(self._records):
            self._update(self._expected(step))

    def ends(self, step: Step, record: Record, from_store: bool) -> None:
        """Add a record, and render the page if it is due."""
        self._records.append(record)
        self._update()

    def _update(self, lead_s: float = 0.0) -> None:
        """Render the page if it is due within `lead_s`, else update its status."""
        if time.monotonic() + lead_s > self._due:
            self._update_page(running=True, status=self._status())
        else:
            status = f"{self._status()}; {self._describe_missing()}"
            self._state = {**self._state, "said": status}

    def _describe_missing(self) -> str:
        shown, total = self._shown, len(self._records)
        return f"the page shows {shown:,} of {total:,} records" if shown < total else ""

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return the response to a request of a path: status, content type, body."""
        if path == "/state":
            self._requested = time.monotonic()
            return HTTPStatus.OK, "application/json", json.dumps(self._state).encode()
        if path == "/":
            self._requested = time.monotonic()
            return HTTPStatus.OK, "text/html; charset=utf-8", self._page
        return HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /state"

    def _update_page(self, running: bool, status: str) -> None:
        start, version = time.monotonic(), self._state["version"] + 1
        try:
            # the page before its state: a client that sees a version can then load it
            self._page = self._render(self._records, running, status).encode()
            self._shown = len(self._records)
        except Exception as error:
            status += f" This page could not be updated: {type(error).__name__}: {error}"
        self._state = {"version": version, "running": running, "said": status}
        now = time.monotonic()
        self._render_s = now - start
        # a page rendered early delays the next one, also if the trial was short
        self._due = max(now, self._due) + INTERVAL_FACTOR * self._render_s


def _listen(
    port: int, answer: Callable[[str], tuple[HTTPStatus, str, bytes]]
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 20.0

        def do_GET(self) -> None:
            # DNS rebinding: refuse pages of other hosts whose name resolves to this address
            host = self.headers.get("Host", "")
            port = self.connection.getsockname()[1]
            allowed_hosts = [f"{name}:{port}" for name in NAMES] + list(NAMES) * (port == HTTP_PORT)
            status, kind, body = (
                answer(self.path.split("?")[0])
                if host in allowed_hosts
                else (HTTPStatus.FORBIDDEN, "text/plain", b"not the name of this page")
            )
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: stderr is for progress."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # reuse the port of a killed run at once; a port in use is still refused
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that close the connection or stop reading."""
            if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
                super().handle_error(request, client_address)

    try:
        return Server((ADDRESS, port), Handler)
    except OverflowError:
        raise UserError(f"--port {port} is out of range; use 1 to 65535") from None
    except OSError as error:
        raise UserError(
            f"--port {port} on {ADDRESS} can't be used ({error.strerror}); choose another, or "
            "remove --port to use a free one"
        ) from None


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
