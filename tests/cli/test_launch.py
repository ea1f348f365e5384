"""`longseq launch`: two nodes on this host, as two people would start them."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from longseq_bench import environment
from longseq_bench.cli import run
from longseq_bench.core.own_functions import read_own_function
from longseq_bench.launchers.launch_key import KEY_VARIABLE
from longseq_bench.store import RECORDS, load
from tests.cli.commands import Capture
from tests.fake_nvml import FakeGpu, install
from tests.launchers.nodes import Nodes

TINY = """\
memory_budget: 64MiB
workload: {heads: 1, head_dim: 16}
tokens: 256
implementations: ring
rounds: 1
repeats: 1
threads: 1
"""
DEADLY = TINY.replace("256", "[256, 4k]").replace("ring", "[rank-kills-itself, 'mine.py:mine']")
WAITS = TINY.replace("256", "[256, 4k]").replace(": ring", ": rank-waits")
NEWER = "import longseq_bench; longseq_bench.__version__ = '9.9'"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


# ---- what a node says before it waits for others -----------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor"], "unknown command 'doctor' in longseq launch; known: maxlen, scaling, sweep"),
        (["--nnodes", "2", "sweep", "c"], "--nnodes 2 needs --node-rank"),
        (["--nnodes", "0", "sweep", "c"], "--nnodes"),
        ([], "COMMAND"),
        (["--", "sweep"], "Missing argument"),
        (["--", "maxlen", "--impl", "ring", "--heads", "many"], "--heads"),
        (["--", "sweep", "nowhere.yaml"], "there is no config nowhere.yaml"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capfd: Capture) -> None:
    assert run(["launch", *arguments]) == 2
    shown = capfd.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("options", "variables", "is_named"),
    [
        ([], {"SLURM_NNODES": "2"}, True),
        ([], {"SLURM_NNODES": "1"}, False),
        (["--nnodes", "1"], {"SLURM_NNODES": "2"}, False),
        ([], {"SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}, False),
    ],
)
def test_a_batch_script_of_several_nodes_is_told_to_use_srun(
    options: list[str], variables: dict[str, str], is_named: bool,
    capfd: Capture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["launch", *options, "sweep", "nowhere.yaml"]) == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert (
        "this Slurm job has 2 nodes, but the command runs on this one only" in shown
    ) == is_named


BEYOND_LOOPBACK = ("--nnodes", "3", "--rdzv-endpoint", "198.51.100.1")
"""An address reserved for documentation; no host has it."""


def test_node_0_prints_the_command_for_other_hosts_with_a_key(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    Path("sweep.yaml").write_text(TINY)
    keys = []
    for _ in range(2):
        assert run(["launch", *BEYOND_LOOPBACK, "--node-rank", "0", "sweep", "sweep.yaml"]) == 2
        shown = capfd.readouterr().err
        (line,) = [line for line in shown.splitlines() if KEY_VARIABLE in line]
        assignment, *words = line.split()
        assert words[:9] == [
            "longseq", "launch", "--nnodes", "3", "--nproc-per-node", "1", "--node-rank", "1",
            "--rdzv-endpoint",
        ]  # fmt: skip
        assert words[-4:] == ["60", "--", "sweep", "sweep.yaml"]
        assert "node 0 can't listen at 198.51.100.1:29400" in shown
        keys.append(assignment)
    assert keys[0] != keys[1]


@pytest.mark.parametrize("endpoint", ["198.51.100.1", "nowhere.invalid", "127.0.0.1"])
@pytest.mark.parametrize("key", [None, "mode 644", "short"])
def test_a_key_is_needed_beyond_loopback(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch, endpoint: str, key: str | None
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path.cwd()))
    Path("sweep.yaml").write_text(TINY)
    Path("key").write_text("sixteen letters!")
    Path("key").chmod(0o644)
    if key == "short":
        monkeypatch.setenv(KEY_VARIABLE, key)
    options = ["--key-file", "key"] if key == "mode 644" else []
    node_1 = ["--nnodes", "2", "--node-rank", "1", "--rdzv-timeout", "0.1", *options]
    code = run(["launch", *node_1, "--rdzv-endpoint", endpoint, "sweep", "sweep.yaml"])
    shown = " ".join(capfd.readouterr().err.split())
    message = {
        "mode 644": "others can use the key file key (mode 644); run chmod 600 key",
        "short": "LONGSEQ_KEY holds a key of 5 characters",
        None: "this node has no key; start it with the command that node 0 prints",
    }[key]  # fmt: skip
    if endpoint == "127.0.0.1" and key is None:
        message = "got no answer from node 0"
    assert (code, message in shown) == (2, True), shown


@pytest.mark.parametrize("arguments", [["--help"], ["--", "sweep", "--help"]])
def test_help(arguments: list[str], capfd: Capture) -> None:
    assert run(["launch", *arguments]) == 0
    assert "--" in capfd.readouterr().out


def test_one_node_needs_no_options(capfd: Capture) -> None:
    Path("sweep.yaml").write_text(TINY)
    assert run(["launch", "--nproc-per-node", "2", "sweep", "sweep.yaml", "--out", "out"]) == 0
    (record,) = load("out").records
    assert (record.trial.world_size, record.outcome.status) == (2, "ok")


def test_the_number_of_ranks_of_slurm_has_its_reason(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sweep.yaml").write_text(TINY + "device: cpu\n")
    slurm = {
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NODELIST": "n03",
    }  # fmt: skip
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, FakeGpu("H100", "GPU-a"), FakeGpu("H100", "GPU-b"))
    monkeypatch.setattr(environment, "count_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert run(["launch", "sweep", "sweep.yaml", "--out", "out"]) == 0
    first, second, *_ = capfd.readouterr().err.splitlines()
    reason = "SLURM_GPUS_ON_NODE is not set, and 2 GPU(s) are visible here"
    assert first == f"2 rank(s) on each host: {reason}"
    assert second.startswith("2 rank(s) have 1 of the 64 cores of this host: give them more, by")
    (record,) = load("out").records
    assert record.trial.world_size == 2


def test_a_config_sets_the_number_of_ranks(capfd: Capture) -> None:
    Path("sweep.yaml").write_text(TINY + "world_size: [1, 2, 3]\n")
    assert run(["launch", "--nproc-per-node", "2", "sweep", "sweep.yaml", "--out", "out"]) == 0
    found = {r.trial.world_size: r.outcome for r in load("out").records}
    assert {ranks: outcome.status for ranks, outcome in found.items()} == {
        1: "ok", 2: "ok", 3: "unsupported",
    }  # fmt: skip
    assert "more than the 2 of this launch" in (found[3].reason or "")


# ---- two nodes ---------------------------------------------------------------------------------


GATHERS = """\
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
def mine(q, k, v, *, group, world_size):
    every = [[torch.empty_like(x) for _ in range(world_size)] for x in (k, v)]
    for parts, x in zip(every, (k, v)):
        dist.all_gather(parts, x.contiguous(), group=group)
    return sdpa(q, *(torch.cat(parts, 2) for parts in every))
