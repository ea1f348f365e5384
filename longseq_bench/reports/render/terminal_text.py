"""Text for a terminal: names and reasons are printed literally and can't control the terminal."""

import re
import unicodedata

from rich.text import Text

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROL_CATEGORIES = frozenset({"Cc", "Cf", "Cs"})


def remove_control(text: str) -> str:
    """Remove escape sequences, control characters and direction marks."""
    kept = _ESCAPE_SEQUENCE.sub("", text)
    if kept.isascii() and kept.isprintable():
        return kept
    return "".join(c for c in kept if unicodedata.category(c) not in _CONTROL_CATEGORIES)


def one_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return remove_control(" ".join(text.split()))


def plain(text: str, style: str = "") -> Text:
    """Return the text on one line in one style; markup in it has no effect."""
    return Text(one_line(text), style)
