"""The temporary folder that stays."""

import tempfile
from pathlib import Path

import pytest

from longseq_bench.kernels.cpp_build import private_folder


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that user could put compiled code into it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = private_folder()
    private.chmod(0o777)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder()
