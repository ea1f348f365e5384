"""`maxlen` with --keep and --fit-only, on a simulated machine."""

from pathlib import Path
from typing import Any

import pytest

from longseq_bench.cli import run
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.model import Trial
from longseq_bench.store import load
from tests.cli.commands import Capture, document
from tests.cli.test_cli import Ranks


def peak_bytes(trial: Trial) -> float:
    """Return the peak of a pass; in place it is a quarter lower."""
    return floor_bytes(trial.workload) * (0.8 if trial.keep == "nothing" else 1.05)


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", lambda: Ranks(peak=peak_bytes))


def search(capfd: Capture, *arguments: str) -> list[dict[str, Any]]:
    command = ("maxlen", "--impl", "ring", "--memory-budget", "64MiB", "--out", "out")
    results: list[dict[str, Any]] = document(capfd, *command, *arguments)["results"]
    return results


def test_a_pass_in_place_needs_less_than_the_floor_and_is_labelled(capfd: Capture) -> None:
    (row,) = search(capfd, "--keep", "nothing")
    assert (row["keep"], row["allocator"]) == ("nothing", "default")
    assert row["fraction_of_floor"] == pytest.approx(1 / 0.8, rel=0.02)
    assert "ring (in place)" in Path("out/report.md").read_text()
    assert {r.trial.keep for r in load(Path("out")).records} == {"nothing"}


def test_fit_only_is_reported_next_to_complete_passes(capfd: Capture) -> None:
    fit, full = search(capfd, "--fit-only", "--time-budget", "1ms")
    assert (fit["fit_only"], full["fit_only"]) == (True, False)
    assert full["fits_tokens"] == fit["max_tokens"] > full["max_tokens"]
    assert run(["report", "out"]) == 0
    text = Path("out/report.md").read_text()
    assert "would fit in memory" in text
    assert run(["maxlen", "--impl", "ring", "--memory-budget", "64MiB", "--fit-only"]) == 0
    assert "not checked or timed" in " ".join(capfd.readouterr().out.split())
