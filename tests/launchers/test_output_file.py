"""What processes print: read whole and in order, and nothing of it left behind."""

import errno
import multiprocessing
import os
import signal
import tempfile
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest

from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers import _child_entry, fork_server
from longseq_bench.launchers.exit_status import OutputFile
from longseq_bench.launchers.local import LocalLauncher


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_has_no_name(folder: Path) -> None:
    output = OutputFile()
    assert list(folder.iterdir()) == []
    output.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a file system that has room and no inodes, and the quota of a user."""
    reason = os.strerror(code)

    def refuse(**options: object) -> NoReturn:
        raise OSError(code, reason)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    remedy = f"{reason}: free space or inodes in {folder}, or set TMPDIR to a folder"
    with pytest.raises(LauncherError, match=f"the output of a child .*: {remedy}"):
        LocalLauncher().catalogue()


@pytest.mark.parametrize("is_child", [False, True])
def test_a_fork_server_on_a_full_disk_is_named(
    folder: Path, is_child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that runs, and has no room for what a child needs."""

    def refuse(*arguments: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    process = multiprocessing.get_context("forkserver").Process()
    monkeypatch.setattr(fork_server, "_start" if is_child else "_ready", refuse)
    monkeypatch.setattr(fork_server, "_kill", lambda before: None)  # all tests share the server
    begin = partial(fork_server.start, process) if is_child else fork_server.ready
    with pytest.raises(LauncherError, match=f"free space or inodes in {folder}, or set TMPDIR"):
        begin()


def test_whoever_reads_moves_nobody_who_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = OutputFile()
    writer = os.dup(output._file.fileno())
    os.write(writer, b"one ")
    with monkeypatch.context() as meanwhile:
        # the rest of it is printed while it is read
        meanwhile.setattr(OutputFile, "size", lambda self: 2)
        assert output.tail() == "on"
    os.write(writer, b"two ")
    assert output.tail() == "one two "
    assert output.tail(start=4) == "two "
    assert output.tail(max_bytes=2) == "o "
    assert output.size() == 8
    os.close(writer)
    output.close()


def test_ctrl_c_while_a_child_is_started_leaves_no_file(
    launcher: LocalLauncher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "ready", lambda: None)
    monkeypatch.setattr(fork_server, "start", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher._start([], "catalogue", "")
    assert list(folder.iterdir()) == []


def _interrupted(process: BaseProcess) -> None:
    raise KeyboardInterrupt


def test_a_child_gets_it_as_a_descriptor(launcher: LocalLauncher) -> None:
    assert launcher.catalogue()  # the server that all tests share is one that has torch loaded
    output = OutputFile()
    child = multiprocessing.get_context("forkserver").Process(target=_prints, args=(output,))
    child.start()
    child.join()
    assert output.tail() == "out\nerr\n"
    output.close()


def _prints(output: int) -> None:
    assert _child_entry.detach(output) == os.getppid()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    os.write(1, b"out\n")
    os.write(2, b"err\n")
