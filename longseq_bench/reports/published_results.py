"""Published maxima to compare with: a YAML file with their source."""

from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from longseq_bench.analysis.search_row import SearchRow
from longseq_bench.core.errors import ConfigError
from longseq_bench.core.model import DType, Frozen, Mode, OptionValue
from longseq_bench.core.user_files import MAX_TABLE_BYTES, read_text_file


class Figure(Frozen):
    """A published maximum. A field that is not given matches any value."""

    implementation: str
    tokens: int = Field(ge=1)
    dtype: DType | None = None
    mode: Mode | None = None
    heads: int | None = None
    head_dim: int | None = None
    world_size: int | None = None
    memory_budget: int | None = Field(default=None, description="bytes")
    options: dict[str, OptionValue] = Field(default_factory=dict)

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

    source: str
    maxima: tuple[Figure, ...] = Field(min_length=1)

    def tokens(self, row: SearchRow) -> int | None:
        """Return the tokens of the first figure with the same settings as the row."""
        return next((one.tokens for one in self.maxima if one.is_of(row)), None)


def read(path: Path) -> PublishedResults:
    """Read published maxima. Raises ConfigError, with the place, if the file is not valid."""
    try:
        found = yaml.safe_load(read_text_file(path, max_bytes=MAX_TABLE_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} can't be read: {reason}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        return PublishedResults.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path}: {place}: {first['msg'].lower()}; it has source and maxima, a list of "
            "implementation and tokens"
        ) from None
