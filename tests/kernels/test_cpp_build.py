"""The compiled library: its place, when it is built again, and the reason if it cannot be built."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from longseq_bench.core.errors import UnsupportedError
from longseq_bench.kernels import cpp_build, native
from longseq_bench.kernels.sparse_selection import choose

SOURCE = 'extern "C" int answer() { return 42; }\n'
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in cpp_build.COMPILERS), reason="no C++ compiler here"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small source file; the cache is a separate folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpp_build.library.cache_clear()
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def load_again(source: Path) -> int:
    cpp_build.library.cache_clear()
    return int(cpp_build.library(source).answer())


def cached_files(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "longseq").glob("*"))


@needs_compiler
def test_it_is_compiled_once_and_again_when_a_source_or_the_machine_changes(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header counts, and different machines may share a home folder."""
    header = source.with_name("number.h")
    header.write_text("#define NUMBER 42\n")
    source.write_text('#include "number.h"\n' + SOURCE.replace("42", "NUMBER"))
    assert cpp_build.library(source).answer() == 42
    (first,) = cached_files(source)
    mtime = first.stat().st_mtime_ns
    assert load_again(source) == 42
    assert [p.stat().st_mtime_ns for p in cached_files(source)] == [mtime]
    header.write_text("#define NUMBER 43\n")
    assert load_again(source) == 43
    monkeypatch.setattr(cpp_build, "_processor", lambda: "another")
    load_again(source)
    assert len(cached_files(source)) == 3


@needs_compiler
def test_the_reason_has_the_message_of_the_compiler(source: Path) -> None:
    source.write_text("int answer() { return nonsense; }\n")
    with pytest.raises(UnsupportedError, match=r"can't compile small\.cpp: .*nonsense"):
        cpp_build.library(source)
    assert cached_files(source) == []


def test_without_a_compiler_that_of_pip_is_used_or_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(cpp_build.importlib.util, "find_spec", lambda name: object())
    assert cpp_build._compiler()[1:5] == ("-P", "-m", "ziglang", "cc")
    monkeypatch.setattr(cpp_build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"no g\+\+ or clang.*longseq-bench\[compiler\]"):
        cpp_build.library(source)


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is below a file here; root may write anywhere."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert stat.S_IMODE(cpp_build.cache_folder().stat().st_mode) == 0o700
    (tmp_path / "longseq-12345").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cpp_build.cache_folder()


@needs_compiler
def test_a_damaged_library_is_compiled_again(source: Path) -> None:
    load_again(source)
    (file,) = cached_files(source)
    file.unlink()  # so that the loaded library does not change
    file.write_bytes(b"")
    assert load_again(source) == 42
    assert cached_files(source) == [file]


VERSION = "#!/bin/sh\n[ $1 = --version ] && exit 0\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("not a program", "can't be compiled here: "),
        (VERSION + 'mktemp "$TMPDIR/ccXXXX.s" >/dev/null; kill -9 $$\n', "was killed, perhaps for"),
    ],
    ids=["can't run", "killed"],
)
def test_a_failing_compiler_is_the_reason_and_leaves_no_file(
    source: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    """There is no traceback, no slower build and no library under another name."""
    real, temporary = source.parent / "g++", source.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    real.write_text(program)
    real.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(real))
    with pytest.raises(UnsupportedError, match=reason):
        cpp_build.library(source)
    assert (list(temporary.iterdir()), cached_files(source)) == ([], [])


# ---- which kernel --------------------------------------------------------------------------------


def test_auto_is_the_fastest_available_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 16: facts name the kernel, and the reason why a faster one was not used."""
    monkeypatch.setattr(native, "unavailable_reason", lambda dtype: None)
    assert choose("auto", "cpu", "float32", 64, 128)[0] == "native"
    assert choose("auto", "cpu", "bfloat16", 64)[0] == "native"
    monkeypatch.setattr(native, "unavailable_reason", lambda dtype: "there is no compiler")
    facts = {"kernel": "torch (spans)", "not_native": "there is no compiler"}
    assert choose("auto", "cpu", "float32", 64, 128) == ("torch", facts)
    with pytest.raises(UnsupportedError, match="kernel=native: there is no compiler"):
        choose("native", "cpu", "float32", 64)


def test_auto_uses_triton_where_it_supports_blocks_and_heads() -> None:
    """Not for other block sizes or head_dims, nor where there is no block layout."""
    pytest.importorskip("triton")
    assert choose("auto", "cuda", "bfloat16", 64, 128)[0] == "triton"
    for block, head_dim, reason in (
        (100, 64, "a block of 16, 32, 64, 128 or 256 tokens, not 100"),
        (128, 40, "a head_dim of 16 to 256 in steps of 16, not 40"),
        (None, 64, "it needs a block layout"),
    ):
        name, facts = choose("auto", "cuda", "bfloat16", head_dim, block)
        assert (name, facts["kernel"]) == ("torch", "torch (spans)")
        assert reason in facts["not_triton"]


def test_flex_names_what_is_missing_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"kernel=flex: .* there is no g\+\+ or clang"):
        choose("flex", "cpu", "float32", 64, 128)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert choose("flex", "cpu", "float32", 64, 128)[0] == "flex"
    with pytest.raises(UnsupportedError, match="kernel=flex: FlexAttention has no backward"):
        choose("flex", "cpu", "float32", 64, 128, train=True)
    # with a mask the gathered kernel would run under flex's name
    with pytest.raises(UnsupportedError, match="kernel=flex: it needs a block layout"):
        choose("flex", "cpu", "float32", 64, None)
