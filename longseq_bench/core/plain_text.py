"""Text from outside, made safe to print and to quote: no control characters, no long quotes."""

import re
import unicodedata
from typing import Any

MAX_QUOTE = 200
"""Characters of input that a message quotes."""

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROL_CATEGORIES = frozenset({"Cc", "Cf", "Cs"})
_LINE_END = re.compile(r"\r\n?")
# direction marks show text in another order than it has
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# a word of punctuation and letters without a space, or a text in quotes
_LONG = re.compile(
    rf"'[^'\n]{{{MAX_QUOTE + 1},}}'|\"[^\"\n]{{{MAX_QUOTE + 1},}}\"|\S{{{MAX_QUOTE + 1},}}"
)


def remove_control(text: str) -> str:
    """Remove escape sequences, control characters, line ends and direction marks."""
    kept = _ESCAPE_SEQUENCE.sub("", text)
    if kept.isascii() and kept.isprintable():
        return kept
    return "".join(c for c in kept if unicodedata.category(c) not in _CONTROL_CATEGORIES)


def one_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return remove_control(" ".join(text.split()))


def escape_surrogates(text: str) -> str:
    r"""Return a text that a record can hold: a byte that is not UTF-8 becomes the text \udcff."""
    return text.encode(errors="backslashreplace").decode()


def keep_lines(text: str) -> str:
    """Return the text with its lines and tabs, without other control and direction characters."""
    if "\r" in text:
        text = _LINE_END.sub("\n", text)
    return _CONTROL.sub("", _ESCAPE_SEQUENCE.sub("", text)) if _CONTROL.search(text) else text


def quote(value: Any) -> str:
    """Return the repr of a value from outside, shortened to MAX_QUOTE characters."""
    try:
        return shorten_quotes(repr(value))
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of too many digits"


def shorten_quotes(message: str) -> str:
    """Shorten the words and quoted texts of a message that are longer than MAX_QUOTE."""
    return _LONG.sub(_shorten, message) if len(message) > MAX_QUOTE else message


def _shorten(found: re.Match[str]) -> str:
    text = found[0]
    end = text[0] if text[0] in "'\"" and text[0] == text[-1] else ""
    return f"{text[: MAX_QUOTE + len(end)]}…{end}"
