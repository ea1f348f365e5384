from importlib.metadata import PackageNotFoundError

import pytest

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.kernels.exact import _packages


@pytest.fixture
def oldest_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each library be installed in its oldest supported version."""

    def version(name: str) -> str:
        for known in IMPLEMENTATIONS.names():
            if IMPLEMENTATIONS.unavailable_reason(known) is None:
                library = getattr(IMPLEMENTATIONS.get(known), "library", None)
                if library is not None and library.distribution == name:
                    return str(library.versions[0])
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_packages, "version", version)
