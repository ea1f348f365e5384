"""The fork server: started in a folder that is not trusted, killed, left by a parent that dies."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from longseq_bench.core.model import ENVIRONMENT_FAILURE
from longseq_bench.launchers.local import SERVER_ENDED

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20

HOSTILE = ("psutil", "signal", "socket", "ctypes", "torch", "selectors", "longseq_bench")
"""Modules that the server or its children import, or the resource tracker does."""

SLOW_SERVER = """
import sys
from multiprocessing import forkserver
from longseq_bench.launchers import fork_server
sys.path.append(sys.argv[1])
forkserver.set_forkserver_preload(["longseq_bench.launchers._server_preload", "slow_import"])
fork_server.ready()
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose modules leave a file named ran."""
    folder = tmp_path_factory.mktemp("cloned")
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write(__name__)")
    return folder


@pytest.fixture(scope="module")
def seen(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What killed_server.py saw."""
    command = [sys.executable, str(ROOT / "tests/launchers/killed_server.py")]
    done = subprocess.run(
        command, cwd=hostile, env=environment(tmp_path_factory.mktemp("t")), timeout=PATIENCE_S,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def environment(temporary: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}


def test_nothing_of_the_current_folder_runs(seen: dict[str, Any], hostile: Path) -> None:
    ran = hostile / "ran"
    assert not ran.exists(), ran.read_text()


def test_the_death_of_the_server_is_not_blamed_on_the_trial(seen: dict[str, Any]) -> None:
    outcome = seen["outcome"]
    assert (outcome["status"], outcome["reason"]) == ("error", SERVER_ENDED)
    assert outcome["facts"] == {ENVIRONMENT_FAILURE: True}


def test_the_next_child_has_a_new_server(seen: dict[str, Any]) -> None:
    """And exit code 255 of a child is not taken for the death of its server."""
    assert seen["restarted"]
    assert (seen["code"], seen["lost"]) == (255, False)


def test_multiprocessing_makes_no_folder_of_its_own(seen: dict[str, Any]) -> None:
    """It would stay after a kill, and nobody would know whose it was."""
    assert [name for name in seen["files"] if name.startswith("pymp-")] == []


@pytest.fixture
def importing(tmp_path: Path) -> Iterator[tuple[psutil.Popen, psutil.Process]]:
    """A parent, and its server in the middle of an import."""
    reached = tmp_path / "reached"
    (tmp_path / "slow_import.py").write_text(
        f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep({PATIENCE_S})"
    )
    command = [sys.executable, "-c", SLOW_SERVER, str(tmp_path)]
    parent = psutil.Popen(command, cwd=ROOT, env=environment(tmp_path))
    while not reached.exists():
        assert parent.poll() is None
        time.sleep(0.02)
    (server,) = [p for p in parent.children() if "forkserver" in " ".join(p.cmdline())]
    yield parent, server
    for process in (parent, server):
        if process.is_running():
            process.kill()
    parent.wait()


def test_a_server_dies_with_its_parent_while_it_imports(
    importing: tuple[psutil.Popen, psutil.Process],
) -> None:
    """The imports of torch take seconds. multiprocessing looks at its pipe only after them."""
    parent, server = importing
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([server], timeout=PATIENCE_S / 4)
    assert gone == [server]
