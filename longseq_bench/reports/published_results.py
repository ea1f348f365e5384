"""Published maxima to compare with: a YAML file with their source."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictStr, ValidationError

from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.config.loader import parse_yaml
from longseq_bench.config.schema import Bytes, DTypeName, HeadDim, Heads, Ranks, Tokens
from longseq_bench.core.errors import ConfigError
from longseq_bench.core.model import Frozen, Mode, OptionValue
from longseq_bench.core.user_files import MAX_TABLE_BYTES, read_text_file


def _read_option(value: Any) -> Any:
    """Return a scalar as the value that it stands for; the YAML parser leaves most as text."""
    words = {"true": True, "false": False, "none": None}
    if not isinstance(value, str):
        return value
    if value.lower() in words:
        return words[value.lower()]
    try:
        return float(value)
    except ValueError:
        return value


class Figure(Frozen):
    """A published maximum. A field that is not given matches any value."""

    implementation: StrictStr
    tokens: Tokens
    dtype: DTypeName | None = None
    mode: Mode | None = None
    heads: Heads | None = None
    head_dim: HeadDim | None = None
    world_size: Ranks | None = None
    memory_budget: Bytes = None
    options: dict[str, Annotated[OptionValue, BeforeValidator(_read_option)]] = Field(
        default_factory=dict
    )

    def is_of(self, row: SearchRow) -> bool:
        """Return True if the figure is for the same settings as the row."""
        named = self.model_dump(exclude={"implementation", "tokens", "options"})
        return (
            row.implementation == self.implementation
            and all(value in (None, getattr(row, name)) for name, value in named.items())
            and all(row.options.get(name) == value for name, value in self.options.items())
        )


class PublishedResults(Frozen):
    """Published figures of one source."""

    source: StrictStr
    maxima: tuple[Figure, ...] = Field(min_length=1)

    def tokens(self, row: SearchRow) -> int | None:
        """Return the tokens of the first figure with the same settings as the row."""
        return next((one.tokens for one in self.maxima if one.is_of(row)), None)


def read(path: Path) -> PublishedResults:
    """Read published maxima. Raises ConfigError, with the place, if the file is not valid."""
    try:
        text = read_text_file(path, max_bytes=MAX_TABLE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} can't be read: {reason}") from None
    source = parse_yaml(text, str(path))
    try:
        return PublishedResults.model_validate(source.data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        said = first["msg"].removeprefix("Value error, ")
        raise source.error(
            *first["loc"],
            message=f"{place}: {said[0].lower()}{said[1:]}; it has source and maxima, a list of "
            "implementation and tokens",
        ) from None
