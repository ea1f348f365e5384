"""benchmarks/sparse.py: a kernel that can't run has a row with the reason, and the others run."""

import sys

import pytest

pytest.importorskip("torch")

from benchmarks import sparse

SMALL = ["--cases", "1k:0.5", "--patterns", "random,strided", "--rounds", "1"]


def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    monkeypatch.setattr(sparse, "keep_memory", lambda: None)
    arguments = ["sparse.py", *SMALL, "--no-growth", "--no-flex", *more]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        sparse.main()
    return capsys.readouterr().out


def test_flex_flash_without_a_gpu_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(monkeypatch, capsys, "--kernels", "torch,flex-flash").splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("pattern "))
    reason, *measured = lines[heading + 1 :]
    assert reason.split() == [
        "every", "pattern", "can't", "run:", "kernel=flex-flash:", "FlashAttention-4", "is", "for",
        "CUDA",
    ]  # fmt: skip
    assert [line.split()[:2] for line in measured] == [["random", "torch"], ["strided", "torch"]]
    assert all(0 < float(line.split()[5]) < 100 for line in measured)


@pytest.mark.cuda
def test_flex_flash_on_a_gpu_is_measured_or_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = rows(monkeypatch, capsys, "--device", "cuda", "--dtype", "bfloat16")
    lines = [line.split() for line in printed.splitlines()]
    assert ["random", "triton"] in [line[:2] for line in lines]
    measured = ["random", "flex-flash"] in [line[:2] for line in lines]
    assert measured != ("can't run: kernel=flex-flash: " in printed)
