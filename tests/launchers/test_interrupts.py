"""Ctrl-C in the middle of starting a process."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from longseq_bench.launchers.interrupts import block_interrupts, defer_interrupts


def interrupted(then: Callable[[], object]) -> None:
    """Something during which a Ctrl-C comes."""
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        then()


def test_it_waits_for_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: done.append("ended"))
    assert done == ["ended"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


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


def test_what_fails_for_its_sake_is_not_told() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(_fail)
    with pytest.raises(EOFError), defer_interrupts():
        _fail()


def _fail() -> None:
    raise EOFError


def test_in_other_threads_it_changes_nothing() -> None:
    handlers = []

    def inside() -> None:
        with defer_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_what_is_started_while_it_is_blocked_is_born_deaf() -> None:
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    command = [sys.executable, "-c", code]
    with block_interrupts():
        assert subprocess.check_output(command) == b"True\n"
    assert subprocess.check_output(command) == b"False\n"
