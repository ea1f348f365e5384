"""The attention that a config.json describes: its shape, and its layers by kind.

data/model_keys.yaml has the names of keys, data/model_types.yaml the defaults of model types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longseq_bench.core import masks
from longseq_bench.core.errors import ConfigError, quote
from longseq_bench.core.files import load_table
from longseq_bench.core.model import Layers
from longseq_bench.core.units import format_tokens
from longseq_bench.core.workload import parse_latent

CONFIG_FILE = "config.json"
FULL, TOP_K, SLIDING, CHUNKED = WITH_KEYS = "full", "top-k", "sliding", "chunked"
"""Kinds of layers with keys for each token, in the order in which a workload takes their shape."""
SHARED = "shared"
"""Layers that read the cache of an earlier one, and have none."""
SHAPE = ("heads", "kv_heads", "head_dim", "v_head_dim")
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_MASKS = {SLIDING: masks.WINDOW, CHUNKED: masks.CHUNKED}

_KEYS: Mapping[str, Any] = load_table("model_keys.yaml")
_ATTENTION = re.compile(_KEYS["attention"].replace(" ", ""))
_HARMLESS = re.compile(_KEYS["harmless"].replace(" ", ""))


class LayerKind(Layers):
    """Layers of one kind and shape; without keys they have 0 heads.

    kind: a key of `kinds` in data/model_keys.yaml, or the name in the file if it is not known.
    mask: that of a workload; None: full or causal, or no mask describes what these layers see.
    latent: of latent attention that of a workload in decode; None for other layers.
    """

    mask: str | None = None
    latent: str | None = None

    def cached_elements(self, tp: int = 1) -> int:
        """Return the elements of a token in the cache of one of `tp` ranks."""
        if self.kind == SHARED:
            return 0
        if self.latent:
            return parse_latent(self.latent)[1]["head_dim"]
        return split_kv_heads(self.kv_heads, tp) * (self.head_dim + self.v_head_dim)


def split_kv_heads(kv_heads: int, tp: int) -> int:
    """Return the KV heads of a tensor-parallel rank; one is copied if there are fewer than ranks.

    As in vLLM (ModelConfig.get_num_kv_heads).
    """
    return max(1, kv_heads // tp) if kv_heads else 0


def describe_layers(kinds: Sequence[LayerKind]) -> str:
    """Return the number of layers of each kind, and the tokens that they see: 1 sliding 4k."""
    windows = [f" {format_tokens(one.window)}" if one.window else "" for one in kinds]
    pairs = zip(kinds, windows, strict=True)
    return ", ".join(f"{one.layers} {one.kind}{window}" for one, window in pairs)


def read_keys(data: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model under the names used here. Raises ConfigError.

    filled: keys as its class of transformers has them, which count where the file has no value.
    """
    own, place = _language_model(data)
    config, more = _rename(own), _rename(_language_model(filled)[0], check=False)
    config |= {key: value for key, value in more.items() if config.get(key) is None}
    config = _apply_switches(type_of(config).get("defaults", {}) | config)
    config |= {"_place": place, "_unread": [*_unread(own)]}
    absent = [key for key in _SIZES if not any(_get(own, name) for name in _KEYS["names"][key])]
    return {**config, "_filled": absent if filled else []}


