"""Whether the folder for temporary files can hold unnamed files, which a kill can't leave."""

import os
import tempfile

import pytest


def _are_possible() -> bool:
    try:
        os.close(os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR, 0o600))
    except (AttributeError, OSError):
        return False
    return True


need_unnamed_files = pytest.mark.skipif(
    not _are_possible(), reason="the file system of the temporary folder has no O_TMPFILE"
)
