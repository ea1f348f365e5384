"""The environment in records: read from a fake machine, with missing parts allowed."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from longseq_bench import environment
from longseq_bench.core import cpus
from longseq_bench.core.errors import UserError
from longseq_bench.core.gpus import read_visible_gpus
from longseq_bench.core.model import Environment
from longseq_bench.environment import cgroup_memory, collect, commit_of, cuda_versions, free_memory
from tests.fake_nvml import FakeGpu, install


def test_threads_that_want_a_core_are_those_of_others(tmp_path: Path) -> None:
    for text, busy in (("0.1 0.2 0.3 3/345 99\n", 2), ("9 9 9 1/345 99\n", 0), ("", 0)):
        (tmp_path / "loadavg").write_text(text)
        assert environment.busy_elsewhere(tmp_path / "loadavg") == busy


def test_collect_agrees_with_python() -> None:
    found = collect()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.torch[0].isdigit()
    assert 2**20 < found.memory_bytes <= psutil.virtual_memory().total
    assert Environment.model_validate_json(found.model_dump_json()) == found


def test_only_variables_that_change_figures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMP_", "MKL_", "MALLOC_", "PYTORCH_", "CUDA_", "TORCH_", "TRITON_")):
            monkeypatch.delenv(name)
    kept = {
        "OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "LD_PRELOAD": "",
        "TORCH_NCCL_ENABLE_TIMING": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    left_out = {"SECRET_TOKEN", "CUDA_HOME", "TRITON_CACHE_DIR", "TORCH_HOME"}
    for name, value in {**kept, **dict.fromkeys(left_out, "/x")}.items():
        monkeypatch.setenv(name, value)
    for gpus in (("H100", "H200"), ("H100", "H100"), ()):
        install(monkeypatch, *(FakeGpu(name, f"GPU-{i}") for i, name in enumerate(gpus)))
        found = collect().variables
        if len({*gpus}) < 2:  # shards on equal GPUs are compared
            assert "CUDA_VISIBLE_DEVICES" not in found
            found["CUDA_VISIBLE_DEVICES"] = "0"
        assert kept.items() <= found.items()
        assert not left_out & set(found)


def torch_built_for(monkeypatch: pytest.MonkeyPatch, folder: Path, cuda: str) -> None:
    (folder / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    origin = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(environment, "find_spec", lambda name: origin)
    installed = {"nvidia-cudnn-cu13": "9.15.1", "nvidia-nccl-cu13": "2.28.9", "triton": "3.8.0",
                 "nvidia-cudnn-cu12": "9.1.0"}  # fmt: skip
    monkeypatch.setattr(
        environment, "installed_version", lambda package: installed.get(package, "not installed")
    )


@pytest.mark.parametrize(
    ("cuda", "versions"),
    [
        ("'13.0'", {"cuda": "13.0", "cudnn": "9.15.1", "nccl": "2.28.9", "triton": "3.8.0"}),
        ("'12.8'", {"cuda": "12.8", "cudnn": "9.1.0", "triton": "3.8.0"}),
        ("None", {}),
    ],
)
def test_versions_are_those_that_belong_to_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, versions: dict[str, str]
) -> None:
    """A CPU build has none, so that fingerprints of machines without a GPU stay as they were."""
    torch_built_for(monkeypatch, tmp_path, cuda)
    assert cuda_versions() == versions
    found = collect()
    assert (found.cuda, found.nccl) == (versions.get("cuda"), versions.get("nccl"))


# ---- memory ------------------------------------------------------------------------------------


def cgroup(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def test_the_smallest_limit_of_all_parent_cgroups_applies(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/slice/job\n")
    root = tmp_path / "fs"
    cgroup(root / "slice", "1000", 700, 100)
    cgroup(root / "slice" / "job", "2000", 300, 0)
    assert cgroup_memory(root, own) == (1000, 400)
    cgroup(root / "slice", "max", 700, 100)
    assert cgroup_memory(root, own) == (2000, 1700)
    cgroup(root / "slice" / "job", "max", 300, 0)
    assert cgroup_memory(root, own) is None


def test_the_tightest_quota_of_cpus_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, root = tmp_path / "own", tmp_path / "fs"
    own.write_text("0::/slice/job\n")
    (root / "slice" / "job").mkdir(parents=True)
    assert cpus.cpu_quota(root, own) is None
    for folder, text in (("slice", "350000 100000"), ("slice/job", "max 100000")):
        (root / folder / "cpu.max").write_text(f"{text}\n")
    assert cpus.cpu_quota(root, own) == 3.5
    (root / "slice" / "job" / "cpu.max").write_text("25000 50000\n")
    assert cpus.cpu_quota(root, own) == 0.5
    monkeypatch.setattr(cpus, "own_cpus", lambda: range(8))
    for quota, cores in ((None, 8), (3.5, 3), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(cpus, "cpu_quota", lambda quota=quota: quota)
        assert cpus.usable_cores() == cores


def test_free_memory_is_the_minimum_of_system_and_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=800, total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for limit, free in {(900, 300): 300, (900, 850): 800, (900, -5): 0, None: 800}.items():
        monkeypatch.setattr(environment, "cgroup_memory", lambda limit=limit: limit)
        assert free_memory("cpu") == free
        assert collect().memory_bytes == (900 if limit else 1000)


# ---- GPUs --------------------------------------------------------------------------------------


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeGpu("Old", "GPU-ab", free=100)
    new = FakeGpu("New", "GPU-cd", free=200, power_limit_mw=350_500, sm_clock_mhz=1980)
    install(monkeypatch, old, new)


def test_gpus_are_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    report = read_visible_gpus({})
    assert (report.names, report.driver) == (("Old", "New"), "580.1")
    found = collect()
    assert (found.gpus, found.driver) == (("Old", "New"), "580.1")
    assert (found.power_limits_w, found.sm_clocks_mhz) == ((700.0, 350.5), (345.0, 1980.0))


@pytest.mark.parametrize(
    ("visible", "ranks", "free"),
    [(None, 1, 100), ("1,0", 1, 200), ("GPU-cd", 1, 200), ("1,0", 2, 100)],
)
def test_free_memory_is_that_of_the_fullest_visible_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, free: int
) -> None:
    two_gpus(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert free_memory("cuda", ranks) == free
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=-1 shows no GPU"):
        free_memory("cuda")


# ---- the commit --------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, env=clean, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    git(folder.parent, "init", "-q")
    return folder


def test_the_commit_is_marked_if_the_package_differs(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(package, "add", ".")
    assert commit_of(package) is None, "nothing is committed yet"
    git(package, "commit", "-qm", "first")
    commit = git(package, "rev-parse", "HEAD")[:12]
    monkeypatch.setenv("GIT_DIR", str(package.parent / "nowhere"))  # as in a hook
    assert commit_of(package) == commit
    (package.parent / "result.txt").write_text("outside of the package")
    assert commit_of(package) == commit
    (package / "__init__.py").write_text("x = 1\n")
    assert commit_of(package) == f"{commit}-dirty"
    git(package, "rm", "-q", "--cached", "-f", "__init__.py")
    assert commit_of(package) is None, "somebody else's checkout"
    monkeypatch.setenv("PATH", "")
    assert commit_of(package) is None, "no git"
