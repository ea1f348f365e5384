"""The longest context of whole models, planned and measured: `python -m benchmarks.whole_model`.

Four models with the layers of published ones and small widths: Llama 3 (all layers are full),
Gemma 3 (five sliding ones for each full one), Llama 4 (three chunked ones) and Qwen3-Next (three
linear ones, which keep no cache). `plan` predicts the longest context in decode beside the weights;
`maxlen` allocates the caches of all layers and runs a step over them. The exit code is 1 if a
measured length is not within 3 % of the planned one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import longseq_bench
from longseq_bench.config.models import load_model
from longseq_bench.core.model_files import describe_layers
from longseq_bench.core.units import format_bytes, format_seconds

LIMIT = 0.03

_COMMON: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000}
_COMMON |= {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "torch_dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3": {"model_type": "llama", "num_hidden_layers": 32},
    "gemma-3": {"model_type": "gemma3_text", "num_hidden_layers": 48, "sliding_window": 1024},
    "llama-4": {"model_type": "llama4_text", "num_hidden_layers": 48, "num_local_experts": 1},
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "layer_types": 12 * [*3 * ["linear_attention"], "full_attention"],
    },
}


def compare(name: str, folder: Path, memory: str, implementation: str) -> float:
    """Print a line for a model; return how far the measured length is from the planned one."""
    (folder / f"{name}.json").write_text(json.dumps(_COMMON | MODELS[name]))
    model = str(folder / f"{name}.json")
    shape = load_model(model)
    given: dict[str, Any] = {"model": model, "mode": "decode", "progress": False}
    plan = longseq_bench.plan(implementation, gpu="cpu", memory=memory, **given)
    planned = plan.predictions[0].trial.workload.seq_len
    (row,) = longseq_bench.maxlen(implementation, memory_budget=memory, **given).maxima
    error = row.max_tokens / planned - 1
    weights = format_bytes(2 * shape.parameters) if shape.parameters else "unknown"
    print(
        f"{name:11} {planned:>9,} {row.max_tokens:>9,} {row.first_failure or 0:>9,} {error:>+7.2%} "
        f"{row.limited_by} {row.runs} runs {format_seconds(row.pass_time_s or 0.0):>8}  "
        f"{weights:>8}  {describe_layers(shape.kinds)}",
        flush=True,
    )
    return error


def main(arguments: Sequence[str]) -> int:
    """Compare all models; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="512MiB", help="Memory of a rank.")
    parser.add_argument("--impl", default="ring", help="Implementation.")
    asked = parser.parse_args(arguments)
    print(f"{asked.impl}, decode, bfloat16, {asked.memory} a rank")
    print(
        "model         planned  measured     fails   error limited by, runs, step, weights, layers"
    )
    with TemporaryDirectory() as folder:
        errors = [compare(name, Path(folder), asked.memory, asked.impl) for name in MODELS]
    return int(max(map(abs, errors)) > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
