"""The folder for temporary files: whose it is, and when it is deleted."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from longseq_bench.core import files
from longseq_bench.core.errors import LauncherError
from longseq_bench.core.files import scratch_folder, user_folder


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's folder below a TMPDIR of its own, as at the start of a process."""
    monkeypatch.setattr(files, "_own", {})
    # the test's folder may be too deep for a socket
    monkeypatch.setattr(files, "SOCKET_PATH_BYTES", 4096)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return user_folder(str(tmp_path))


def test_only_what_dead_processes_left_is_deleted(user: Path) -> None:
    for name in ("run-dead/listener", "run-alive/listener", "attention.so"):
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).touch()
    user.chmod(0o700)
    alive = os.open(user / "run-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    own = scratch_folder()
    os.close(alive)
    assert sorted(user.iterdir()) == sorted([user / "attention.so", user / "run-alive", own])
    assert scratch_folder() == own


def test_without_a_folder_the_remedy_is_named(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(files, "_SHORT_FOLDERS", ())
    with pytest.raises(LauncherError, match=r"No such file .*; set TMPDIR to a folder that can"):
        scratch_folder()
    monkeypatch.setattr(files, "SOCKET_PATH_BYTES", 50)
    with pytest.raises(LauncherError, match=r"is too long for a socket .*; set TMPDIR"):
        scratch_folder()


def test_a_folder_of_another_user_is_refused(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that user could put files into it."""
    user.mkdir(mode=0o777)
    user.chmod(0o777)
    monkeypatch.setattr(files, "_SHORT_FOLDERS", ())
    with pytest.raises(LauncherError, match="belongs to another user"):
        scratch_folder()
