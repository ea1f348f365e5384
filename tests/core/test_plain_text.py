"""Text from outside: control characters and long quotes."""

from longseq_bench.core.errors import (
    MAX_TEXT,
    UnknownNameError,
    UserError,
    keep_lines,
    one_line,
    quote,
)


def test_lines_and_tabs_stay_and_other_control_characters_go() -> None:
    assert keep_lines("a\r\nb\rc\td\n") == "a\nb\nc\td\n"
    assert keep_lines("\x1b[31mred\x1b[0m \x00nul \x07bell \x08back \x9b1m") == (
        "red nul bell back 1m"
    )
    assert one_line("a\r\n\tb \x1b[2Jc") == "a b c"


def test_a_long_message_keeps_its_ends() -> None:
    message = str(UserError(f"key {'x' * 5000!r} is unknown; remove it"))
    assert message.startswith("key 'xxx")
    assert message.endswith("xxx' is unknown; remove it")
    assert len(message) == MAX_TEXT + 1
    assert len(str(UnknownNameError("key", "many words " * 500, ["tokens"]))) == MAX_TEXT + 1


def test_a_short_quote_and_a_long_list_of_names_stay() -> None:
    message = f"unknown 'a'; known: {', '.join(f'name-{i}' for i in range(100))}"
    assert str(UserError(message)) == message
    assert quote("4k") == "'4k'"
