"""Settings of `maxlen` and `plan` alone: keywords of Python and options of the command line."""

from functools import partial
from pathlib import Path

from longseq_bench.core.settings import Checkpoint, Setting, Sharding
from longseq_bench.core.units import MAX_RANKS

_ranks = partial(Setting, int, low=1, high=MAX_RANKS)
MAXLEN = {
    "world_size": _ranks(
        "Ranks that share a sequence; on cuda each has a device.",
        otherwise="1, or all ranks of the launch under `longseq launch`",
    ),
    "ceiling": Setting(
        int,
        "Longest length to try, in tokens: 1M.",
        unit="tokens",
        otherwise="the maximum, twice the length whose q, k, v and output fill the budget",
    ),
    "fit_only": Setting(
        bool,
        "Also search for the longest length that fits in memory, with shortened loops, unchecked.",
        False,
    ),
    "shard": Setting(
        str,
        "Part of the searches to run, INDEX/COUNT: 2/4. The shards of a run have the same --out.",
        otherwise="all, or all shards of a folder of shards",
    ),
    "workers": Setting(
        str,
        "Searches that run side by side, each on devices of its own: a number; auto: as many as "
        "there are GPUs for.",
        "1",
    ),
}
PLAN = {
    "gpu": Setting(
        str, "Hardware profile by name, such as h100; cpu: this machine's processor.", "cpu"
    ),
    "memory": Setting(
        int,
        "Memory of the device that a rank may use, in bytes: 139GiB; tensors get what the CUDA "
        "context, cuBLAS and NCCL leave.",
        unit="bytes",
        otherwise="all memory of the profile",
    ),
    "target": Setting(
        int, "Tokens to plan for, of all ranks: 10M.", unit="tokens", otherwise="as many as fit"
    ),
    "world_size": _ranks(
        "Number of ranks; each has a device.",
        otherwise="1, or a node with --gpus-per-node, or those of --tp",
    ),
    "gpus_per_node": _ranks(
        "Devices of a node; more ranks are proposed in whole nodes.",
        otherwise="that of the profile, and any number of ranks",
    ),
    "sharding": Setting(
        Sharding,
        "With --model: what is split over the ranks that share the tokens. zero1: optimizer state; "
        "zero2: also gradients; zero3: also weights; none: nothing.",
        "zero3",
    ),
    "tp": _ranks(
        "With --model: ranks of a node that share heads and weights, a divisor of the world size; "
        "the rest of the world size shares the tokens.",
        1,
    ),
    "checkpoint": Setting(
        Checkpoint,
        "With --model, mode train: activations that are recomputed. full: all but a layer's input; "
        "selective: attention; none: no recomputation.",
        "full",
    ),
    "prefill_chunk": Setting(
        int,
        "With --model, mode decode: tokens of a prefill whose activations must fit, too (vLLM's "
        "max_num_batched_tokens).",
        unit="tokens",
        otherwise="those of a step of decoding",
    ),
    "hardware": Setting(
        Path, "YAML file with more hardware profiles.", otherwise="built-in ones only"
    ),
}
