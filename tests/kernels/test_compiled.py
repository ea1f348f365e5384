"""The compiled library: where it is kept, when it is made again, and what is said without it."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from pathlib import Path

import pytest

from longseq_bench.errors import UnsupportedError
from longseq_bench.kernels import compiled, native, sparse

SOURCE = 'extern "C" int answer() { return 42; }\n'
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in compiled.COMPILERS), reason="no C++ compiler here"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.library.cache_clear()
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def again(source: Path) -> ctypes.CDLL:
    compiled.library.cache_clear()
    return compiled.library(source)


def kept(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "longseq").glob("*"))


@needs_compiler
def test_it_is_compiled_once_and_anew_when_the_source_changes(source: Path) -> None:
    assert compiled.library(source).answer() == 42
    (first,) = kept(source)
    made = first.stat().st_mtime_ns
    assert again(source).answer() == 42
    assert [p.stat().st_mtime_ns for p in kept(source)] == [made]
    source.write_text(SOURCE.replace("42", "43"))
    assert again(source).answer() == 43
    assert len(kept(source)) == 2


@needs_compiler
def test_another_processor_or_compiler_gets_its_own(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be shared by unlike machines."""
    again(source)
    monkeypatch.setattr(compiled, "_processor", lambda: "another")
    again(source)
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-DOTHER"))
    again(source)
    assert len(kept(source)) == 3


@needs_compiler
def test_what_the_compiler_says_is_the_reason(source: Path) -> None:
    source.write_text("int answer() { return nonsense; }\n")
    with pytest.raises(UnsupportedError, match=r"can't compile small\.cpp: .*nonsense"):
        compiled.library(source)
    assert kept(source) == []


def test_without_a_compiler_the_way_to_one_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"no g\+\+ or clang.*longseq-bench\[compiler\]"):
        compiled.library(source)


def test_a_compiler_of_pip_is_taken_where_there_is_no_other(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: object())
    assert compiled._compiler()[1:4] == ("-m", "ziglang", "cc")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_cache_that_cannot_be_written_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled.cache_folder()
    assert tmp_path not in folder.parents


def test_a_cache_below_a_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = compiled.cache_folder()
    assert folder.is_dir()
    assert tmp_path not in folder.parents


# ---- which kernel --------------------------------------------------------------------------------


def test_auto_is_the_fastest_that_is_here_and_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault 16: a fall-back that hides which algorithm ran."""
    monkeypatch.setattr(native, "why_not", lambda: None)
    assert sparse.choose("auto", "cpu", "float32") == "native"
    assert sparse.choose_spans("auto", "cpu", "bfloat16") == "native"
    monkeypatch.setattr(native, "why_not", lambda: "there is no compiler")
    assert sparse.choose("auto", "cpu", "float32") == "torch"
    assert sparse.choose_spans("auto", "cpu", "float32") == "torch"
    assert sparse.said("torch", "cpu", "float32", "auto") == {
        "kernel": "torch",
        "not_native": "there is no compiler",
    }
    with pytest.raises(UnsupportedError, match="kernel=native: there is no compiler"):
        sparse.choose("native", "cpu", "float32")


def test_a_kernel_of_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="kernel=triton: Triton kernels are for CUDA"):
        sparse.choose("triton", "cpu", "float32")
    with pytest.raises(UnsupportedError, match="kernel=native: the compiled kernel is for CPUs"):
        sparse.choose("native", "cuda", "float32")
