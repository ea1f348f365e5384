"""`longseq launch` as a person starts it: a process for each node, and all that comes of them."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from longseq_bench.launchers.launch_key import KEY_VARIABLE
from tests.cli.sweep_process import MARK, processes_of

PATIENCE_S, SOON_S = 60, 15

RUN = "import sys; {0}\nfrom longseq_bench.cli import run; sys.exit(run(sys.argv[1:]))"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Nodes:
    """Two nodes of one launch in a folder, on this host or on hosts of their own.

    on: the command that runs a command on host i. before: code that a node runs first.
    key: the key of the launch, in the environment.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str = "",
        on: Callable[[int, Sequence[str]], Sequence[str]] = lambda i, command: command,
        before: Sequence[str] = ("", ""),
        timeout: float = 20,
        key: str = "",
    ) -> None:
        self._folder, self._on, self._before = folder, on, before
        endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self._flags = ["--rdzv-endpoint", endpoint, "--rdzv-timeout", str(timeout)]
        self._mark = uuid.uuid4().hex
        # the key of a launch on loopback is in the user's settings
        self._environ = {MARK: self._mark, "XDG_CONFIG_HOME": str(folder / "settings")}
        self._environ |= {KEY_VARIABLE: key} if key else {}
        # not below the test's folder: the path of a Unix socket may have 107 characters
        self.files = Path(tempfile.mkdtemp(prefix="longseq-"))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, nodes: Sequence[int] = (0, 1)) -> None:
        """Start `longseq launch ... -- command` on these nodes."""
        for i in nodes:
            launch = ["launch", "--nnodes", "2", "--node-rank", str(i), *self._flags, "--"]
            code = RUN.format(self._before[i])
            with (self._folder / f"out{i}").open("wb") as out, self._err_file(i).open("wb") as err:
                self.processes.append(
                    subprocess.Popen(
                        self._on(i, [sys.executable, "-c", code, *launch, *command]),
                        env={**os.environ, **self._environ, "TMPDIR": str(self.files)},
                        cwd=self._folder, stdout=out, stderr=err, start_new_session=True,
                    )
                )  # fmt: skip

    def wait(self) -> list[int]:
        """Their exit codes."""
        end = time.monotonic() + PATIENCE_S
        return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]

    def wait_until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < end, f"{self.err(0)}\n{self.err(1)}"
            time.sleep(0.02)

    def out(self, node: int) -> str:
        """What a node has written on stdout."""
        return (self._folder / f"out{node}").read_text()

    def err(self, node: int) -> str:
        """And on stderr."""
        return self._err_file(node).read_text()

    def _err_file(self, node: int) -> Path:
        return self._folder / f"err{node}"

    def left(self) -> list[str]:
        """Processes that are there some seconds later, and files."""
        end = time.monotonic() + SOON_S
        while self._running() and time.monotonic() < end:
            time.sleep(0.05)
        files = [str(path) for path in self.files.iterdir()]
        return [" ".join(process.cmdline()) for process in self._running()] + files

    def close(self) -> None:
        for process in self._running():
            process.kill()
        for started in self.processes:
            started.wait()
        shutil.rmtree(self.files, ignore_errors=True)

    def _running(self) -> list[psutil.Process]:
        return processes_of(self._mark)
