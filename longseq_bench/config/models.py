"""Models by name (data/models.yaml), by their id on Hugging Face, or by a config.json file.

Both are read by the same code: the built-in ones are excerpts of the published files. Where
transformers is installed, its class of the model gives the keys that a file leaves out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longseq_bench.core.errors import ConfigError, UnknownNameError
from longseq_bench.core.files import load_table, read_text_file
from longseq_bench.core.model_files import CONFIG_FILE
from longseq_bench.core.model_shapes import ModelShape, parse_config

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_HUB_SUFFIX = re.compile(r"(-instruct|-it|-base)$")
"""Ends of names on Hugging Face with which a model keeps its shape."""

_CLASS_PROGRAM = """
import sys; sys.modules["torch"] = None  # configurations need no torch, and load in half the time
from transformers import AutoConfig
own = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False, local_files_only=True)
print("\\n" + own.to_json_string(use_diff=False).replace("\\n", " "))
"""


def load_model(text: str, folder: Path | None = None) -> ModelShape:
    """Return a built-in model, or that of a config.json.

    text: a name, its id on Hugging Face, or the path of the file or of its folder. folder: where
    relative paths start.
    Raises UnknownNameError for an unknown name, ConfigError for a file that can't be used.
    """
    if text.lower() in _built_in():
        return _built_in()[text.lower()]
    path = (folder or Path()) / Path(text).expanduser()
    with suppress(OSError):  # a name that is too long for a file
        path = path / CONFIG_FILE if (path / CONFIG_FILE).exists() else path
        if not path.exists() and _HUB_ID.fullmatch(text) and not text.endswith(".json"):
            return _of_hub(text)
        if path.is_file() or text.endswith(".json") or "/" in text:
            return read_config(path)
    raise UnknownNameError("model", text, _built_in())


def _of_hub(name: str) -> ModelShape:
    """Return the built-in model with this id on Hugging Face. Raises ConfigError without one."""
    for model in _built_in().values():
        published = "/".join(model.page.split("/")[3:5])
        if _HUB_SUFFIX.sub("", published.lower()) == _HUB_SUFFIX.sub("", name.lower()):
            return model
    folder = name.partition("/")[2]
    raise ConfigError(
        f"model {name} is not built in, and there is no such file; get its file with "
        f"`hf download {name} {CONFIG_FILE} --local-dir {folder}` and give --model ./{folder}"
    )


def built_in_models() -> tuple[ModelShape, ...]:
    """Return all built-in models, in the order of the data file."""
    return tuple(_built_in().values())


def read_config(path: Path) -> ModelShape:
    """Read a config.json. Raises ConfigError, with the file and the key, if it can't be used."""
    text = read_text_file(path)
    try:
        data = json.loads(text)
    except ValueError:
        raise ConfigError(f"model {path} is not a JSON file; give a {CONFIG_FILE}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"model {path} has no keys; give the {CONFIG_FILE} of a model")
    published = str(data.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    own = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    try:
        return parse_config(data, published or own, str(path), class_values(path, text))
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None


@cache
def _built_in() -> dict[str, ModelShape]:
    models = {}
    for name, entry in load_table("models.yaml").items():
        more = {"page": entry["page"]}
        if "parameters" in entry:
            more |= {"parameters": entry["parameters"], "parameters_reason": None}
        models[name] = parse_config(entry["config"], name, entry["source"]).model_copy(update=more)
    return models


@cache
def class_values(path: Path, text: str) -> Mapping[str, Any]:
    """Return the keys of a file as its class of transformers has them; {} without such a class.

    text: that of the file, so that an edited file is read anew.
    """
    if find_spec("transformers") is None:
        return {}
    command = [sys.executable, "-P", "-c", _CLASS_PROGRAM, str(path.resolve())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return dict(json.loads(done.stdout.rpartition("\n\n")[2]))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}  # transformers does not know the model, or refuses the file
