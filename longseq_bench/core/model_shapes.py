"""Shapes of models: built-in ones by name (data/models.yaml), and Hugging Face config.json files.

Both are read by the same code: the built-in ones are excerpts of the published files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from longseq_bench.core.errors import ConfigError, UnknownNameError, UnsupportedError, quote
from longseq_bench.core.files import load_table, read_text_file
from longseq_bench.core.model import DTYPE_BYTES, DType, Frozen, Workload, canonical_dtype
from longseq_bench.core.units import MAX_TOKENS

CONFIG_FILE = "config.json"
OVERRIDABLE = ("heads", "kv_heads", "head_dim", "v_head_dim", "dtype")
"""Fields of a workload that a model sets unless they are given."""

_NESTED = ("text_config", "llm_config", "language_config")
"""Keys below which multimodal models keep the language model."""


class ModelShape(Frozen):
    """The attention of a model, and what its memory depends on.

    head_dim: of q and k.  v_head_dim: of v and the output.  dtype: None if the file has none that
    can be measured.  window_layers: layers that see only the last `sliding_window` tokens.
    parameters: None if they can't be counted; parameters_reason says why.
    notes: what the workload leaves out of this model.  source: path of the config.json, or the
    page with which a built-in model was compared.  page: the publisher's file of a built-in model.
    """

    name: str
    source: str
    page: str = ""
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    layers: int
    hidden_size: int
    dtype: DType | None
    sliding_window: int | None = None
    window_layers: int = 0
    parameters: int | None = None
    parameters_reason: str | None = None
    notes: tuple[str, ...] = ()

    def workload_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a workload that this model sets, and its label `model`.

        given: fields that were set explicitly, without None; they override those of the model,
        and the label says so. A kv_heads or v_head_dim of 0 is as many as heads or head_dim.
        """
        fields = {name: getattr(self, name) for name in OVERRIDABLE}
        if "head_dim" in given:
            fields["v_head_dim"] = given["head_dim"]
        if self.kv_heads == self.heads:
            fields["kv_heads"] = given.get("heads", self.heads)
        fields |= given
        fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
        fields["v_head_dim"] = fields["v_head_dim"] or fields["head_dim"]
        if fields["dtype"] is not None:
            fields["dtype"] = canonical_dtype(fields["dtype"])
        changed = self._changed(fields)
        label = self.name + (f" with other {', '.join(changed)}" if changed else "")
        return {n: value for n, value in fields.items() if value is not None} | {"model": label}

    def describe(self, workload: Workload | None = None) -> str:
        """Return what was understood, in a line, and which fields a workload of it overrides."""
        value = f" (of v {self.v_head_dim})" if self.v_head_dim != self.head_dim else ""
        own = (
            f"model {self.name}: {self.heads} heads, {self.kv_heads} KV heads, head_dim "
            f"{self.head_dim}{value}, {self.layers} layers, {self.dtype or 'no dtype'} "
            f"({self.page or self.source})"
        )
        fields = self._changed({n: getattr(workload, n) for n in OVERRIDABLE}) if workload else ()
        set_here = ", ".join(f"{name} {getattr(workload, name)}" for name in fields)
        return "; ".join([own, *([f"overridden: {set_here}"] if set_here else []), *self.notes])

    def _changed(self, fields: Mapping[str, Any]) -> list[str]:
        return [n for n in OVERRIDABLE if getattr(self, n) not in (None, fields[n])]


def load_model(text: str, folder: Path | None = None) -> ModelShape:
    """Return a built-in model, or that of a config.json.

    text: a name, or the path of the file or of its folder. folder: where relative paths start.
    Raises UnknownNameError for an unknown name, ConfigError for a file that can't be used.
    """
    if text.lower() in _built_in():
        return _built_in()[text.lower()]
    path = (folder or Path()) / Path(text).expanduser()
    with suppress(OSError):  # a name that is too long for a file
        path = path / CONFIG_FILE if (path / CONFIG_FILE).exists() else path
        if path.is_file() or text.endswith(".json") or "/" in text:
            return read_config(path)
    raise UnknownNameError("model", text, _built_in())


def built_in_models() -> tuple[ModelShape, ...]:
    """Return all built-in models, in the order of the data file."""
    return tuple(_built_in().values())


