"""Files that are read whole: those of a user and tables of the package."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from longseq_bench.core.errors import ConfigError
from longseq_bench.core.units import format_bytes

MAX_FILE_BYTES = 16 << 20
"""Largest file that is read whole. Records are not: they are read line by line."""


def read_text_file(path: Path, encoding: str = "utf-8", max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file, in which each line ends as Python writes it.

    Raises ConfigError for a file that is larger, can't be read or is not UTF-8.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            reason = f"has more than {format_bytes(max_bytes)}, the most that is read"
            raise ConfigError(f"{path} {reason}; name another file")
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None


@cache
def load_table(name: str) -> Any:
    """Return the content of a YAML file of the package's folder data."""
    return yaml.safe_load(files("longseq_bench").joinpath(f"data/{name}").read_text("utf-8"))


def read_text(path: Path) -> str:
    """Return the stripped text of a file; "" if it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
