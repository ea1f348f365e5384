"""Every setting of a workload and of a trial, declared once: type, bounds, default and help.

The keys of a sweep file (config/schema.py), options of the command line (cli/options.py) and
keywords of the Python API (api/workloads.py) are made from these tables. The models of
core/model.py take bounds and defaults from them. Nothing here imports pydantic: `--help` is quick.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from longseq_bench.core.units import MAX_RANKS

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]
DTypeName = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
Mode = Literal["forward", "train", "decode"]
KVDtype = Literal["int8", "fp8"]
Keep = Literal["all", "inputs", "nothing"]
Allocator = Literal["default", "expandable", "fresh"]
Timing = Literal["warm", "cold", "graph"]
Layer = Literal["full", "sliding", "chunked", "top-k"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Checkpoint = Literal["full", "selective", "none"]

SAME_KERNEL = "same"
"""Dense kernel: that of the sparse attention, if it computes exact attention too."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    type: int, float, bool, str or a Literal of words.  low, high: bounds of a number.
    unit: "tokens", "bytes" or "s", in which a text may give the number: 4k, 512MiB, 2min.
    otherwise: in words, what happens without a value.
    """

    type: Any
    help: str
    default: Any = None
    low: float = 0
    high: float = 0
    unit: str = ""
    is_required: bool = False
    otherwise: str = "none"

    @property
    def text(self) -> str:
        """The help with the default at its end."""
        if self.is_required:
            return f"{self.help} Required."
        default = self.otherwise if self.default is None else str(self.default).lower()
        unit = f" {self.unit}" if self.unit and isinstance(self.default, float) else ""
        return f"{self.help} Default: {default}{unit}."


TOKENS = Setting(
    int,
    "Sequence lengths in tokens over all ranks; k is 1024, M is 1024 k.",
    unit="tokens",
    is_required=True,
)

WORKLOAD = {
    "model": Setting(
        str,
        "Model whose attention sets heads, kv_heads, head_dim, v_head_dim, soft_cap and dtype "
        "where they are not given: a name of `longseq models` or its id on Hugging Face, or the "
        "path of a config.json (in a sweep file from the folder of the file).",
    ),
    "layer": Setting(
        Layer,
        "Kind of the model's layers whose shape and mask are taken.",
        otherwise="all layers in plans, and in decode of maxlen and scaling, beside the weights; "
        "else the shape of a full layer if there is one, and no mask",
    ),
    "batch": Setting(int, "Sequences per batch; in decode, concurrent requests.", 1, 1, 2**20),
    "heads": Setting(int, "Query heads.", 8, 1, 2**16),
    "kv_heads": Setting(
        int, "Key and value heads, a divisor of heads; 0: as many as heads.", 0, 0, 2**16
    ),
    "head_dim": Setting(int, "Elements per head.", 64, 1, 2**16),
    "v_head_dim": Setting(
        int, "Elements per head of v and the output; 0: as many as head_dim.", 0, 0, 2**16
    ),
    "dtype": Setting(
        DTypeName,
        "Element type of q, k, v and the output; fp32, bf16 and fp16 are short names. On cuda the "
        "default is bfloat16.",
        "float32",
    ),
    "causal": Setting(bool, "Mask keys after the query's position, as mask causal does.", False),
    "mask": Setting(
        str,
        "Keys that a query sees: full, causal, sliding-window:4k, prefix:8k, documents:4k (packed, "
        "causal; or lengths with commas, or chatqa2), full-documents:4k, chunked:8k; without one, "
        "causal decides.",
    ),
    "soft_cap": Setting(
        float, "Cap c of scores z, c·tanh(z/c), before the mask; Gemma 2: 50.", None, 0.01, 1e6
    ),
    "mode": Setting(
        Mode,
        "Kind of pass. forward: one forward pass; train: forward and backward; decode: new tokens "
        "against a KV cache.",
        "forward",
    ),
    "latent": Setting(
        str,
        "In decode, what latent attention (MLA) caches of a token instead of kv_heads heads: a key "
        "of 512+64 elements, whose first 512 are the value; 512+64/192 has the head_dim of the "
        "model, too, for the scale of scores, 128 + 64 by default.",
    ),
    "new_tokens": Setting(
        int,
        "Tokens that a step of mode decode adds, the last ones of the cache; a few for speculative "
        "decoding. 0: 1 in decode, none in other modes.",
        0,
        0,
        2**20,
    ),
    "sink": Setting(
        bool,
        "Add a learnable number of each query head to the sum of its softmax, as gpt-oss does.",
        False,
    ),
    "kv_dtype": Setting(
        KVDtype,
        "Quantise the cache of mode decode: int8 or fp8 (e4m3), with a scale for each KV head and "
        "128 tokens.",
    ),
}
"""Shape of q, k, v and the kind of pass."""

TRIAL = {
    "device": Setting(DeviceChoice, "auto: cuda if each rank can have one, else cpu.", "auto"),
    "world_size": Setting(
        int, "Ranks, one process each. `longseq launch` sets another default.", 1, 1, MAX_RANKS
    ),
    "memory_budget": Setting(
        int,
        "Memory that each rank may allocate beyond the idle process with torch loaded, in bytes, "
        "KiB, MiB, GiB, kB, MB or GB; on cuda the context and NCCL count, too; none: 80 % of what "
        "is free, on cpu divided by the ranks of a host.",
        unit="bytes",
    ),
    "time_budget": Setting(
        float, "Time that one pass may take, in s, ms, us, min or h; none: no limit.", unit="s"
    ),
    "repeats": Setting(
        int, "Timed passes at most; 0: only find out if one pass fits.", 30, 0, 10**6
    ),
    "time_cap": Setting(
        float, "Time after which at most one pass starts, in s, ms, us, min or h.", 2.0, unit="s"
    ),
    "threads": Setting(
        int, "CPU threads of each rank; none: the ranks share the cores.", None, 1, 2**12
    ),
    "seed": Setting(int, "Seed of the random inputs.", 0, 0, 2**63 - 1),
    "keep": Setting(
        Keep,
        "Tensors kept by a pass. all: what autograd keeps; inputs: only q, k, v, the rest is "
        "recomputed in backward; nothing: outputs overwrite inputs (in place).",
        "all",
    ),
    "allocator": Setting(
        Allocator,
        "expandable: segments that grow (CUDA); fresh: timed passes write to memory that the "
        "process has not used yet (CPU), by default to warm memory.",
        "default",
    ),
    "timing": Setting(
        Timing,
        "State before a timed pass. warm: caches as the last pass left them; cold: flushed, by "
        "writing twice the size of the last-level cache; graph: warm, and the pass is the replay "
        "of a CUDA graph (one rank).",
        "warm",
    ),
    "dense_kernel": Setting(
        str,
        "Kernel of the dense attention with which a sparse one is compared. same: that of the "
        "sparse one; auto: the fastest; sdpa: torch's choice; or a kernel of `longseq list`.",
        SAME_KERNEL,
    ),
}
"""How a workload is run: device, ranks, limits."""

SHAPE = WORKLOAD | {"keep": TRIAL["keep"]}
"""Settings of `maxlen`, `plan` and `scaling` for the workload."""

SEARCH = {
    "memory_budget": TRIAL["memory_budget"],
    "time_budget": replace(TRIAL["time_budget"], default="10s"),
    **{name: TRIAL[name] for name in ("device", "allocator", "threads", "seed")},
}
"""Settings of commands that search for lengths."""