def read_layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Return the layers by kind and shape, in the order of WITH_KEYS and the commonest first.

    Raises ConfigError.
    """
    names = _listed_kinds(config)
    names = names or _periodic_kinds(config, count(config, "num_hidden_layers"))
    layers = [_layer(config, i, kind) for i, kind in enumerate(names)]
    if shared := config.get("num_kv_shared_layers"):  # the last ones, of Gemma 3n and 4
        without_cache = {"kind": SHARED, "mask": None}
        layers[-shared:] = [one.model_copy(update=without_cache) for one in layers[-shared:]]
    own = Counter(layers)
    found = [one.model_copy(update={"layers": n}) for one, n in own.most_common()]
    return tuple(sorted(found, key=lambda one: (*WITH_KEYS, one.kind).index(one.kind)))


def describe_unknown(config: Mapping[str, Any], kinds: Sequence[LayerKind]) -> Iterator[str]:
    """Yield notes: what a workload leaves out of the model, and what the reader does not know."""
    if note := type_of(config).get("note"):
        yield note
    if config["_filled"]:
        names = ", ".join(config["_filled"])
        yield f"the file has no {names}; its class of transformers gives it"
    if config["_place"]:
        yield f"its language model is under {config['_place']}"
    for one in kinds:
        if one.kind not in _KEYS["kinds"]:
            yield f"layers of kind {quote(one.kind)} ({one.layers}) are not known here"
    holds = {"kv_lora_rank": has_latent(config), "index_topk": TOP_K in {one.kind for one in kinds}}
    for key, note in _KEYS["notes"].items():
        if config.get(key) and holds.get(key, True):
            yield note.format(config[key])
    if config["_unread"]:
        yield f"keys that sound like attention and are not read: {', '.join(config['_unread'])}"


def type_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what data/model_types.yaml has of the model_type of a file."""
    found: dict[str, Any] = load_table("model_types.yaml").get(str(config.get("model_type")), {})
    return found


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number from 1 up. Raises ConfigError, with the name in the file."""
    value, name = config.get(key), config.get("_names", {}).get(key, key)
    if value is None:
        if default is None:
            raise ConfigError(f"it has no {name}; give the {CONFIG_FILE} of a transformer")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"its {name} {quote(value)} is not a whole number from 1 up")
    return value


def has_latent(config: Mapping[str, Any]) -> bool:
    """Return True for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    return bool(config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"))


# ---- keys ----------------------------------------------------------------------------------------


def _get(data: Any, path: str) -> Any:
    """Return the value of a key, which may be one in a mapping ("attn_config.kv_n_heads")."""
    for key in path.split("."):
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _language_model(data: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the keys of the language model, and the key under which they are ("": none)."""
    place = next((key for key in _KEYS["nested"] if isinstance(_get(data, key), Mapping)), "")
    nested = _get(data, place) if place else {}
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        _check_equal({key: data.get(key), f"{place}.{key}": nested.get(key)})
    return {**data, **nested}, place


def _rename(data: Mapping[str, Any], check: bool = True) -> dict[str, Any]:
    """Return the keys under the names used here, and as `_names` those that the file has."""
    renamed, names = dict(data), {}
    for name, keys in _KEYS["names"].items():
        found = {key: _get(data, key) for key in keys if _get(data, key) is not None}
        if check and not data.get("is_encoder_decoder"):  # there an encoder has keys of its own
            _check_equal(found)
        if found:
            names[name], renamed[name] = next(iter(found.items()))
    return {**renamed, "_names": names}


def _apply_switches(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with those replaced that a switch overrules. Raises ConfigError."""
    changed: dict[str, Any] = {}
    one = next((k for k, value in _KEYS["multi_query"].items() if _get(config, k) == value), None)
    if one and not config.get("new_decoder_architecture"):  # Falcon-40B has groups
        groups = config.get("num_key_value_heads")
        if config["_names"].get("num_key_value_heads") == "num_key_value_heads" and groups != 1:
            _check_equal({one: _get(config, one), "num_key_value_heads": groups})
        changed["num_key_value_heads"] = 1
    for switch, keys in _KEYS["switches"].items():
        changed |= dict.fromkeys(keys if config.get(switch) is False else ())
    if isinstance(types := config.get("attention_types"), list):  # GPT-Neo: kinds, repetitions
        changed["attention_layers"] = [one for kinds, n in types for one in n * kinds]
    return config | changed


def _check_equal(found: Mapping[str, Any]) -> None:
    """Raise ConfigError if two keys have different values."""
    written = [(key, value) for key, value in found.items() if value is not None]
    for key, value in written[1:]:
        if value != written[0][1]:
            first = f"{written[0][0]} {quote(written[0][1])}"
            raise ConfigError(f"its {first} contradicts its {key} {quote(value)}; keep one of them")


def _unread(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys that sound like attention, have a value, and are in no table."""
    tables = ("lists", "full_layers", "every", "notes", "multi_query", "switches")
    known = [*_KEYS["read"], *_KEYS["nested"], *(key for name in tables for key in _KEYS[name])]
    for keys in [*_KEYS["names"].values(), *_KEYS["windows"].values()]:
        known += keys
    for keys in _KEYS["shapes"].values():
        known += keys.values()
    tops = {key.partition(".")[0] for key in known}
    for key, value in data.items():
        if value and key not in tops and _ATTENTION.search(key) and not _HARMLESS.search(key):
            yield key


# ---- layers --------------------------------------------------------------------------------------


def _rules(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the keys of a table of rules that the file has, with their values and rules."""
    for key, rule in _KEYS[name].items():
        if _get(config, key) and ("needs" not in rule or config.get(rule["needs"]) is not None):
            yield key, _get(config, key), rule


def _listed_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer that a list has; [] without a list. Raises ConfigError."""
    known = {name: kind for kind, names in _KEYS["kinds"].items() for name in names}
    for key, listed, rule in _rules(config, "lists"):
        if not isinstance(listed, list | str):
            continue
        layers = count(config, "num_hidden_layers", len(listed))
        if rule.get("repeats"):
            listed = [listed[i % len(listed)] for i in range(layers)]
        if len(listed) - layers == config.get("num_nextn_predict_layers"):
            listed = listed[:layers]  # it has those that predict several tokens, too
        name = config["_names"].get("num_hidden_layers", "")
        _check_equal({name: layers, f"length of {key}": len(listed)})
        kinds = rule.get("kinds", known)
        return [kinds.get(str(name), str(name)) for name in listed]
    return []


def _periodic_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer by a period, by the numbers of the full ones or by a window."""
    for _, numbers, rule in _rules(config, "full_layers"):
        return [FULL if i + rule["first"] in numbers else rule["others"] for i in range(layers)]
    for key, _, rule in _rules(config, "every"):
        period, at = count(config, key), config.get(rule["at"], rule["at"])
        return [FULL if (i - at) % period == 0 else rule["others"] for i in range(layers)]
    if config.get("sliding_window") is None:
        return [FULL] * layers
    first = min(layers, config.get("max_window_layers") or 0)  # those of Qwen2 see all
    return [FULL] * first + [SLIDING] * (layers - first)


def _layer(config: Mapping[str, Any], index: int, kind: str) -> LayerKind:
    """Return a layer by its number and kind. Raises ConfigError."""
    own = dict(config)
    for name, key in _KEYS["shapes"].get(kind, {}).items():
        own[name] = config.get(key) or own.get(name)
    layers = config.get("per_layer_config") or {}
    own |= next((layers[key] for key in layers if int(key) == index), {})
    blocks = config.get("block_configs") or ()
    block = (_get(blocks[index], "attention") if index < len(blocks) else None) or {}
    if block.get("n_heads_in_group"):  # Nemotron-NAS, arXiv 2411.19146
        group = count(block, "n_heads_in_group")
        own["num_key_value_heads"] = count(config, "num_attention_heads") // group
    if kind not in WITH_KEYS or block.get("no_op") or block.get("replace_with_linear"):
        return LayerKind(kind="none" if kind in WITH_KEYS else kind, layers=1)
    fields: dict[str, Any] = dict(zip(SHAPE, _shape(own), strict=True))
    if has_latent(own) and own.get("kv_lora_rank"):
        rank, rope = count(own, "kv_lora_rank"), count(own, "qk_rope_head_dim")
        fields["latent"] = f"{rank}+{rope}/{fields['head_dim']}"
    if kind == FULL and own.get("index_topk"):
        kind = TOP_K
    if kind in _MASKS:
        keys = _KEYS["windows"][kind]
        key = next((key for key in keys if own.get(key) is not None), None)
        if key is None:
            raise ConfigError(f"it has {kind} layers, but no {keys[0]}; add that key")
        fields["window"] = count(own, key)
        is_two_sided = key in _KEYS["two_sided"]
        fields["mask"] = None if is_two_sided else f"{_MASKS[kind]}:{fields['window']}"
    return LayerKind(kind=kind, layers=1, **fields)


def _shape(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return heads, KV heads, head_dim and v_head_dim. Raises ConfigError."""
    heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
    if has_latent(config):  # such files call the rotary part head_dim
        head_dim = count(config, "qk_nope_head_dim") + count(config, "qk_rope_head_dim")
        return heads, heads, head_dim, count(config, "v_head_dim", hidden // heads)
    if config.get("head_dim") is None and hidden % heads:
        name = config["_names"].get("num_attention_heads", "num_attention_heads")
        reason = f"its hidden_size {hidden} is not divisible by {name} {heads}"
        raise ConfigError(f"it has no head_dim, and {reason}")
    head_dim = count(config, "head_dim", hidden // heads)
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}"
        )
    v_head_dim = count(config, "v_head_dim") if config.get("v_head_dim") else head_dim
    return heads, kv_heads, head_dim, v_head_dim
