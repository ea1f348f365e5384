"""Findings of the doctor on described machines."""

import shutil
import sysconfig
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

from longseq_bench import doctor
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry, KernelInfo
from longseq_bench.doctor import NEWEST_TESTED_TORCH, OLDEST_TORCH, Finding, examine
from tests.fake_nvml import FakeGpu, install
from tests.make import environment

CPU = DeviceInfo(name="a CPU", dtypes=("float32",))
H200 = DeviceInfo(name="H200", free_bytes=2**36, total_bytes=2**37, count=2)
NO_CUDA = DeviceInfo(unavailable="torch is a CPU build", remedy="install a CUDA build of torch")


def catalogue(cuda: DeviceInfo = NO_CUDA, **entries: Entry) -> Catalogue:
    return Catalogue(implementations=entries, devices={"cpu": CPU, "cuda": cuda})


def findings(given: Catalogue | None = None, **fields: Any) -> dict[str, Finding]:
    return {f.name: f for f in examine(given, environment(**fields))}


def test_every_finding_has_its_own_name_and_a_remedy_where_it_is_missing() -> None:
    found = examine(catalogue(sdpa=Entry(summary="")), environment())
    assert len({f.name for f in found}) == len(found) >= 12
    assert all(f.found for f in found)
    assert all(f.remedy for f in found if f.state == "missing")
    assert not any(f.remedy for f in found if f.state == "ok")


def test_the_oldest_torch_is_the_one_that_the_package_states() -> None:
    assert f"torch>={OLDEST_TORCH}" in (requires("longseq-bench") or ())


@pytest.mark.parametrize(
    ("torch", "state"),
    [
        ("2.11.0", "ok"),
        (f"{NEWEST_TESTED_TORCH}.1+cu130", "ok"),
        ("99.0", "ok"),
        ("2.9.1", "note"),
        ("not installed", "missing"),
    ],
)
def test_torch(torch: str, state: str) -> None:
    found = findings(torch=torch, cuda="13.0", cudnn="9.15.1", triton="3.8.0")["torch"]
    assert (found.state, torch in found.found) == (state, True)
    assert found.remedy == ("" if state == "ok" else "pip install 'torch>=2.11'")
    assert ("newer than any" in found.found) == (torch == "99.0")
    assert ("CUDA 13.0, cuDNN 9.15.1, Triton 3.8.0" in found.found) == (state != "missing")


def test_hard_budgets_and_exact_peaks_need_linux_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "clear_refs"
    assert doctor._memory("Linux", path).state == "ok"
    assert path.read_text() == "5"
    found = doctor._memory("Darwin", path)
    assert (found.state, "Darwin" in found.found) == ("note", True)
    found = doctor._memory("Linux", tmp_path / "none" / "clear_refs")
    assert (found.state, "can't be written: No such file" in found.found) == ("note", True)


def test_cuda() -> None:
    assert findings(catalogue(H200))["cuda"].found == "2 x H200, 64 GiB of 128 GiB free"
    found = findings(catalogue(NO_CUDA))["cuda"]
    assert (found.state, found.found) == ("note", "torch is a CPU build")
    assert "CUDA build of torch" in found.remedy
    assert findings()["cuda"].state == "note"


def test_the_fastest_kernel_has_the_command_that_installs_it_where_it_would_run() -> None:
    missing = "the package flash-attn-4 is not installed: pip install flash-attn-4"
    for reason in (missing, "it needs compute capability 9.x or 10.x; this GPU has 8.0", None):
        kernel = KernelInfo(summary="", device="cuda", unavailable=reason)
        given = catalogue(H200).model_copy(update={"kernels": {"flash-attn-4": kernel}})
        found = findings(given).get("flash-attn-4")
        assert (found and found.remedy) == (
            "pip install flash-attn-4" if reason == missing else None
        )


def test_visible_gpus_have_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu("H100", "GPU-b", 79 * 2**30, 79 * 2**30))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    found = findings(gpus=("H100", "H100"), driver="580.1")
    assert found["visible gpus"] == Finding("visible gpus", "ok", "GPU 0: H100, 79 GiB")
    assert "gpus in use" not in found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-x")
    hidden = findings(gpus=("H100", "H100"), driver="580.1")["visible gpus"]
    assert (hidden.state, hidden.found) == ("note", "CUDA_VISIBLE_DEVICES=GPU-x shows no GPU of 1")
    assert "nvidia-smi -L" in hidden.remedy


