"""Campaigns of random and hostile input, run by hand; `.ci/run` runs a short seed of some."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 10


class Hang(BaseException):
    """A case took longer than LIMIT_S. No handler of Exception takes it for another failure."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise Hang in a block that takes too long."""

    def stop(*_: object) -> None:
        raise Hang(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
