"""Which versions of other libraries are used, and the sentence that a user reads otherwise."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.attention.external._library import External, Library
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels.exact import _packages

EXTERNAL = [
    name
    for name in IMPLEMENTATIONS.names()
    if IMPLEMENTATIONS.unavailable_reason(name) is None
    and issubclass(IMPLEMENTATIONS.get(name), External)
]
LIBRARY = Library(
    "some-attention", "some_attention", "pip install some-attention", versions=("0.9.2", "2")
)


def install(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Let every library be installed in this version; None: none is."""

    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(_packages, "version", version)


def test_versions_outside_the_supported_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("0.9.2", "0.10", "1.99.0+cu128", "1.0rc3", "1.5.dev4"):
        install(monkeypatch, found)
        assert LIBRARY.unavailable_reason("cuda") is None
    for found in ("0.9.1", "0.8.99+cu128", "2", "10.0"):
        install(monkeypatch, found)
        assert LIBRARY.unavailable_reason("cuda") == (
            f"some-attention {found} is not supported; versions from 0.9.2 to below 2 are: "
            "pip install some-attention"
        )


def test_a_device_that_a_library_does_not_run_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.0")
    assert LIBRARY.unavailable_reason("cpu") == "some-attention needs cuda, not cpu"


@pytest.mark.parametrize("name", EXTERNAL)
def test_a_missing_library_is_named_with_one_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch, None)
    kind = IMPLEMENTATIONS.get(name)
    assert issubclass(kind, External)
    for device in ("cpu", "cuda"):
        reason = kind.library.unavailable_reason(device)
        assert reason is not None
        assert reason.startswith(f"the package {kind.library.distribution} is not installed: pip ")


def test_no_library_is_imported_until_it_is_used() -> None:
    """`longseq list` asks each for its reason; to import them all would take a minute."""
    code = """
import sys
from longseq_bench.attention.base import IMPLEMENTATIONS as known
libraries = []
for name in known.names():
    if known.unavailable_reason(name):
        continue  # a plug-in of a test that can't be imported
    kind = known.get(name)
    kind.unavailable_reason("cpu")
    libraries += [kind.library.module.partition(".")[0]] if hasattr(kind, "library") else []
print(len(libraries), {n for n in libraries if n in sys.modules} - {"torch"})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(len(EXTERNAL)), "set()"]


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.0")
    monkeypatch.setitem(sys.modules, "some_attention", None)
    with pytest.raises(UnsupportedError, match="some-attention is installed but can't be imported"):
        LIBRARY.load()