@pytest.mark.parametrize(
    ("level", "shared"),
    [(0, "are on one board, with one power limit"), (10, "are on one PCIe switch")],
)
def test_what_two_gpus_share_is_named(
    monkeypatch: pytest.MonkeyPatch, level: int, shared: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    of_pair = {("GPU-0", "GPU-2"): level}
    gpus = (FakeGpu("H100", f"GPU-{i}") for i in range(3))
    install(
        monkeypatch, *gpus,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: of_pair.get((a.uuid, b.uuid), 40),
    )  # fmt: skip
    found = findings(gpus=("H100",) * 3, driver="580.1")["gpus side by side"]
    assert found.found == f"GPUs 0 and 2 {shared}"


def test_a_gpu_in_use_is_a_note_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, FakeGpu("H100", "GPU-b", 2**30, 2**35, processes={4242: 2**34}))
    found = findings(gpus=("H100",), driver="580.1")["gpus in use"]
    assert (found.state, found.found) == ("note", "GPU 0 is in use: process 4242 holds 16 GiB")
    assert "CUDA_VISIBLE_DEVICES" in found.remedy


def test_triton_needs_a_c_compiler_and_headers_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = {"gcc": "/usr/bin/gcc"}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", there.get)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    (tmp_path / "Python.h").write_text("")
    assert "triton on cuda" not in findings(catalogue(NO_CUDA))
    assert findings(catalogue(H200))["triton on cuda"].found == "gcc"
    there.clear()
    (tmp_path / "Python.h").unlink()
    found = findings(catalogue(H200))["triton on cuda"]
    assert found == Finding(
        "triton on cuda",
        "note",
        f"there is no gcc or clang, there is no {tmp_path}/Python.h: Triton's kernels can't start",
        "install gcc; install Python's headers (python3-dev or python3-devel)",
    )
    monkeypatch.setenv("CC", "mycc -v")
    assert "CC=mycc -v was not found" in findings(catalogue(H200))["triton on cuda"].found


CPUS, PAGES = doctor.CPUS, doctor.HUGE_PAGES


@pytest.mark.parametrize(
    ("look", "files", "state", "words"),
    [
        (doctor._governor, {}, "ok", "not visible here"),
        (doctor._governor, {f"{CPUS}/cpu1/cpufreq/scaling_governor": "performance"},
         "ok", "performance on 1 CPUs"),
        (doctor._governor, {f"{CPUS}/cpu0/cpufreq/scaling_governor": "powersave"},
         "note", "the clock follows the load with a delay"),
        (doctor._turbo, {}, "ok", "not visible here"),
        (doctor._turbo, {f"{CPUS}/intel_pstate/no_turbo": "1"}, "ok", "off"),
        (doctor._turbo, {f"{CPUS}/intel_pstate/no_turbo": "0"}, "note", "times drift upwards"),
        (doctor._turbo, {f"{CPUS}/cpufreq/boost": "1"}, "note", "cpufreq/boost"),
        (doctor._huge_pages, {}, "ok", "not visible here"),
        (doctor._huge_pages, {PAGES: "always [madvise] never"}, "ok", "madvise"),
        (doctor._huge_pages, {PAGES: "[always] madvise never"}, "note", "steps of 2 MiB"),
    ],
)  # fmt: skip
def test_a_setting_that_makes_times_vary_says_what_it_changes(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], Finding], files: dict[str, str],
    state: str, words: str, tmp_path: Path,
) -> None:  # fmt: skip
    """Nothing is guessed where nothing is visible."""
    monkeypatch.setattr(doctor, "own_cpus", lambda: (0, 1))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    found = look(tmp_path)
    assert found.state == state
    assert words in f"{found.found} {found.remedy}"
    assert bool(found.remedy) == (state == "note")


def test_implementations_that_can_run_are_counted() -> None:
    given = catalogue(
        sdpa=Entry(summary=""),
        ring=Entry(summary="", unavailable={"cpu": "No module named 'deepspeed.comm'"}),
        flex=Entry(summary="", unavailable={"cpu": "needs cuda", "cuda": "too old"}),
        flash=Entry(summary="", unavailable={"cuda": "needs sm_90"}),
    )
    found = findings(given)["implementations"]
    assert (found.state, found.found) == ("note", "2 of 4 can run on cpu")
    assert "longseq list says why" in found.remedy


def test_nothing_to_run_is_missing() -> None:
    none = Entry(summary="", unavailable={"cpu": "why"})
    assert findings(catalogue(x=none))["implementations"].state == "missing"
    assert findings()["implementations"].found == "could not be listed"
