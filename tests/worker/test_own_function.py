"""Trials of own functions in their own processes: errors with their place, ranks, dry runs."""

import os
import py_compile
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.attention.own_source import find_file
from longseq_bench.core.model import Outcome, Trial
from longseq_bench.launchers.local import LocalLauncher
from tests.make import trial
from tests.trials import complete, passed, run_trial

HEAD = """\
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
"""
RAISES = HEAD + "def f(q, k, v):\n    helper(q)\ndef helper(q):\n    raise ValueError('no luck')\n"
RAISES_IN_BACKWARD = (
    HEAD
    + """\
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        return q.clone()
    @staticmethod
    def backward(ctx, grad):
        raise ValueError('no gradient')
def f(q, k, v):
    return Broken.apply(sdpa(q, k, v))
"""
)
GATHERS = (
    HEAD
    + """\
def f(q, k, v, *, group, rank, world_size):
    every = []
    for tensor in (k, v):
        parts = [torch.empty_like(tensor) for _ in range(world_size)]
        if group is not None:
            dist.all_gather(parts, tensor.contiguous(), group=group)
        every.append(torch.cat(parts, 2) if group is not None else tensor)
    return sdpa(q, *every)
"""
)


def own(folder: Path, text: str, tokens: int = 300, **fields: Any) -> Trial:
    path = folder / "own.py"
    path.write_text(text)
    known = {"heads": 2, "repeats": 0, "threads": 1} | fields
    name = f"{path}:f"
    return trial(name, tokens, source=find_file(name).source, **known)


def run(launcher: LocalLauncher, folder: Path, text: str, *rest: Any, **fields: Any) -> Outcome:
    return run_trial(launcher, own(folder, text, *rest, **fields))


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (RAISES, {}, "ValueError: no luck ({file}:7)"),
        (RAISES_IN_BACKWARD, {"mode": "train"}, "ValueError: no gradient ({file}:10)"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_with_its_place(
    launcher: LocalLauncher, tmp_path: Path, text: str, fields: dict[str, Any], reason: str
) -> None:
    outcome = run(launcher, tmp_path, text, **fields)
    assert outcome.reason == reason.format(file=tmp_path / "own.py")
    assert outcome.status == "error"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [("with torch.no_grad():\n        return sdpa(q, k, v)", 300), ("return v.clone()", 1)],
)
def test_gradients_that_are_missing(
    launcher: LocalLauncher, tmp_path: Path, body: str, tokens: int
) -> None:
    """None at all is refused in a sentence. The output of one token depends on v alone."""
    text = HEAD + f"def f(q, k, v):\n    {body}\n"
    outcome = run(launcher, tmp_path, text, tokens, mode="train")
    no_gradient = "unsupported", "its output has no gradient, which mode=train needs"
    assert (outcome.status, outcome.reason) == (no_gradient if tokens > 1 else ("ok", None))


