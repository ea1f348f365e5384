"""The errors of longseq, and text from outside.

It is made safe to print and to quote: no control characters, not too long.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

MAX_TEXT = 1800
"""Characters of a message: it may quote a text from outside."""

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_LINE_END = re.compile(r"\r\n?")
# direction marks show text in another order than it has
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def one_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return " ".join(keep_lines(text).split())


def escape_surrogates(text: str) -> str:
    r"""Return a text that a record can hold: a byte that is not UTF-8 becomes the text \udcff."""
    return text.encode(errors="backslashreplace").decode()


def keep_lines(text: str) -> str:
    """Return the text with its lines and tabs, without other control and direction characters."""
    return _CONTROL.sub("", _ESCAPE_SEQUENCE.sub("", _LINE_END.sub("\n", text)))


def quote(value: Any) -> str:
    """Return the repr of a value from outside, shortened."""
    return shorten(repr(value))


def shorten(text: str, most: int = MAX_TEXT) -> str:
    """Return a text, without its middle if it is longer than `most`: its ends say what it is."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


class LongseqError(Exception):
    """Base of all errors that longseq raises on purpose: what a caller may catch."""


class UserError(LongseqError):
    """The user's mistake: one clear sentence, shown without a traceback; exit code 2."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(message))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UnknownNameError(UserError):
    """A name that is not in a list of known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], place: str = "") -> None:
        names = sorted(known)
        self.nearest = nearest(name, names)
        where = f" in {place}" if place else ""
        hint = f"did you mean {self.nearest!r}?" if self.nearest else f"known: {', '.join(names)}"
        if name.isdecimal() and not self.nearest:
            hint = "it followed a comma: quote a value that has commas"
        super().__init__(f"unknown {kind} {name!r}{where}; {hint}")


class ConfigError(UserError):
    """A config file that can't be used; names file, line and key."""


class UnitError(UserError, ValueError):
    """A quantity that can't be read; a ValueError, so that pydantic adds the field to it."""


class TooLargeError(UnitError):
    """A quantity above its upper bound (core/units.py)."""


class StoreError(UserError):
    """A results folder or file that can't be read or written."""


class UnsupportedError(LongseqError):
    """An implementation can't do this workload, for this reason; status `unsupported`."""


class WorldError(UnsupportedError):
    """An implementation can't run this workload on this number of ranks.

    If no world size of a command fits, it is the user's mistake.
    """


class OwnFunctionError(LongseqError):
    """A function of the user isn't what the command read, or returns something else; `error`."""


class KernelLimitError(LongseqError):
    """A launch or index limit of a kernel was exceeded, not memory; status `limit`."""


class LauncherError(LongseqError):
    """Processes could not be started."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, or None if none is close."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    if found:
        return lowered[found[0]]
    same_start = [k for low, k in lowered.items() if name and low.startswith(name.lower()[:3])]
    return same_start[0] if len(same_start) == 1 else None
