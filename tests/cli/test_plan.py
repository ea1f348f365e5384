"""`longseq plan` and `scaling` from the command line: what they say, and what they refuse."""

import json
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.core.units import format_seconds
from longseq_bench.environment import collect
from longseq_bench.launchers.local import LocalLauncher
from longseq_bench.store import load
from tests import make
from tests.cli.commands import Capture, document
from tests.cli.test_cli import Ranks

SHAPE = ("--dtype", "bfloat16", "--heads", "32", "--kv-heads", "8", "--head-dim", "128")
H200 = ("--gpu", "h200", *SHAPE)
SMALL = (*H200, "--memory", "4GiB")
"""Fewer tokens fit, so that dry runs are short."""


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_a_plan_needs_no_device_and_is_marked_as_predicted(capfd: Capture) -> None:
    answer = document(
        capfd, "plan", "--impl", "ring", *SMALL, "--world-size", "8", "--mode", "train"
    )
    assert (answer["predicted"], answer["hardware"]["name"]) == (True, "NVIDIA H200 SXM")
    (row,) = answer["results"]
    floor = row["tokens"] * (2 * 2 * 40 * 128 * 2 + 4 * 32)
    # the CUDA context, cuBLAS, and NCCL's buffers for the next rank of the ring
    outside = sum(row["outside_bytes"].values())
    assert outside == (600 + 32 + 448) * 2**20
    assert row["peak_bytes"] + outside <= row["memory_budget"] == 2**32
    assert row["fraction_of_floor"] == pytest.approx(floor / (8 * 2**32))
    assert 0.4 < row["fraction_of_floor"] <= 1
    assert row["seconds"] == max(row["compute_s"], row["memory_s"]) + row["exposed_s"]
    assert row["bytes_sent"] > 0
    assert row["rate_source"].startswith("profile of NVIDIA H200 SXM: cudnn, head_dim 128, full")
    figure = {"kernel": "cudnn", "head_dim": 128, "mask": "full", "forward": 622e12}
    assert row["rate_figure"].items() >= figure.items()
    assert run(["plan", "--impl", "ring", *SMALL]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("1 NVIDIA H200 SXM: ")
    assert "Predicted; nothing was run. Bytes are those of the fullest rank" in printed
    assert "Length limited by" in printed
    assert "time from profile of NVIDIA H200 SXM: cudnn" in printed
    # it is a package, which is not installed here
    assert "package is installed, -o kernel=flash-attn-4" in " ".join(printed.split())
    assert "632 MiB" in printed


def test_a_kernel_that_is_not_in_the_table_is_named(capfd: Capture) -> None:
    command = ("plan", "--impl", "bad-unlisted-kernel", *SMALL, "--kv-heads", "32")
    (row,) = document(capfd, *command)["results"]
    assert row["untabled"] == ["_flash_attention_forward bfloat16"]
    assert run([*command]) == 0
    assert "is unknown and not counted" in " ".join(capfd.readouterr().out.split())


NODES = (*SMALL, "--target", "4M", "--gpus-per-node", "8")
"""A target that needs more than a node."""


def test_a_plan_proposes_whole_nodes_and_answers_first(capfd: Capture) -> None:
    command = ("plan", "--impl", "ring", "--impl", "sdpa", *NODES)
    answer = document(capfd, *command)
    ring = answer["results"][0]
    assert (ring["asked_world_size"], ring["fits"]) == (8, True)
    nodes, rest = divmod(ring["world_size"], 8)
    assert (nodes > 1, rest) == (True, 0)
    assert answer["answer"].startswith(f"4M tokens: {8 * nodes} NVIDIA H200 SXM; ")
    assert answer["answer"].endswith(
        "of a rank stay free. Use ring, because nothing else can run it."
    )
    assert ring["fewest_ranks"] == 8 * nodes
    assert ring["headroom_bytes"] == 2**32 - ring["peak_bytes"] - sum(
        ring["outside_bytes"].values()
    )
    # a given number of ranks is a condition, and the proposal an error
    assert run([*command, "--world-size", "8"]) == 2
    assert f"--world-size {8 * nodes}" in capfd.readouterr().err


def test_the_answer_says_why(capfd: Capture) -> None:
    fits = document(capfd, "plan", "--impl", "ring", "--impl", "dense", *SMALL, "--target", "64k")
    assert fits["answer"].endswith("Use ring, because nothing else fits.")
    command = ("plan", "--impl", "ring", "--impl", "ulysses", *SMALL, "--world-size", "8")
    found = document(capfd, *command)
    tokens = {row["implementation"]: row["tokens"] for row in found["results"]}
    assert tokens["ring"] > tokens["ulysses"]
    reason = f"Use ring, because the next longest, ulysses, ends at {tokens['ulysses']:,}."
    assert reason in found["answer"]
    few = document(capfd, "plan", "--impl", "sdpa", *SMALL, "--world-size", "8")
    assert few["answer"] == "No implementation can be predicted for this shape."
    assert "runs on one rank" in few["results"][0]["unsupported"]
    of_model = ("--gpu", "h100", "--model", "llama-3.1-8b", "--world-size", "64")
    assert run(["plan", "--impl", "ulysses", *of_model]) == 0
    assert "32 heads with 8 kv_heads can't be split over 64 ranks" in capfd.readouterr().out


def test_a_plan_beyond_the_context_of_a_model_says_so(capfd: Capture) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 3, "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    command = ["plan", "--impl", "ring", "--gpu", "h200", "--memory", "4GiB", "--mode", "decode"]
    command += ["--model", "config.json", "--target"]
    for target, is_beyond in (("8k", True), ("4k", False)):
        assert run([*command, target]) == 0
        note = "beyond the model's own context (max_position_embeddings): 4,096"
        assert (note in capfd.readouterr().out) == is_beyond


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "ring", "--gpu", "h20"], "unknown hardware 'h20'; did you mean 'h200'?"),
        (["--impl", "rng", "--gpu", "h200"], "unknown implementation 'rng' in --impl; did you"),
        ([], "Missing option '--impl'"),
        (["--impl", "ring", *SHAPE, "--gpu", "gtx1080"],
         "profile of NVIDIA GTX 1080 has no bfloat16; it has "),
        (["--impl", "ring", "--hardware", "none.yaml"], "none.yaml can't be read: No such file"),
        (["--impl", "ring", "--target", "1", "--world-size", "4"], "nothing could be predicted"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capfd: Capture) -> None:
    assert run(["plan", *arguments]) == 2
    output = capfd.readouterr().err
    assert message in output
    assert "Traceback" not in output


