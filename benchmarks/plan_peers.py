"""Compare the memory that a plan gives a model with hf-mem, vLLM's formula and DeepSpeed's.

python -m benchmarks.plan_peers STAGE3, with hf-mem importable and STAGE3 the file
deepspeed/runtime/zero/stage3.py of a source package of DeepSpeed.
"""

import ast
import sys
from pathlib import Path
from typing import Any

from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

from longseq_bench.config.models import load_model
from longseq_bench.core import model_files
from longseq_bench.core.files import load_table
from longseq_bench.core.model import Trial
from longseq_bench.core.model_shapes import ModelShape
from longseq_bench.search.model_memory import ModelPlan

MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-32b", "qwen3-30b-a3b", "mistral-nemo",
    "gemma-2-9b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3",
)  # fmt: skip
TOKENS, CHUNK, BLOCK, GPUS = 2**17, 2**13, 16, 8


def vllm_cache(shape: ModelShape) -> int:
    """Return the bytes of one request's cache: the specs of vllm/v1/kv_cache_interface.py.

    A full layer has pages of 16 tokens; one with a window has the window, a page and a chunk of the
    prefill (max_num_batched_tokens).
    """
    total = 0
    for kind in shape.kinds:
        tokens = TOKENS
        if kind.window:
            tokens = min(kind.window - 1 + CHUNK, TOKENS) + BLOCK
        total += kind.layers * -(-tokens // BLOCK) * BLOCK * kind.cached_elements() * 2
    return total


def zero3(path: str, parameters: int, largest: int) -> int:
    """Return the bytes of a GPU by estimate_zero3_model_states_mem_needs, without offload."""
    tree = ast.parse(Path(path).read_text())
    name = "estimate_zero3_model_states_mem_needs"
    found: list[ast.stmt] = [
        one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(found, []), path, "exec"), names)
    return int(names[name](parameters, largest, GPUS, cpu_offload=False)[1])


def main(stage3: str) -> None:
    """Print a row for each model: the sizes in GiB, and theirs divided by ours."""
    print(f"{'':14}cache of one request, 128k tokens  {'':8}training state, zero3, {GPUS} GPUs")
    print(f"{'':14}{'ours':>8}{'vLLM':>9}{'':7}{'hf-mem':>9}{'':7}{'ours':>9}{'DeepSpeed':>11}")
    for name in MODELS:
        shape = load_model(name)
        keys = model_files.read_keys(load_table("models.yaml")[name]["config"], {})
        cache = sum(
            kind.layers * kind.cached_elements() * min(TOKENS, kind.window or TOKENS) * 2
            for kind in shape.kinds
        )
        theirs = vllm_cache(shape), compute_safetensors_kv_cache_size(keys, "BF16", TOKENS)
        workload = {"seq_len": GPUS, "heads": 8, "head_dim": 64, "mode": "train"}
        trial = Trial.model_validate(
            {"implementation": "ring", "workload": workload | {"dtype": "bfloat16"}}
        ).replace(world_size=GPUS)
        memory = ModelPlan(shape).memory(trial)
        ours = (memory.weights or 0) + (memory.gradients or 0) + (memory.optimizer or 0)
        largest = keys["vocab_size"] * keys["hidden_size"]
        states = zero3(stage3, shape.parameters or 0, largest)
        columns = [f"{cache / 2**30:8.2f}"]
        columns += [f"{one / 2**30:9.2f}{one / cache:6.2f}x" for one in theirs]
        columns.append(f"{ours / 2**30:9.1f}{states / 2**30:11.1f}{states / ours:6.2f}x")
        print(f"{name:14}{''.join(columns)}")


if __name__ == "__main__":
    main(sys.argv[1])
