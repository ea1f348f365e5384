"""What processes print: read whole and in order, and nothing of it left behind."""

import errno
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from longseq_bench.core.errors import LauncherError
from longseq_bench.launchers import fork_server
from longseq_bench.launchers.exit_status import OutputFile
from longseq_bench.launchers.local import LocalLauncher


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_full_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=full))
    with pytest.raises(
        LauncherError, match=rf"kept in {folder} \(TMPDIR\): No space left on device"
    ):
        LocalLauncher().catalogue()


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
    monkeypatch.setattr(fork_server, "start", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        launcher._start([], "catalogue", "")
    assert list(folder.iterdir()) == []
