"""The plug-ins of the tests are installed by being on the path, as any other distribution is."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.config import models
from longseq_bench.launchers import local
from longseq_bench.launchers.local import LocalLauncher
from tests.ranks import Ranks

# under a shell or nohup that ignores them for what runs in the background, no test could pass
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Two workers on two cores: a second thread in each would wait for the other's. Each would rewrite
# the asserts of all tests in every run. A run of tests/mutations has no workers: its files change.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.dont_write_bytecode = False
# threads of trials that wait for each other would keep the cores from the other worker
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

local.PRELOAD.append("tests.short_ceiling")

# the tests that need a GPU may run where only pytest is installed (benchmarks/gpu)
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # a machine that is busy with other work is not a fault of the code
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# FlexAttention: torch would compile and load a test library first, for 7 s
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# else each of some hundred processes of the tests would compile the package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

PLUGINS = str(Path(__file__).parent / "plugins")
sys.path.insert(0, PLUGINS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PLUGINS, os.environ.get("PYTHONPATH")]))


SHARED = {"reports": "html", "comparison": "html"} | dict.fromkeys(
    ["kernels/test_flex_blocks", "attention/test_contract"], "compiled"
)
"""Folders and files whose tests share a worker: they share scripts of a page, or compiled code."""
LONG = (
    "compiled html launchers/test_engine attention/test_masks cli/test_terminal_report "
    "kernels/test_triton_blocks api/test_places attention/test_ranks cli/test_plan cli/test_launch "
    "cli/test_cli worker/test_dry_run tests/test_docs "
    "external/test_on_cpu worker/test_ranks cli/test_survival "
    "launchers/test_ranks worker/test_trial worker/test_faults_short worker/test_check "
    "cli/test_action tests/test_testing api/test_api"
)
"""Groups of 18 s and more. They start first, so that the workers end together."""


def group_of(nodeid: str) -> str:
    """The group of a test: tests of one file share fixtures, ports and signals."""
    path = Path(nodeid.partition("::")[0])
    own = f"{path.parent.name}/{path.stem}"
    return SHARED.get(own) or SHARED.get(path.parent.name, own)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Half of the tests wait for processes: ranks that connect, interpreters that import torch.

    With `-m cuda` one after the other: the tests would disturb each other's memory.
    """
    if config.getoption("markexpr") == "cuda":
        return 0
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a group on one worker. (xdist's own groups need pytest before 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {group: i for i, group in enumerate(LONG.split())}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))
    need_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if need_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in need_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Take what is imported out of garbage collection: each would search it for up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_classes_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's file is read without transformers, whose import takes seconds in a child."""
    monkeypatch.setattr(models, "find_spec", lambda _: None)


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