def test_rows_that_an_own_pattern_leaves_may_be_zero(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    text = (
        HEAD
        + """\
def before(q, k, head): return k[None, :] < q[:, None]
def f(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
    return sdpa(q, k, v, attn_mask=mask).nan_to_num(0)
f.pattern = before
"""
    )
    passed(run(launcher, tmp_path, text, repeats=2))
    assert run(launcher, tmp_path, text.replace("tril(-1)", "tril(-2)")).status == "wrong"


def test_an_edit_of_equal_length_within_a_second_counts(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """Python would take its bytecode of the file as it was before."""
    for factor, status in ((1, "ok"), (2, "wrong")):
        one = own(tmp_path, HEAD + f"def f(q, k, v): return sdpa(q, k, v) * {factor}\n")
        os.utime(one.implementation.removesuffix(":f"), (1e9, 1e9))
        if factor == 1:
            py_compile.compile(one.implementation.removesuffix(":f"))
        assert run_trial(launcher, one).status == status


def test_a_file_edited_during_a_run_is_an_error(launcher: LocalLauncher, tmp_path: Path) -> None:
    one = own(tmp_path, HEAD + "def f(q, k, v): return sdpa(q, k, v)\n")
    assert run_trial(launcher, one).status == "ok"
    own(tmp_path, HEAD + "def f(q, k, v): return q\n")
    outcome = run_trial(launcher, one)
    assert outcome.status == "error"
    assert "own.py is not the file that the command read" in (outcome.reason or "")


def test_ranks_hold_equal_parts_and_unseen_traffic_is_not_reported(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    outcome = passed(run(launcher, tmp_path, GATHERS, 302, world_size=2, repeats=2))
    assert sorted(outcome.samples("own_tokens")) == [151, 151]
    for name in ("bytes_sent", "bytes_formula", "compute_time", "communication_time"):
        assert outcome.samples(name) == ()
    alone = run(launcher, tmp_path, GATHERS, 301, repeats=1)
    assert (alone.status, alone.samples("bytes_sent")) == ("ok", (0.0,))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_a_function_is_measured_and_checked_on_a_gpu(
    launcher: LocalLauncher, tmp_path: Path, mode: str
) -> None:
    text = HEAD + "def f(q, k, v, *, causal):\n    return sdpa(q, k, v, is_causal=causal)\n"
    fields: dict[str, Any] = {"mode": mode, "causal": True, "device": "cuda", "dtype": "bfloat16"}
    outcome = passed(run(launcher, tmp_path, text, 4096, repeats=3, **fields))
    assert len(outcome.samples("time")) == 3
    elsewhere = run(launcher, tmp_path, HEAD + "def f(q, k, v): return q.cpu()\n", device="cuda")
    assert elsewhere.status == "error"
    assert "on cpu; expected float32 (1, 2, 300, 64) on cuda:0" in (elsewhere.reason or "")


# ---- dry runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fused_attention_has_its_memory_in_a_dry_run(
    launcher: LocalLauncher, tmp_path: Path, mode: str, device: str
) -> None:
    """On meta tensors torch takes the kernel that holds all scores: 64 times as much here."""
    fields: dict[str, Any] = {"mode": mode, "causal": True, "device": device}
    text = HEAD + "def f(q, k, v, *, causal):\n    return sdpa(q, k, v, is_causal=causal)\n"
    mine = own(tmp_path, text, 4096, **fields)
    theirs = complete(launcher, "sdpa", 4096, **fields)
    of_mine, of_theirs = launcher.dry_run([mine, theirs])
    assert of_mine.unsupported is None
    assert of_mine.peak_bytes == pytest.approx(of_theirs.peak_bytes, rel=0.02)
    assert of_mine.flops == of_theirs.flops


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(q, k, v):\n    return sdpa(q, k, v) * float(q[0, 0, 0, 0])\n",
         "can't run without data: Tensor.item() cannot be called on meta tensors ({file}:5)"),
        ("def f(q, k, v): return q[:1, :1]\n",
         "f returned float32 (1, 1, 300, 64) on meta; expected float32 (1, 2, 300, 64) on meta, "
         "like q (batch, heads, tokens, head_dim) ({file}:4)"),
        ("@torch.compile\ndef f(q, k, v): return sdpa(q, k, v)\n",
         "it calls torch.compile, whose memory can't be predicted; measure it with maxlen, or "
         "predict it without torch.compile"),
    ],
)  # fmt: skip
def test_a_dry_run_that_fails_says_where(
    launcher: LocalLauncher, tmp_path: Path, text: str, reason: str
) -> None:
    (estimate,) = launcher.dry_run([own(tmp_path, HEAD + text)])
    assert estimate.unsupported == reason.format(file=tmp_path / "own.py")


def test_a_dry_run_of_ranks_that_send_by_themselves_is_refused(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    (estimate,) = launcher.dry_run([own(tmp_path, GATHERS, world_size=2)])
    assert estimate.unsupported == "f sends by itself, so it can't run without its other ranks"
