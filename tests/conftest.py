"""The plug-ins of the tests are installed by being on the path, as any other distribution is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longseq_bench.launchers.forked import Forked

PLUGINS = str(Path(__file__).parent / "plugins")
sys.path.insert(0, PLUGINS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PLUGINS, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Forked]:
    """The launcher for one host; its fork server lives as long as the tests."""
    with Forked() as forked:
        yield forked
