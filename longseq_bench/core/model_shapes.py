"""Shapes of models, from the keys of their config.json files. config/models.py finds the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longseq_bench.core import model_files
from longseq_bench.core.errors import ConfigError, UnsupportedError, one_line, quote
from longseq_bench.core.model import DTYPE_BYTES, DType, Frozen, Workload, canonical_dtype
from longseq_bench.core.model_files import SHAPE, LayerKind
from longseq_bench.core.workload import parse_latent

OVERRIDABLE = (*SHAPE, "dtype", "sink", "soft_cap")
"""Fields of a workload that a model sets unless they are given."""


class ModelShape(Frozen):
    """The attention of a model, and what its memory depends on.

    heads, kv_heads, head_dim (of q and k), v_head_dim (of v and the output): of one layer, the
    first of `kinds` or the chosen one, which has its `mask` and `latent` too.  kinds: all layers.
    dtype: None if the file has none that can be measured.  sink, soft_cap: of all layers.
    parameters: None if they can't be counted; parameters_reason says why.  mlp_width: columns of
    the gate, of all experts of a token; None if unknown or if the MLP has no gate.
    context: tokens for which the model was made, of a file that says it.
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
    kinds: tuple[LayerKind, ...] = ()
    mask: str | None = None
    sink: bool = False
    latent: str | None = None
    soft_cap: float | None = None
    parameters: int | None = None
    parameters_reason: str | None = None
    vocab_size: int | None = None
    mlp_width: int | None = None
    context: int | None = None
    notes: tuple[str, ...] = ()

    def of_layer(self, kind: str | None) -> ModelShape:
        """Return the shape of another kind of layers, with their mask; None: this one.

        Raises ConfigError if the model has no such layers with attention that can be measured.
        """
        if kind is None:
            return self
        found = [one for one in self.kinds if one.kind == kind and one.heads]
        if not found or (found[0].window and not found[0].mask):
            has = model_files.describe_layers(self.kinds)
            raise ConfigError(
                f"model {self.name} has no {kind} layers whose mask is known here; it has {has}"
            )
        fields = found[0].model_dump(include={*SHAPE, "mask", "latent"})
        return self.model_copy(update={**fields, "name": f"{self.name} ({kind} layer)"})

    @property
    def absorbed(self) -> ModelShape:
        """The shape in decode: a latent is the one KV head (arXiv 2405.04434, section 2.1.2)."""
        shape = parse_latent(self.latent)[1] if self.latent else {}
        return self.model_copy(update={**shape, "latent": None})

    def workload_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a workload that this model sets, and its label `model`.

        given: fields that were set explicitly, without None; they override those of the model,
        and the label says so. A kv_heads or v_head_dim of 0 is as many as heads or head_dim.
        """
        if self.latent and given.get("mode") == "decode" and given.keys().isdisjoint(SHAPE[1:]):
            return self.absorbed.workload_fields({"latent": self.latent, **given})
        fields = {name: getattr(self, name) for name in OVERRIDABLE}
        if "head_dim" in given:
            fields["v_head_dim"] = given["head_dim"]
        if self.kv_heads == self.heads:
            fields["kv_heads"] = given.get("heads", self.heads)
        fields |= {"mask": self.mask, **given}
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
            f"{self.head_dim}{value}, layers {model_files.describe_layers(self.kinds)}, "
            f"{self.dtype or 'no dtype'} ({self.page or self.source})"
        )
        shape = self.absorbed if workload and workload.latent else self
        fields = shape._changed({n: getattr(workload, n) for n in OVERRIDABLE}) if workload else ()
        set_here = ", ".join(f"{name} {getattr(workload, name)}" for name in fields)
        return "; ".join([own, *([f"overridden: {set_here}"] if set_here else []), *self.notes])

    def _changed(self, fields: Mapping[str, Any]) -> list[str]:
        return [n for n in OVERRIDABLE if getattr(self, n) not in (None, fields[n])]


def parse_config(
    data: Mapping[str, Any], name: str, source: str, filled: Mapping[str, Any] | None = None
) -> ModelShape:
    """Return the shape that the keys of a config.json describe. Raises ConfigError.

    filled: the keys with the defaults of the model's class, for those that the file leaves out.
    """
    try:
        config = model_files.read_keys(data, filled or {})
        kinds = model_files.read_layers(config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"a key of its attention has a value of a wrong type ({why})") from None
    layer, table = kinds[0], model_files.describe_layers(kinds)
    if not layer.heads or layer.kind == model_files.SHARED:
        raise ConfigError(f"it has no layer with attention that is known here ({table})")
    dtype, notes = _dtype(config)
    if len(kinds) > 1 or layer.window:
        notes.append("a single layer is of the first kind and sees all tokens; --layer picks one")
    notes += model_files.describe_unknown(config, kinds)
    parameters: int | None = None
    reason: str | None = None
    try:
        parameters = count_parameters(config, kinds)
    except KeyError as error:
        reason = f"weights are not counted: the file has no {error.args[0]}"
    except TypeError:
        reason = "weights are not counted: a value of the file is not a whole number"
    except UnsupportedError as error:
        reason = str(error)
    return ModelShape(
        name=name,
        source=source,
        **layer.model_dump(include={*SHAPE, "latent"}),
        layers=sum(one.layers for one in kinds),
        hidden_size=config["hidden_size"],
        dtype=dtype,
        sink=model_files.type_of(config).get("sink", False),
        soft_cap=config.get("attn_logit_softcapping") or None,
        kinds=kinds,
        parameters=parameters,
        parameters_reason=reason,
        vocab_size=config.get("vocab_size"),
        mlp_width=_mlp_width(config),
        context=config.get("max_position_embeddings"),
        notes=tuple(dict.fromkeys(notes)),
    )


def _dtype(config: Mapping[str, Any]) -> tuple[DType | None, list[str]]:
    """Return the dtype of a file, and a note if it can't be measured."""
    written = config.get("torch_dtype") or config.get("dtype")
    name = str(written).removeprefix("torch.")
    if name in DTYPE_BYTES:
        return name, []
    problem = f"its dtype {quote(name)} can't be measured" if written else "the file has no dtype"
    return None, [f"{problem}, so that of the device is used"]


