"""Text for a terminal: names and reasons are printed literally and can't control the terminal."""

from rich.text import Text

from longseq_bench.core.plain_text import one_line


def plain(text: str, style: str = "") -> Text:
    """Return the text on one line in one style; markup in it has no effect."""
    return Text(one_line(text), style)