def test_rates_of_this_machine_are_used_only_for_it(capfd: Capture) -> None:
    with LocalLauncher() as launcher:
        options = launcher.catalogue().options("ring", {})
    trial = make.trial("ring", 4096, options, memory_budget=2**30)
    outcome = make.outcome(peak=1000.0, time=[2.0] * 3, flops=4e9)
    make.write_records("results/earlier", [make.record(trial, outcome, collect())])
    command = ("plan", "--impl", "ring", "--target", "8k", "--memory", "1GiB")
    for gpu, more, source in (
        ("CPU", (), "1 record(s), nearest at 4,096"), ("h200", (), "profile of NVIDIA H200"),
        ("cpu", ("--mode", "train", "--keep", "inputs"), "profile of"),
    ):  # fmt: skip
        (row,) = document(capfd, *command, "--gpu", gpu, *more)["results"]
        assert row["rate_source"].startswith(source), (gpu, more)


def test_options_are_checked_with_the_given_ranks(capfd: Capture) -> None:
    command = ("plan", "--impl", "usp", *H200, "--world-size", "4", "--target", "64k")
    (row,) = document(capfd, *command, "-o", "ulysses=2")["results"]
    assert row["fits"]
    assert run([*command, "-o", "ulysses=3"]) == 2


# ---- scaling -----------------------------------------------------------------------------------


