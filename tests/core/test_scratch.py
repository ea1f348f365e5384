"""The folder for temporary files: where it is, and when it is deleted."""

import tempfile
from pathlib import Path

import pytest

from longseq_bench.core import files
from longseq_bench.core.errors import LauncherError
from longseq_bench.core.files import private_folder, scratch_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of its own, as at the start of a process."""
    monkeypatch.setattr(files, "_own", {})
    # the test's folder may be too deep for a socket
    monkeypatch.setattr(files, "SOCKET_PATH_BYTES", 4096)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_process_has_one_folder_until_it_is_gone(folder: Path) -> None:
    own = scratch_folder()
    assert own.parent == folder
    assert scratch_folder() == own
    own.rmdir()
    assert scratch_folder() != own


def test_without_a_folder_the_remedy_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    monkeypatch.setattr(files, "_SHORT_FOLDERS", ())
    with pytest.raises(LauncherError, match=r"No such file .*; set TMPDIR to a folder that can"):
        scratch_folder()
    monkeypatch.setattr(files, "SOCKET_PATH_BYTES", 50)
    with pytest.raises(LauncherError, match=r"is too long for a socket .*; set TMPDIR"):
        scratch_folder()


def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    """Else that user could put compiled code into it."""
    private = private_folder()
    private.chmod(0o777)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder()
