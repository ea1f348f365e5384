"""Progress lines: short labels, failures and the number of trials."""

import io
import threading

import pytest
from rich.console import Console

from longseq_bench.api import progress
from longseq_bench.api.progress import Reporter, RunProgress, TrialLabels, describe_record
from longseq_bench.core.model import Phase, Status
from longseq_bench.search.strategy import Step
from tests import make
from tests.cli.commands import Capture


def test_a_label_has_only_differing_settings() -> None:
    trials = [
        make.trial("ring", 2048, {"chunk": 64, "order": "zigzag"}),
        make.trial("ring", 2048, {"chunk": 128, "order": "zigzag"}, causal=True),
        make.trial("sdpa", 2048),
    ]
    labels = TrialLabels(trials)
    assert [labels.label(trial) for trial in trials] == [
        "ring 2k chunk 64 not causal", "ring 2k chunk 128 causal", "sdpa 2k not causal",
    ]  # fmt: skip
    # a search that looks only at the memory of some lengths, and runs others
    fits = trials[2].model_copy(update={"fit_only": True, "repeats": 0})
    labels = TrialLabels([fits, trials[2]])
    assert [labels.label(one) for one in (fits, trials[2])] == ["sdpa 2k (fit only)", "sdpa 2k"]


@pytest.mark.parametrize(
    ("status", "phase", "words"),
    [
        ("oom", "forward", "out of memory in forward"),
        ("timeout", "forward", "over the time limit of 10 s"),
        ("timeout", "inputs", "timeout in inputs: four lines of text"),
        ("crashed", "forward", "crashed in forward: four lines of text"),
    ],
)
def test_a_failure_is_one_short_line(status: Status, phase: Phase, words: str) -> None:
    """The text of the allocator is in the record only."""
    failed = make.outcome(status, "four lines\n of text", phase)
    assert describe_record(make.record(make.trial(time_budget=10.0), failed)) == words
    long = make.outcome("error", "x" * 1000, "forward")
    assert len(describe_record(make.record(came_to=long))) < 130
    others = "; GPU 0 is in use: other processes hold 9 GiB"
    oom = make.outcome("oom", f"CUDA: tried {'x' * 300}{others}", "forward")
    assert describe_record(make.record(came_to=oom)) == f"out of memory in forward{others}"


def test_a_live_line_has_no_markup_and_no_control_character_of_a_label() -> None:
    """Of an option's text, which is that of a config or of a command."""
    hostile = ("[/x]", "[link=http://x]b", "\x1b]0;c\x07d\u202e")
    trials = [make.trial("ring", options={"order": text}) for text in hostile]
    screen = io.StringIO()
    terminal = Console(file=screen, width=120, force_terminal=True, color_system=None)
    with RunProgress(terminal, trials, "", 1) as watcher:
        for one in trials:
            watcher.starts(Step(one))
            watcher.phase("forward", "\u202e")
            watcher.live.refresh()
            failed = make.outcome("error", "no \u202e\x1b]0;c\x07", "forward")
            watcher.ends(Step(one), make.record(one, failed), from_store=False)
    text = screen.getvalue()
    lines = [line for line in text.splitlines() if "· forward" in line]
    assert [part in "".join(lines) for part in hostile[:2]] == [True, True]
    assert not [found for found in ("\x1b]", "\x07", "\u202e") if found in text]


def test_a_sweep_counts_finished_trials() -> None:
    screen = io.StringIO()
    trials = [make.trial("ring", 2048), make.trial("sdpa", 2048)]
    watcher = RunProgress(Console(file=screen, width=80), trials, "device: cpu", 3)
    with watcher:
        watcher.starts(Step(trials[0]))
        watcher.ends(Step(trials[0]), make.record(trials[0]), from_store=False)
        failed = make.record(trials[1], make.outcome("oom", "no", "forward"))
        watcher.ends(Step(trials[1]), failed, from_store=True)
    lines = screen.getvalue().splitlines()
    assert lines[3:] in ([], [""])  # rich 13.8 adds an empty line
    assert lines[:3] == [
        "device: cpu",
        "[1/6] ring 2k  100 ms ±0.78 %",
        "[4/6] sdpa 2k  out of memory in forward  (from an earlier run)",
    ]


def test_a_log_that_was_silent_gets_a_line_on_the_running_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "ALIVE_S", 0.01)
    said = threading.Event()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if "still running" in text:
                said.set()
            return super().write(text)

    log = Log()
    with RunProgress(Console(file=log, width=80), [make.trial("ring", 2048)], "cpu") as watcher:
        watcher.starts(Step(make.trial("ring", 2048)))
        watcher.phase("inputs", "")
        said.clear()
        assert said.wait(30)
    assert "still running: ring 2k · inputs" in log.getvalue()


@pytest.mark.parametrize("is_drawn", [True, False])
def test_records_that_do_not_count_are_named_on_stderr(is_drawn: bool, capfd: Capture) -> None:
    console = Reporter(is_drawn=is_drawn).console
    with RunProgress(console, [make.trial()], "cpu", 1) as watcher:
        watcher.skips_records("12 records of n1\x1b[2J do not count here: another environment")
    lines = capfd.readouterr().err.splitlines()
    assert [one for one in lines if one.startswith("12 records of n1")]
    assert "\x1b" not in "".join(lines)
