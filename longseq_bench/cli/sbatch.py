"""The Slurm job that checks a plan: a search for the longest sequence up to the planned one."""

import math
import re
import shlex

from longseq_bench.core.bounds import divisors
from longseq_bench.core.units import format_tokens
from longseq_bench.search.prediction import Prediction

MIN_TIME_BUDGET_S = 60
TIME_FACTOR = 6
"""A pass may take this many times the predicted time: a rate from a profile may be that wrong."""


def format_sbatch(plan: Prediction, gpus_per_node: int, options: list[str]) -> str:
    """Return the text of an sbatch file with one task per node.

    options: implementation options NAME=VALUE of the plan.
    """
    trial = plan.trial
    # launch refuses a world that does not fill its nodes equally
    per_node = max(n for n in divisors(trial.world_size) if n <= gpus_per_node)
    tokens = format_tokens(trial.workload.seq_len)
    # an own function is a path, and Slurm puts the name of the job into that of a file
    name = re.sub(r"[^\w.-]+", "-", trial.implementation, flags=re.ASCII)
    gpus = [f"#SBATCH --gpus-per-node={per_node}"] if trial.device == "cuda" else []
    lines = [
        "#!/bin/bash",
        f"# Checks a prediction: {tokens} tokens with {name}.",
        "# Add what your cluster needs: --account, --partition, --time.",
        f"#SBATCH --job-name=longseq-{name}",
        f"#SBATCH --nodes={trial.world_size // per_node}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        "# Whole nodes: else Slurm gives a task one core, and other jobs disturb the measurement.",
        "#SBATCH --exclusive",
        "# All memory of a node: some clusters give less by default, also to an exclusive job.",
        "#SBATCH --mem=0",
        "# After a preemption or a failure of a node it runs again. Finished records count only if",
        "# its first node is the same host, with the same cores, memory and GPUs.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        "",
        "# A requeued job keeps its number, and so its results folder.",
        f"srun longseq launch --nproc-per-node {per_node} -- \\",
        f"    {shlex.join(_command(plan, options))} \\",
        f"    --out results/longseq-{name}-$SLURM_JOB_ID",
        "code=$?",
        "# Slurm may send SIGTERM some time before a preemption. It runs only those jobs again",
        "# that have not ended when this time is over.",
        "[ $code -ne 143 ] || sleep 600",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _command(plan: Prediction, options: list[str]) -> list[str]:
    """Return the words of the search; it stops at the planned length."""
    trial, w = plan.trial, plan.trial.workload
    words = {
        "--impl": trial.implementation, "--device": trial.device, "--dtype": w.dtype,
        "--heads": w.heads, "--kv-heads": w.kv_heads, "--head-dim": w.head_dim, "--batch": w.batch,
        "--mode": w.mode, "--keep": trial.keep, "--world-size": trial.world_size,
        "--memory-budget": trial.memory_budget, "--ceiling": w.seq_len,
        "--time-budget": f"{max(MIN_TIME_BUDGET_S, math.ceil(TIME_FACTOR * plan.times.total))}s",
    }  # fmt: skip
    chosen = [word for assignment in options for word in ("-o", assignment)]
    flags = [text for pair in words.items() for text in map(str, pair)]
    if w.decode:
        flags += ["--new-tokens", str(w.new_tokens)]
    if w.v_head_dim != w.head_dim:
        flags += ["--v-head-dim", str(w.v_head_dim)]
    mask = ["--mask", w.mask] if w.mask else ["--causal"] if w.causal else []
    return ["maxlen", *flags, *mask, *chosen]