# ---- the number of parameters ------------------------------------------------------------------


def count_parameters(config: Mapping[str, Any], kinds: Sequence[LayerKind]) -> int:
    """Return the number of parameters. Raises UnsupportedError, or KeyError for a missing key.

    Counted: matrices of attention and MLP, and embeddings. Not counted: norms and biases (below
    0.1 %), vision towers, and layers for the prediction of several tokens.
    """
    if not model_files.type_of(config).get("gated"):
        kind = config.get("model_type")
        raise UnsupportedError(f"the formula for weights is not known for model_type {kind}")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedError("weights are not counted: only some of the layers have experts")
    if len({(one.heads, one.kv_heads, one.head_dim) for one in kinds}) > 1:
        raise UnsupportedError("weights are not counted: the layers have different shapes")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    embeddings = config["vocab_size"] * hidden
    total = embeddings if config.get("tie_word_embeddings", False) else 2 * embeddings
    total += layers * _attention(config, kinds[0])
    dense = 3 * hidden * (config.get("intermediate_size_mlp") or config["intermediate_size"])
    if not (experts := config.get("num_experts")):
        return int(total + layers * dense)
    dense_layers = config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
    dense_layers += layers - layers // config.get("interleave_moe_layer_step", 1)  # Llama 4
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    sparse = hidden * (experts + 3 * width * (experts + (config.get("n_shared_experts") or 0)))
    return int(total + dense_layers * dense + (layers - dense_layers) * sparse)


def _mlp_width(config: Mapping[str, Any]) -> int | None:
    """Return the columns of the gate, of all experts that a token has; None if they are unknown."""
    width: Any = config.get("intermediate_size")
    experts = 1
    if config.get("num_experts"):
        width = config.get("moe_intermediate_size") or width
        experts = config.get("num_experts_per_tok") or 0
        experts += (config.get("n_shared_experts") or 0) if experts else 0
    is_known = model_files.type_of(config).get("gated") and isinstance(width, int)
    return width * experts or None if is_known else None


def _attention(config: Mapping[str, Any], layer: LayerKind) -> int:
    """Return the elements of the projections of one layer."""
    heads, head_dim, v_head_dim = layer.heads, layer.head_dim, layer.v_head_dim
    hidden: int = config["hidden_size"]
    if not model_files.has_latent(config):
        return 2 * hidden * head_dim * (heads + layer.kv_heads)
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    rank = config.get("q_lora_rank")
    queries = rank * (hidden + heads * head_dim) if rank else hidden * heads * head_dim
    keys = hidden * (latent + rope) + latent * heads * (head_dim - rope + v_head_dim)
    if indexer_heads := config.get("index_n_heads"):
        keys += config["index_head_dim"] * (rank * indexer_heads + hidden) + hidden * indexer_heads
    return int(queries + keys + heads * v_head_dim * hidden)