def test_scaling_searches_and_times_every_world(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Ranks)
    answer = document(
        capfd, "scaling", "--impl", "ring", "--world-sizes", "1,2", "--memory-budget", "16MiB",
        "--out", "study",
    )  # fmt: skip
    one, two = answer["maxima"]
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert two["expected"] == 2 * one["actual"]
    assert two["actual"] == pytest.approx(two["expected"], rel=0.02)
    fit, held = answer["complexity"]
    assert (fit["label"], fit["quantity"], fit["points"]) == ("ring", "time", 6)
    assert (fit["tokens"]["value"], fit["ranks"]["value"]) == pytest.approx((2.0, -1.0), rel=0.01)
    assert (held["quantity"], held["formula_tokens"], held["formula_ranks"]) == (
        "memory",
        1.0,
        -1.0,
    )
    assert (held["tokens"]["value"], held["ranks"]["value"]) == pytest.approx((1.0, -1.0), rel=0.01)
    assert {row["world_size"] for row in answer["rows"]} == {1, 2}
    assert {r.purpose for r in load("study").records} >= {"edge", "confirm", "measure"}


@pytest.mark.parametrize("worlds", ["1,x", "0", "1;2", "²"])
def test_bad_world_sizes_are_refused(worlds: str, capfd: Capture) -> None:
    assert run(["scaling", "--impl", "ring", "--world-sizes", worlds]) == 2
    assert "is not a list of numbers of ranks" in capfd.readouterr().err


# ---- models ------------------------------------------------------------------------------------


