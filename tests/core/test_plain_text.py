"""Text from outside: control characters and long quotes."""

import pytest

from longseq_bench.core.errors import (
    MAX_QUOTE,
    UnknownNameError,
    UserError,
    keep_lines,
    one_line,
    quote,
    shorten_quotes,
)


def test_lines_and_tabs_stay_and_other_control_characters_go() -> None:
    assert keep_lines("a\r\nb\rc\td\n") == "a\nb\nc\td\n"
    assert keep_lines("\x1b[31mred\x1b[0m \x00nul \x07bell \x08back \x9b1m") == (
        "red nul bell back 1m"
    )
    assert one_line("a\r\n\tb \x1b[2Jc") == "a b c"


@pytest.mark.parametrize(
    "text", ["x" * 5000, "many words " * 500, "it's " * 1000], ids=["word", "words", "quotes"]
)
def test_a_message_quotes_at_most_200_characters(text: str) -> None:
    message = str(UserError(f"key {text!r} is unknown; remove it"))
    assert message.startswith("key ")
    assert message.endswith(" is unknown; remove it")
    assert len(message) < MAX_QUOTE + 40
    assert len(str(UnknownNameError("key", text, ["tokens"]))) < MAX_QUOTE + 60


def test_a_short_quote_and_a_long_list_of_names_stay() -> None:
    message = f"unknown 'a'; known: {', '.join(f'name-{i}' for i in range(100))}"
    assert shorten_quotes(message) == message
    assert quote("4k") == "'4k'"