def read_config(path: Path) -> ModelShape:
    """Read a config.json. Raises ConfigError, with the file and the key, if it can't be used."""
    try:
        data = json.loads(read_text_file(path))
    except ValueError:
        raise ConfigError(f"model {path} is not a JSON file; give a {CONFIG_FILE}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"model {path} has no keys; give the {CONFIG_FILE} of a model")
    published = str(data.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    own = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    try:
        return parse_config(data, published or own, str(path))
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None


def parse_config(data: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """Return the shape that the keys of a config.json describe. Raises ConfigError."""
    config = _language_model(data)
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    if has_latent(config):  # such files call the rotary part head_dim
        head_dim = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
        kv_heads = heads
    else:
        if config.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                f"it has no head_dim, and its hidden_size {hidden} is not divisible by "
                f"num_attention_heads {heads}"
            )
        head_dim = _count(config, "head_dim", hidden // heads)
        kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}"
        )
    layers = _count(config, "num_hidden_layers")
    window, window_layers = _windows(config, layers)
    written = config.get("torch_dtype") or config.get("dtype")
    name_of_dtype, notes = str(written).removeprefix("torch."), list[str]()
    dtype = name_of_dtype if name_of_dtype in DTYPE_BYTES else None
    if dtype is None:
        unknown = f"its dtype {quote(name_of_dtype)} can't be measured"
        problem = unknown if written else "the file has no dtype"
        notes = [f"{problem}, so that of the device is used"]
    if window:
        notes.append(
            f"{window_layers} of {layers} layers see only the last {window:,} tokens; the workload "
            f"is a layer that sees all"
        )
    notes += filter(None, [_type_of(config).get("note")])
    parameters, reason = None, None
    try:
        parameters = count_parameters(config, heads, kv_heads, head_dim)
    except KeyError as error:
        reason = f"weights are not counted: the file has no {error.args[0]}"
    except TypeError:
        reason = "weights are not counted: a value of the file is not a whole number"
    except UnsupportedError as error:
        reason = str(error)
    shape: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": dtype,
    }
    shape |= {"v_head_dim": _count(config, "v_head_dim", head_dim), "hidden_size": hidden}
    shape |= {"layers": layers, "sliding_window": window, "window_layers": window_layers}
    shape |= {"parameters": parameters, "parameters_reason": reason, "notes": tuple(notes)}
    return ModelShape(name=name, source=source, **shape)


@cache
def _built_in() -> dict[str, ModelShape]:
    return {
        name: parse_config(e["config"], name, e["source"]).model_copy(update={"page": e["page"]})
        for name, e in load_table("models.yaml").items()
    }


def _type_of(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = load_table("model_types.yaml").get(str(config.get("model_type")), {})
    return found


def _language_model(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model, with the defaults of its type."""
    nested = next((data[key] for key in _NESTED if isinstance(data.get(key), dict)), None)
    if nested is not None and "num_hidden_layers" not in data:
        data = {**data, **nested}
    return {**_type_of(data).get("defaults", {}), **data}


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"it has no {key}; give the {CONFIG_FILE} of a transformer")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"its {key} {quote(value)} is not a whole number from 1 up")
    if value > MAX_TOKENS:
        raise ConfigError(f"its {key} {quote(value)} is too large; the maximum is {MAX_TOKENS:,}")
    return value


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Return the window in tokens and the number of layers that have it; (None, 0) without."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None, 0
    window = _count(config, "sliding_window")
    types = config.get("layer_types")
    if isinstance(types, list):
        count = types.count("sliding_attention")
    elif config.get("sliding_window_pattern") is not None:  # every n-th layer sees all tokens
        count = layers - layers // _count(config, "sliding_window_pattern")
    else:  # the first layers of Qwen2 see all tokens
        first = _count(config, "max_window_layers") if config.get("max_window_layers") else 0
        count = layers - min(layers, first)
    return (window, count) if count else (None, 0)


# ---- the number of parameters ------------------------------------------------------------------

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def count_parameters(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the number of parameters. Raises UnsupportedError, or KeyError for a missing key.

    Counted: matrices of attention and MLP, and embeddings. Not counted: norms and biases (below
    0.1 %), vision towers, and layers for the prediction of several tokens.
    """
    if not _type_of(config).get("gated"):
        kind = config.get("model_type")
        raise UnsupportedError(f"the formula for weights is not known for model_type {kind}")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedError("weights are not counted: only some of the layers have experts")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    embeddings = config["vocab_size"] * hidden
    total = embeddings if config.get("tie_word_embeddings", False) else 2 * embeddings
    total += layers * _attention(config, heads, kv_heads, head_dim)
    dense = 3 * hidden * config["intermediate_size"]
    experts_key = next((key for key in _EXPERTS if config.get(key)), None)
    if not experts_key:
        return int(total + layers * dense)
    dense_layers = config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    experts = config[experts_key]
    one_expert = 3 * hidden * width
    sparse = hidden * experts + one_expert * (experts + (config.get("n_shared_experts") or 0))
    return int(total + dense_layers * dense + (layers - dense_layers) * sparse)


def has_latent(config: Mapping[str, Any]) -> bool:
    """Return True for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    return "qk_nope_head_dim" in config and "qk_rope_head_dim" in config


def _attention(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the elements of the projections of one layer."""
    hidden: int = config["hidden_size"]
    if not has_latent(config):
        return 2 * hidden * head_dim * (heads + kv_heads)
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    nope, v_head_dim = config["qk_nope_head_dim"], config["v_head_dim"]
    rank = config.get("q_lora_rank")
    queries = rank * (hidden + heads * head_dim) if rank else hidden * heads * head_dim
    keys = hidden * (latent + rope) + latent * heads * (nope + v_head_dim)
    return int(queries + keys + heads * v_head_dim * hidden)
