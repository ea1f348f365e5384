"""Which faults the check sees: run each kind of tests/plugins/faulty.py as a trial.

    export PYTHONPATH=$PWD:$PWD/tests/plugins
    python -m tests.worker.faults --write

Prints the status of each kind of fault in three dtypes, on one rank and on two, with the reason.
`--write` writes the table into docs/what-the-check-sees.md. Takes some minutes on two cores.
`--kinds WORDS` runs kinds whose name has a match, `--device cuda` those of one rank on a GPU.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longseq_bench.core.model import OptionValue, Outcome, Trial
from longseq_bench.launchers.local import LocalLauncher
from tests.plugins import faulty
from tests.trials import complete, run_trial

PAGE = Path(__file__).parents[2] / "docs/what-the-check-sees.md"
BEGIN, END = "<!-- begin: tests/worker/faults.py -->", "<!-- end -->"
DTYPES = "float32", "bfloat16", "float16"
STAGES = {
    "Inputs": (*faulty.INPUTS, *faulty.CACHES, "kv heads in turn"),
    "Overwritten inputs": tuple(faulty.OVERWRITES),
    "Visible keys": (*faulty.MASKS, "list of the next KV head"),
    "Weights": tuple(faulty.WEIGHTS),
    "Output": tuple(faulty.OUTPUTS),
    "Gradients": (*faulty.GRADIENTS, "keys of other ranks have no gradient"),
    "Results that a pass does not compute": (*faulty.RESULTS, "layout chosen once"),
}
ON_RANKS = ("other ranks", "last rank", "every rank")
IN_TRAINING = (*faulty.GRADIENTS, "keys of other ranks have no gradient", "sink without a gradient",
               "gradient without the sum of weights", "scores clipped at 9",
               "gradient without the slope of the soft cap")  # fmt: skip
LATENT = {"mode": "decode", "causal": False, "latent": "48+16/40", "kv_heads": 1, "head_dim": 64}
SHAPES = {
    "values are the last elements of a latent": LATENT,
    "scores of a latent scaled by its size": LATENT,
    "beyond 65,536 tokens": {"tokens": 66_000, "heads": 1, "kv_heads": 1, "head_dim": 8},
    "batch row 0 for all": {"batch": 2},
    "first token of a document sees the one before": {"mask": "documents:50", "causal": False},
    "chunks begin one token late": {"mask": "chunked:50", "causal": False},
    "last token of a prefix sees one key too many": {"mask": "prefix:300", "causal": False},
    **{kind: {"sink": True} for kind in faulty.WEIGHTS if kind.startswith("sink")},
    **{kind: {"soft_cap": 50.0} for kind in faulty.CAPS},
    **{kind: {"mode": "decode", "kv_dtype": "int8", "causal": False} for kind in faulty.CACHES},
}


SPARSE: dict[str, tuple[str, dict[str, OptionValue]]] = {
    "layout chosen once": ("one-layout", {"sparsity": 0.6}),
    "list of the next KV head": ("next-list", {"pattern": "indices", "sparsity": 0.6}),
}
"""Implementations with a fault of their own, with their options."""


@dataclass(frozen=True)
class Case:
    """One trial of a kind of fault."""

    kind: str
    dtype: str
    ranks: int

    @property
    def is_possible(self) -> bool:
        """False for faults between ranks on one, a length that is slow on two, and no faults."""
        if self.kind == "weights rounded to bfloat16" and self.dtype == "bfloat16":
            return False  # as fused kernels do
        if any(words in self.kind for words in ON_RANKS):
            return self.ranks > 1
        if self.kind in (*SPARSE, "a clock that runs slowly"):
            return self.ranks == 1
        return self.kind not in SHAPES or "tokens" not in SHAPES[self.kind] or self.ranks == 1


def run_case(launcher: LocalLauncher, case: Case, device: str = "cpu") -> Outcome:
    """Run one trial: 1,300 tokens, causal, four heads on two KV heads, three timed passes."""
    shape = {"tokens": 1300, "heads": 4, "kv_heads": 2, "head_dim": 32, **SHAPES.get(case.kind, {})}
    tokens = shape.pop("tokens")
    mode = shape.pop("mode", "train" if case.kind in IN_TRAINING else "forward")
    with tempfile.TemporaryDirectory() as folder:
        name, options = "faulty", dict[str, OptionValue](kind=case.kind, folder=folder)
        if case.kind in SPARSE:
            name, options = SPARSE[case.kind]
        trial = complete(
            launcher, name, tokens, options, mode=mode, repeats=3, dtype=case.dtype,
            world_size=case.ranks, device=device, **{"causal": True, **shape},
        )  # fmt: skip
        outcome = run_trial(launcher, trial)
        return run_again(launcher, trial) if case.kind in faulty.LOOKED_UP else outcome


def run_again(launcher: LocalLauncher, trial: Trial) -> Outcome:
    """Run the next round of a trial whose results may be looked up.

    The fact `hits` counts those that were, without those of the inputs that check every row.
    """
    outcome = run_trial(launcher, trial.replace(round=1))
    hits = Path(str(trial.options["folder"]), faulty.HITS)
    count = hits.stat().st_size if hits.exists() else 0
    if faulty.LOOKED_UP[str(trial.options["kind"])]:
        count -= trial.world_size * len(outcome.facts.get("every_row_checked", ()))
    return outcome.model_copy(update={"facts": {**outcome.facts, "hits": count}})


def is_right(case: Case, outcome: Outcome) -> bool:
    """Return True if a fault is seen; if there is none, or no result was looked up, if it is ok."""
    if case.kind in ("none", *faulty.LOOKED_UP):
        return outcome.status == "ok" and not outcome.facts.get("hits")
    return outcome.status == "wrong"


def cases(kinds: Sequence[str], dtypes: Sequence[str], ranks: Sequence[int]) -> Iterator[Case]:
    """Yield the possible cases."""
    for kind in kinds:
        for dtype in dtypes:
            yield from (c for c in (Case(kind, dtype, n) for n in ranks) if c.is_possible)


def table(found: dict[Case, Outcome]) -> str:
    """Return Markdown: a table for each stage, with a row for all kinds of equal verdicts."""
    lines = []
    for stage, kinds in STAGES.items():
        lines += [f"## {stage}", "", f"| Faults | {' | '.join(DTYPES)} |"]
        lines += ["| --- |" + " --- |" * len(DTYPES)]
        alike: dict[tuple[str, ...], list[str]] = {}
        for kind in kinds:
            alike.setdefault(tuple(_cell(found, kind, d) for d in DTYPES), []).append(kind)
        lines += [f"| {'; '.join(same)} | {' | '.join(of)} |" for of, same in alike.items()]
        lines.append("")
    return "\n".join(lines)


def _cell(found: dict[Case, Outcome], kind: str, dtype: str) -> str:
    of = {c.ranks: is_right(c, o) for c, o in found.items() if (c.kind, c.dtype) == (kind, dtype)}
    if not of:
        return "no fault"
    if kind in faulty.LOOKED_UP and all(of.values()):
        return "none looked up"
    if len(set(of.values())) == 1:
        return "seen" if all(of.values()) else "**not seen**"
    return ", ".join(f"{n} rank{'s' * (n > 1)}: {'seen' if seen else '**not seen**'}"
                     for n, seen in of.items())  # fmt: skip


def write(text: str) -> None:
    """Replace the part of the page between its marks."""
    page = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", page))


def main() -> int:
    """Run the cases; the exit code is 1 if a right implementation is called wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    every = ["none", *(k for stage in STAGES.values() for k in stage)]
    kinds = [kind for kind in every if re.search(args.kinds, kind)]
    ranks = (1, 2) if args.device == "cpu" else (1,)
    todo = list(cases(kinds, DTYPES, ranks))
    found: dict[Case, Outcome] = {}
    start, false_alarms, missed = time.monotonic(), 0, 0
    with LocalLauncher() as launcher:
        for i, case in enumerate(todo, 1):
            outcome = run_case(launcher, case, args.device)
            seen = is_right(case, outcome)
            false_alarms += case.kind == "none" and not seen
            missed += case.kind != "none" and not seen
            print(f"{' ' if seen else '!'} [{i}/{len(todo)}] {case.kind}, {case.dtype}, "
                  f"{case.ranks}: {outcome.status} {(outcome.reason or '')[:110]}",
                  flush=True)  # fmt: skip
            found[case] = outcome
    print(f"{len({*kinds} - {'none'})} kinds, {len(todo)} trials, {missed} not seen, "
          f"{false_alarms} false alarms, {time.monotonic() - start:.0f} s")  # fmt: skip
    if args.write:
        write(table(found))
    return int(false_alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
