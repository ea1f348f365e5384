"""What processes print: read whole and in order, and nothing of it left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from longseq_bench.launchers import _child_entry, fork_server
from longseq_bench.launchers.local import Forked
from longseq_bench.launchers.output_file import Output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_has_no_name(folder: Path) -> None:
    output = Output()
    assert list(folder.iterdir()) == []
    output.close()


def test_whoever_reads_moves_nobody_who_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output()
    theirs = os.dup(output._file.fileno())
    os.write(theirs, b"one ")
    with monkeypatch.context() as meanwhile:
        # the rest of it is printed while it is read
        meanwhile.setattr(Output, "written", lambda self: 2)
        assert output.printed() == "on"
    os.write(theirs, b"two ")
    assert output.printed() == "one two "
    assert output.printed(start=4) == "two "
    assert output.printed(most=2) == "o "
    assert output.written() == 8
    os.close(theirs)
    output.close()


def test_ctrl_c_while_a_child_is_started_leaves_no_file(
    launcher: Forked, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "ready", lambda: None)
    monkeypatch.setattr(fork_server, "start", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher._start([], "catalogue", "")
    assert list(folder.iterdir()) == []


def _interrupted(process: BaseProcess) -> None:
    raise KeyboardInterrupt


def test_a_child_gets_it_as_a_descriptor(launcher: Forked) -> None:
    assert launcher.catalogue()  # the server that all tests share is one that has torch loaded
    output = Output()
    child = multiprocessing.get_context("forkserver").Process(target=_prints, args=(output,))
    child.start()
    child.join()
    assert output.printed() == "out\nerr\n"
    output.close()


def _prints(output: int) -> None:
    assert _child_entry.cut_off(output) == os.getppid()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    os.write(1, b"out\n")
    os.write(2, b"err\n")