"""


def test_a_rank_dies_and_an_own_function_runs_over_two_nodes(nodes: Nodes) -> None:
    Path("mine.py").write_text(GATHERS)
    Path("sweep.yaml").write_text(DEADLY)
    nodes.start("sweep", "sweep.yaml", "--out", "out")
    assert nodes.wait() == [3, 0], nodes.err(0)
    found = load("out").records
    assert [(r.trial.implementation, r.outcome.status) for r in found] == [
        ("rank-kills-itself", "ok"),
        ("mine.py:mine", "ok"),
        ("rank-kills-itself", "crashed"),
        ("mine.py:mine", "ok"),
    ]
    assert {(r.trial.world_size, r.processes) for r in found} == {(2, 2)}
    assert found[2].outcome.reason == "rank 1 (node 1): killed by SIGKILL"
    assert [m.rank for m in found[3].outcome.measurements if m.name == "peak"] == [0, 1]
    lines = nodes.err(1).splitlines()
    assert "joined node 0" in lines[0]
    assert [line.split(":")[1].split(",")[0] for line in lines[1:]] == [
        f" trial {i}" for i in range(1, 5)
    ]
    assert lines[3].endswith("crashed: rank 1 (node 1): killed by SIGKILL")
    assert nodes.out(1) == ""
    assert nodes.left() == []


@pytest.mark.parametrize("by", ["--impl", "config"])
def test_an_own_function_must_be_the_same_on_all_nodes(tmp_path: Path, by: str) -> None:
    for folder, body in (("a", "v"), ("b", "q")):
        Path(folder).mkdir()
        (Path(folder) / "mine.py").write_text(f"def mine(q, k, v):\n    return {body}\n")
        (Path(folder) / "c.yaml").write_text(TINY.replace("ring", "mine.py:mine"))
    command = {
        "--impl": ["maxlen", "--impl", "mine.py:mine"], "config": ["sweep", "c.yaml"],
    }[by]  # fmt: skip
    before = ("import os; os.chdir('a')", "import os; os.chdir('b')")
    with closing(Nodes(tmp_path, before=before)) as nodes:
        nodes.start(*command, "--out", "out")
        assert nodes.wait() == [2, 2]
        hashes = [read_own_function(f"{folder}/mine.py:mine").source for folder in "ab"]
        for node in range(2):
            message = nodes.err(node).splitlines()[-1]
            assert "the hash of the file of mine.py:mine" in message
            assert all(text in message for text in hashes)


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_on_one_node_ends_both(nodes: Nodes, node: int) -> None:
    Path("sweep.yaml").write_text(WAITS)
    nodes.start("sweep", "sweep.yaml", "--out", "out")
    records = Path("out") / RECORDS
    nodes.wait_until(lambda: records.exists() and records.read_text().count("\n") == 1)
    os.killpg(nodes.processes[node].pid, signal.SIGINT)
    assert nodes.wait() == [130, 130], nodes.err(1)
    for i in range(2):
        assert nodes.err(i).splitlines()[-1].startswith("longseq: interrupted")
        assert "Traceback" not in nodes.err(i)
    assert [r.outcome.status for r in load("out").records] == ["ok"]
    assert nodes.left() == []


def test_nodes_of_another_version_are_refused(tmp_path: Path) -> None:
    Path("sweep.yaml").write_text(TINY)
    with closing(Nodes(tmp_path, before=("", NEWER))) as nodes:
        nodes.start("sweep", "sweep.yaml")
        assert nodes.wait() == [2, 2]
        for i in range(2):
            assert "the nodes differ: longseq is 0" in nodes.err(i)
            assert "and 9.9" in nodes.err(i)
        assert nodes.left() == []


def test_nodes_with_another_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    Path("sweep.yaml").write_text(TINY)
    Path("there/sweep.yaml").write_text(WAITS)
    with closing(Nodes(tmp_path, before=("", "import os; os.chdir('there')"))) as nodes:
        nodes.start("sweep", "sweep.yaml")
        assert nodes.wait() == [2, 2]
        for i in range(2):
            assert "the nodes differ: the hash of the config is" in nodes.err(i)
            assert "the command" not in nodes.err(i)


@pytest.mark.parametrize(("node", "message"), [(0, "missing: node 1"), (1, "(connection refused)")])
def test_a_rendezvous_that_does_not_answer(tmp_path: Path, node: int, message: str) -> None:
    Path("sweep.yaml").write_text(TINY)
    with closing(Nodes(tmp_path, timeout=1)) as nodes:
        nodes.start("sweep", "sweep.yaml", nodes=[node])
        assert nodes.wait() == [2]
        assert message in nodes.err(node)
        assert "within 1 s" in nodes.err(node)
        assert "127.0.0.1:" in nodes.err(node)
        assert "firewall" in nodes.err(node)
        assert not list(tmp_path.glob("results/*"))
        assert nodes.left() == []
