"""The plug-ins of the tests are installed by being on the path, as any other distribution is."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longseq_bench.launchers.local import LocalLauncher
from tests.ranks import Ranks

# under a shell that ignores it for what it runs beside itself, no test of it could pass
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# two workers on two cores: a second thread in each would wait for the other's
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

PLUGINS = str(Path(__file__).parent / "plugins")
sys.path.insert(0, PLUGINS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PLUGINS, os.environ.get("PYTHONPATH")]))


SHARED = {"reports": "html", "comparison": "html"}
"""Folders whose tests share a worker: they share the scripts of a page."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of one file on one worker: they share fixtures, ports and signals."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            folder = item.path.parent.name
            group = SHARED.get(folder, f"{folder}/{item.path.stem}")
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def launcher() -> Iterator[LocalLauncher]:
    """The launcher for one host; its fork server lives as long as the tests."""
    with LocalLauncher() as forked:
        yield forked


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Fault 17: small tensors on two threads wait for a busy machine, a hundred times over."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Worlds of processes to run functions on several ranks; see tests/ranks.py."""
    worlds = Ranks()
    yield worlds
    worlds.close()
