"""The shape of an attention: what is computed, whichever implementation does it.

core/model.py has the trial of an implementation on a workload, and its result.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longseq_bench.core.errors import UserError
from longseq_bench.core.masks import CAUSAL, FULL, WINDOW, Mask, parse_mask
from longseq_bench.core.settings import WORKLOAD, DType, KVDtype, Mode, Setting
from longseq_bench.core.units import divisors

DTYPE_ALIASES: dict[str, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def canonical_dtype(name: str) -> str:
    """Return the full name of a dtype: bf16 -> bfloat16; any other name stays as it is."""
    return DTYPE_ALIASES.get(name, name)


class Frozen(BaseModel):
    """A model that is checked when created and never changed; unknown fields are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings"
    )


def declared(setting: Setting, low: int | None = None) -> Any:
    """Declare a field with the default and the bounds of a setting; low: another minimum."""
    if not setting.high:
        return Field(default=setting.default)
    return Field(default=setting.default, ge=setting.low if low is None else low, le=setting.high)


def parse_latent(text: str) -> tuple[str, dict[str, int], int]:
    """Return the full text of a latent, the shape that it sets, and the head_dim of its model.

    Latent attention (MLA, arXiv 2405.04434) caches of a token, for all heads, one key of 512 + 64
    elements, whose first 512 are the value: 512+64/192. Scores are divided by √192; without it, by
    that of 128 more than the second number, as in DeepSeek. Raises ValueError for another text.
    """
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)(?:/([1-9]\d*))?", text)
    if not found:
        raise ValueError(f"latent {text} is no latent; write its two parts, as in 512+64/192")
    rank, rest = int(found[1]), int(found[2])
    head_dim = int(found[3] or 128 + rest)
    shape = {"kv_heads": 1, "head_dim": rank + rest, "v_head_dim": rank}
    return f"{rank}+{rest}/{head_dim}", shape, head_dim


@dataclass(frozen=True)
class Scores:
    """How a product q·k becomes a score z, before the mask. Kernels refuse what they don't compute.

    scale: factor of q·k; None: 1/√head_dim.
    soft_cap: c of z -> c·tanh(z/c) (Gemma 2, arXiv 2408.00118).
    """

    scale: float | None = None
    soft_cap: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """Those that are not left out, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def scale_for(self, head_dim: int) -> float:
        """Return the factor of q·k."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def factors(self, head_dim: int) -> tuple[float, float]:
        """Return what compiled kernels take: factor and cap of q·k itself; 0: no cap."""
        scale = self.scale_for(head_dim)
        return scale, (self.soft_cap or 0.0) / scale

    def of(self, scaled: Any) -> Any:
        """Return the scores of a tensor of products that are scaled already."""
        cap = self.soft_cap
        return scaled if cap is None else (scaled / cap).tanh() * cap

    def slopes(self, made: Any) -> Any:
        """Return the derivatives of scores, given by `of`, by their scaled products."""
        return 1 - (made / (self.soft_cap or math.inf)).square()


PLAIN_SCORES = Scores()
ALL_SCORES = tuple(vars(PLAIN_SCORES))


class Layers(Frozen):
    """Layers of one kind in a model, each with a cache of its own.

    window: tokens that a new token sees at most, so that a cache keeps no more; None: all.
    """

    kind: str
    layers: int = Field(ge=1)
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None


