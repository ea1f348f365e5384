"""Fixture of launcher tests: a trial leaves nothing behind."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from longseq_bench.launchers.local import LocalLauncher


def descendants() -> set[int]:
    """Return the descendants of this process, without its resource tracker."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile, or not yet reaped
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


@pytest.fixture
def nothing_left(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Check that the test leaves no process, file, port or file descriptor."""
    launcher.catalogue()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before, descriptors = descendants(), psutil.Process().num_fds()
    yield
    assert descendants() <= before
    assert psutil.Process().num_fds() <= descriptors
    assert list(tmp_path.iterdir()) == []
