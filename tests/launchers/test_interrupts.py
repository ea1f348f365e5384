"""Ctrl-C in the middle of starting a process, and signals that act as Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from longseq_bench.cli import run
from longseq_bench.launchers import interrupts
from longseq_bench.launchers.interrupts import (
    block_interrupts,
    defer_interrupts,
    interrupt_on_termination,
)
from tests.cli.commands import Capture


def interrupted(then: Callable[[], object]) -> None:
    """Something during which a Ctrl-C comes."""
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        then()


@pytest.mark.parametrize("ignored", [True, False])
def test_it_does_then_what_it_would_have_done(ignored: bool) -> None:
    done: list[str] = []
    own = signal.SIG_IGN if ignored else lambda number, frame: done.append("heard")
    before = signal.signal(signal.SIGINT, own)
    try:
        interrupted(lambda: done.append("ended"))
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == (["ended"] if ignored else ["ended", "heard"])


TERMINATION = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The list of received signals, empty; handlers are restored after the test."""
    monkeypatch.setattr(interrupts, "received_signals", received := [])
    monkeypatch.setattr("longseq_bench.cli.received_signals", received)
    before = [signal.getsignal(number) for number in TERMINATION]
    yield received
    for number, handler in zip(TERMINATION, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_batch_system_ends_a_command_as_ctrl_c_does(
    signals: list[int], capfd: Capture, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals, code: int,
) -> None:  # fmt: skip
    """It sends the signal more than once; a second one does not disturb the end."""
    interrupt_on_termination()
    done: list[str] = []

    def ends_in_a_start(*args: object, **options: object) -> None:
        with defer_interrupts():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            done.append("started")

    monkeypatch.setattr("longseq_bench.cli.app", ends_in_a_start)
    assert run([]) == code
    shown = capfd.readouterr().err
    assert shown == f"longseq: interrupted by {number.name}; every finished record is on disk\n"
    assert (done, signals) == (["started"], [number, number])
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(signals: list[int], ignored: signal.Signals) -> None:
    """As under nohup, or in the background of a script."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(ignored, signal.SIG_IGN)
    interrupt_on_termination()
    assert signal.getsignal(ignored) is signal.SIG_IGN
    is_changed = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert is_changed == (ignored == signal.SIGHUP)


def test_what_is_started_while_it_is_blocked_is_born_deaf() -> None:
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    command = [sys.executable, "-c", code]
    with block_interrupts():
        assert subprocess.check_output(command) == b"True\n"
    assert subprocess.check_output(command) == b"False\n"
