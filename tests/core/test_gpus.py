"""The visible GPUs by NVML."""

import os
from pathlib import Path

import pytest

from longseq_bench.core import gpus
from longseq_bench.core.gpus import Clocks, list_gpus, load_cudnn, read_visible_gpus
from tests.fake_nvml import FakeGpu, install

GIB = 2**30
SLICES = [
    FakeGpu("H100 MIG 1g.10gb", "MIG-aa", 9 * GIB, 10 * GIB),
    FakeGpu("H100 MIG 2g.20gb", "MIG-bb", 18 * GIB, 20 * GIB),
]


@pytest.fixture(autouse=True)
def _three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        FakeGpu("A100", "GPU-11", 70 * GIB, 79 * GIB),
        FakeGpu("H100", "GPU-22", 79 * GIB, 79 * GIB),
        FakeGpu("H100", "GPU-23", 0, 79 * GIB, slices=SLICES),
    )


def uuids(visible: str | None) -> tuple[list[str], str | None]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    report = read_visible_gpus(environ)
    return [gpu.uuid for gpu in report.visible], report.reason


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-11", "GPU-22", "MIG-aa"]),
        ("1,0", ["GPU-22", "GPU-11"]),
        ("GPU-22, GPU-11", ["GPU-22", "GPU-11"]),
        ("0,9,1", ["GPU-11"]),
        ("0,-1,1", ["GPU-11"]),
        ("2", ["MIG-aa"]),
        ("MIG-bb", ["MIG-bb"]),
    ],
)
def test_cuda_visible_devices_names_gpus_by_index_and_uuid(
    visible: str | None, found: list[str]
) -> None:
    assert uuids(visible) == (found, None)


@pytest.mark.parametrize("visible", ["", "-1", "7", "GPU-9"])
def test_a_name_that_shows_no_gpu_is_the_reason(visible: str) -> None:
    assert uuids(visible) == ([], f"CUDA_VISIBLE_DEVICES={visible} shows no GPU of 3")


@pytest.mark.parametrize(("visible", "is_loaded"), [("0", True), ("", False)])
def test_cudnn_is_loaded_where_a_gpu_is_visible(
    visible: str, is_loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its first call would load, without a call: the loading process is forked later."""
    parts = ["engines_precompiled", "engines_runtime_compiled", "graph", "heuristic"]
    for part in (*parts, "adv", "cnn"):
        (tmp_path / f"libcudnn_{part}.so.9").touch()
    maps = tmp_path / "maps"  # as Linux lists the files of this process
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 42    {tmp_path}/libcudnn.so.9\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    loaded: list[str] = []
    monkeypatch.setattr(gpus.ctypes, "CDLL", loaded.append)
    names = [f"libcudnn_{part}.so.9" for part in parts] if is_loaded else []
    load_cudnn(maps)
    assert [Path(path).name for path in loaded] == names
    loaded.clear()
    maps.write_text("7f00-7f01 r-xp 00000000 fe:00 42    /usr/lib/libc.so.6\n")
    load_cudnn(maps)
    assert loaded == []


def test_a_gpu_and_a_slice_have_their_memory() -> None:
    report = read_visible_gpus({"CUDA_VISIBLE_DEVICES": "1,MIG-bb"})
    assert report.driver == "580.1"
    assert [str(gpu) for gpu in report.visible] == [
        "GPU 1: H100, 79 GiB", "GPU 2: H100 MIG 2g.20gb, 20 GiB",
    ]  # fmt: skip
    assert [gpu.free for gpu in report.visible] == [79 * GIB, 18 * GIB]


def test_memory_of_other_processes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {os.getpid(): 5 * GIB}
    total, others = 79 * GIB, {4242: 30 * GIB, 4243: None}
    install(
        monkeypatch,
        FakeGpu("A", "GPU-1", 40 * GIB, total, processes=others | own),
        FakeGpu("A", "GPU-2", total - 5 * GIB, total, processes=own),
        FakeGpu("A", "GPU-3", 35 * GIB, total, processes=own),  # as in another container
    )
    assert [gpu.in_use_reason() for gpu in read_visible_gpus({}).visible] == [
        "GPU 0 is in use: process 4242 holds 30 GiB, process 4243 holds an unknown part",
        None,
        "GPU 2 is in use: processes that can't be seen from here hold 39 GiB",
    ]


@pytest.mark.parametrize(
    ("reasons", "limits", "slowdown"),
    [
        (None, (), ""),
        (0x101, (), ""),  # idle, and a clock that the user has set
        (0x04, ("power limit",), ""),
        (0x24, ("heat", "power limit"), "heat"),
        (0x48, ("heat", "hardware"), "heat"),
        (0x80, ("power brake",), "power brake"),
        (0x08, ("hardware",), "hardware"),
    ],
)
def test_what_lowers_the_clock(
    monkeypatch: pytest.MonkeyPatch, reasons: int | None, limits: tuple[str, ...], slowdown: str
) -> None:
    """Of a slice, that of its GPU."""
    whole = FakeGpu("H100", "GPU-1", slices=SLICES, reasons=reasons, power_limit_mw=None)
    install(monkeypatch, whole)
    found = list_gpus()["MIG-bb"].read_clocks()
    assert found == Clocks(345, 1980, 61, 0, limits)
    assert found.slowdown == slowdown
    whole.sm_clock_mhz = None
    assert list_gpus()["MIG-bb"].read_clocks() is None