class Workload(Frozen):
    """The shape of an attention: q is (batch, heads, seq_len, head_dim), k and v have kv_heads.

    In decode k and v are a cache of seq_len tokens, and q has its last `new_tokens` positions only:
    their keys were just appended. core/settings.py describes the fields, with these exceptions.

    mask: text of a mask that `causal` does not describe; None: full, or causal.
    latent: see parse_latent; v is a view of k. All layers have it.
    kv_heads, v_head_dim: never 0 in a workload that was validated.
    model: a label, the model that the shape is from; empty for a shape in numbers. It is no part of
    a trial's key: a shape is measured once, whichever way it was asked for.
    layers: in decode, all layers of a model that have a cache; a step is one over all of them. The
    first kind has the shape of the workload. Empty: one layer.
    weights: a label too, bytes of the model's weights on each rank, which are not in the budget.
    """

    seq_len: int = Field(ge=1)
    batch: int = declared(WORKLOAD["batch"])
    heads: int = declared(WORKLOAD["heads"])
    kv_heads: int = declared(WORKLOAD["kv_heads"], low=1)
    head_dim: int = declared(WORKLOAD["head_dim"])
    dtype: DType = declared(WORKLOAD["dtype"])
    causal: bool = declared(WORKLOAD["causal"])
    mode: Mode = declared(WORKLOAD["mode"])
    mask: str | None = declared(WORKLOAD["mask"])
    v_head_dim: int = declared(WORKLOAD["v_head_dim"], low=1)
    model: str = ""
    new_tokens: int = declared(WORKLOAD["new_tokens"])
    sink: bool = declared(WORKLOAD["sink"])
    latent: str | None = declared(WORKLOAD["latent"])
    layers: tuple[Layers, ...] = ()
    weights: int = 0
    soft_cap: float | None = declared(WORKLOAD["soft_cap"])
    kv_dtype: KVDtype | None = declared(WORKLOAD["kv_dtype"])

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, data: Any) -> Any:
        """Give fields that may be left out their values, for one key per workload."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("dtype"), str):
            data["dtype"] = canonical_dtype(data["dtype"])
        if isinstance(data.get("latent"), str):
            data["latent"], shape, _ = parse_latent(data["latent"])
            if other := [n for n, v in shape.items() if data.get(n) not in (0, None, v)]:
                raise ValueError(f"latent {data['latent']} sets {', '.join(other)}; leave them out")
            data |= shape
        equal = {"kv_heads": data.get("heads", 8), "v_head_dim": data.get("head_dim", 64)}
        equal |= {"new_tokens": 1} if data.get("mode") == "decode" else {}
        data |= {n: v for n, v in equal.items() if data.get(n) in (0, None)}
        if not isinstance(data.get("mask"), str):
            return data
        try:
            mask = parse_mask(data["mask"])
        except UserError as error:
            raise ValueError(str(error)) from None
        if data.get("causal") and not mask.is_causal:
            raise ValueError(f"mask {mask.text} is not causal; leave out causal")
        return {**data, "causal": mask.is_causal, "mask": None if mask.is_plain else mask.text}

    @model_validator(mode="after")
    def _fits_together(self) -> Workload:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}; "
                f"kv_heads may be {', '.join(str(d) for d in divisors(self.heads))}"
            )
        if self.new_tokens and not self.decode:
            raise ValueError(f"new_tokens {self.new_tokens} needs mode decode")
        if self.latent and not self.decode:
            raise ValueError(f"latent {self.latent} needs mode decode; a prefill has keys per head")
        if self.kv_dtype and not self.decode:
            raise ValueError(f"kv_dtype {self.kv_dtype} needs mode decode")
        if self.kv_dtype and self.latent:
            raise ValueError(f"kv_dtype {self.kv_dtype} can't quantise a latent; leave one out")
        if self.new_tokens > self.seq_len:
            raise ValueError(
                f"new_tokens {self.new_tokens:,} are more than the cache of {self.seq_len:,} tokens"
            )
        return self

    @property
    def visibility(self) -> Mask:
        """The mask, also a full or a causal one."""
        if self.mask is not None:
            return parse_mask(self.mask)
        return Mask(CAUSAL if self.causal else FULL)

    @property
    def scale(self) -> float:
        """The factor of q·k in the scores: 1/√head_dim, with a latent that of the model."""
        return float((parse_latent(self.latent)[2] if self.latent else self.head_dim) ** -0.5)

    @property
    def scores(self) -> Scores:
        """What makes the scores."""
        return Scores(soft_cap=self.soft_cap)

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def train(self) -> bool:
        """True if a pass is forward and backward."""
        return self.mode == "train"

    @property
    def decode(self) -> bool:
        """True if a pass is one step of decoding: new tokens against a cache."""
        return self.mode == "decode"

    @property
    def queries(self) -> range:
        """Positions of the queries: all, or those of the new tokens."""
        return range(self.seq_len - self.new_tokens if self.decode else 0, self.seq_len)

    @property
    def layer_count(self) -> int:
        """Number of layers in a pass."""
        return sum(layers for layers, _ in self.of_kinds())

    def of_kinds(self) -> list[tuple[int, Workload]]:
        """Return the number of layers of each kind, and the workload of one of them."""
        if not self.layers:
            return [(1, self)]
        return [(kind.layers, self._of_kind(kind)) for kind in self.layers]

    def _of_kind(self, kind: Layers) -> Workload:
        tokens, mask = self.seq_len, self.mask
        if kind.window:
            tokens = min(tokens, kind.window + self.new_tokens - 1)
            # a cache of no more tokens than the window is seen as a whole by one new token
            mask = f"{WINDOW}:{kind.window}" if tokens > kind.window else None
        shape = kind.model_dump(exclude={"kind", "layers", "window"})
        fields = self.model_dump(exclude={"layers"}) | shape
        return Workload.model_validate(fields | {"seq_len": tokens, "mask": mask})
