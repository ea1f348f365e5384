"""The number of parameters of a model by formula, from the keys of its config.json.

Counted: matrices of attention and MLP, and embeddings. Not counted: norms and biases (below 0.1 %),
vision towers, and layers for the prediction of several tokens.
"""

from collections.abc import Mapping
from typing import Any

_GATED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "deepseek_v2", "deepseek_v3", "gpt_oss",
)  # fmt: skip
"""Types whose MLP has three matrices (gate, up, down), so that the formula holds."""

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def count_parameters(
    config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int
) -> int | str:
    """Return the number of parameters, or the reason why it is not known."""
    kind = str(config.get("model_type"))
    if kind not in _GATED:
        return f"the formula for weights is not known for model_type {kind}"
    needed = ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"]
    experts_key = next((key for key in _EXPERTS if config.get(key)), None)
    if experts_key and kind not in ("mixtral", "gpt_oss"):
        needed.append("moe_intermediate_size")
    if has_latent(config):
        needed += ["kv_lora_rank", "v_head_dim"]
    for key in needed:
        if not isinstance(config.get(key), int):
            return f"weights are not counted: the file has no {key}"
    if config.get("decoder_sparse_step", 1) != 1 or config.get("moe_layer_freq", 1) != 1:
        return "weights are not counted: only some of the layers have experts"
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    embeddings = config["vocab_size"] * hidden
    total = embeddings if config.get("tie_word_embeddings", False) else 2 * embeddings
    total += layers * _attention(config, heads, kv_heads, head_dim)
    dense = 3 * hidden * config["intermediate_size"]
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