def test_a_plan_of_a_model_counts_it_apart_from_the_attention(capfd: Capture) -> None:
    command = (
        "plan", "--impl", "ring", "--gpu", "h200", "--model", "llama-3.1-8b", "--mode", "train",
        "--world-size", "8", "--target", "64k",
    )  # fmt: skip
    answer = document(capfd, *command)
    seconds = format_seconds(32 * answer["results"][0]["seconds"])
    assert f"layers of llama-3.1-8b; attention takes {seconds} of a step; " in answer["answer"]
    assert answer["model"]["page"].endswith("meta-llama/Llama-3.1-8B/blob/main/config.json")
    assert answer["model"]["source"].endswith("llama3.1-8b_codeio_pp/blob/main/config.json")
    assert answer["model"]["sharding"] == "zero3"
    (row,) = answer["results"]
    shape = {n: row["workload"][n] for n in ("heads", "kv_heads", "head_dim", "dtype", "model")}
    assert shape == {
        "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "model": "llama-3.1-8b"
    }  # fmt: skip
    parts = row["model_bytes"]
    assert parts["checkpoints"] == 2**13 * 4096 * 2 * 31
    assert parts["logits"] == 2**13 * 128256 * 6
    assert parts["activations"] == 2**13 * 4 * (4096 + 14336) * 2
    assert parts["weights"] == parts["gradients"] == pytest.approx(2 * 8.03e9 / 8, rel=1e-3)
    assert parts["optimizer"] == pytest.approx(12 * 8.03e9 / 8, rel=1e-3)
    outside = sum(row["outside_bytes"].values())
    kept = sum(parts[name] or 0 for name in parts if name != "total")
    assert parts["total"] == row["peak_bytes"] + outside + kept
    assert run([*command, "--sharding", "none"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "sharding none, tp 1, checkpoint full" in printed
    assert "recomputation, in the times" in printed
    assert run([*command, "--checkpoint", "none"]) == 0
    kept = " ".join(capfd.readouterr().out.split())
    assert "checkpoint none" in kept
    assert "recomputation" not in kept
    assert "not modelled: fragmentation of the allocator" in printed
    assert "model llama-3.1-8b: 32 heads, 8 KV heads, head_dim 128, layers 32 full" in printed
    assert "Optimizer" in printed


def test_the_length_of_a_model_is_that_of_all_layers(capfd: Capture) -> None:
    """By hand: 32 layers of 8 KV heads of 2 · 128 values take 128 KiB a token."""
    command = "plan", "--impl", "ring", "--gpu", "h100", "--model", "llama-3.1-8b", "--mode"
    whole = document(capfd, *command, "decode")
    (row,) = whole["results"]
    parts, outside = row["model_bytes"], sum(row["outside_bytes"].values())
    assert parts["caches"] == row["tokens"] * 31 * 4096
    whole_step = parts["caches"] + parts["weights"] + parts["activations"]
    assert parts["total"] == row["peak_bytes"] + outside + whole_step
    room = row["memory_budget"] - parts["weights"] - outside
    assert room / 2**17 * 0.98 < row["tokens"] < room / 2**17
    assert "tokens with all 32 layers of llama-3.1-8b; a step takes" in whole["answer"]
    (layer,) = document(capfd, *command, "decode", "--layer", "full")["results"]
    assert layer["tokens"] > 30 * row["tokens"]
    assert "model_bytes" not in layer


def test_a_model_that_does_not_fit_needs_more_ranks(capfd: Capture) -> None:
    command = "plan", "--impl", "ring", "--gpu", "h200", "--model", "llama-3.1-405b"
    more = "--heads", "64", "--target", "64k"
    assert run([*command, *more, "--world-size", "2"]) == 2
    assert "ring fits them with --world-size 6" in " ".join(capfd.readouterr().err.split())
    # without a number of ranks, that is the answer
    assert run([*command, *more]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("64k tokens: 6 NVIDIA H200 SXM")
    assert "overridden: heads 64" in " ".join(shown.out.split())
    assert run(command) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "the rest of the model takes 756 GiB of each rank; give more ranks" in printed


DECODE = ("plan", "--impl", "ring", "--gpu", "h100", "--model", "llama-3.1-8b", "--mode", "decode")


def test_tensor_parallel_ranks_and_requests(capfd: Capture) -> None:
    more = "--tp", "2", "--world-size", "4", "--batch", "4"
    (row,) = document(capfd, *DECODE, *more, "--memory", "20GiB")["results"]
    assert run([*DECODE, *more, "--memory", "20GiB"]) == 0
    said = "not modelled: copies of gathered weights, transfers between tensor-parallel ranks"
    assert said in " ".join(capfd.readouterr().out.split())
    assert row["one_request_tokens"] == pytest.approx(4 * row["tokens"], rel=0.01)
    assert (row["world_size"], row["workload"]["heads"], row["workload"]["kv_heads"]) == (4, 16, 4)
    # of two ranks each has half of the KV heads, and half of the tokens
    assert row["model_bytes"]["caches"] == pytest.approx(row["tokens"] * 4 * 31 * 1024, rel=1e-6)


def test_a_time_without_a_measured_rate_is_a_range(capfd: Capture) -> None:
    """Of the bandwidth 90 to 50 %: no profile has a measured rate of decoding."""
    (row,) = document(capfd, *DECODE, "--memory", "20GiB")["results"]
    fast, slow = row["seconds_range"]
    assert row["seconds"] == pytest.approx(0.9 * fast)
    assert slow == pytest.approx(1.8 * fast)
    (measured,) = document(capfd, "plan", "--impl", "ring", *SMALL)["results"]
    assert measured["seconds_range"] == [measured["seconds"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3", "--world-size", "6"], "--tp 3 does not divide the 8 devices of a node"),
        (["--tp", "4", "--world-size", "6"], "--tp 4 does not divide --world-size 6"),
        (["--tp", "2", "--layer", "full"], "--tp is of a whole model; give --model"),
        (["--prefill-chunk", "8k", "--mode", "train"], "--prefill-chunk is of --mode decode"),
        (["--checkpoint", "none"], "--checkpoint is of --mode train"),
    ],
)  # fmt: skip
def test_options_of_a_whole_model_are_refused_where_they_mean_nothing(
    arguments: list[str], message: str, capfd: Capture
) -> None:
    assert run([*DECODE, *arguments]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_a_narrow_terminal_shows_sum_peak_and_time(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*DECODE, "--memory", "20GiB"]) == 0
    printed = capfd.readouterr().out
    lines = [line.partition("  ")[0] for line in printed.splitlines()]
    assert {"Peak, attention of a layer", "Sum", "Time of a step", "Headroom"} < {*lines}
    assert "no room for" not in printed
