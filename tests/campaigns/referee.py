"""Compare what this tree prints as JSON with what an earlier commit printed, on committed records.

    python -m tests.campaigns.referee 376c3d4
    python -m tests.campaigns.referee 376c3d4 --only plan

`report` (all kinds, rows and documents), `show`, `compare` and `plan` run in both trees. Every
difference is printed by its path in the JSON; those under `DROPPED` are counted only. The exit code
is 1 if any other is left.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GONE = "(absent)"

DROPPED: dict[str, str] = {
    r"^report .*: \.\w+\.json\.(figures|sections\[0\]\.points)": (
        "names in a sentence have fixed limits, words are not counted at run time"
    ),
    r"^report .*: \.\w+\.json\.sections\.[^.]*(\.charts|\.paragraphs|\.points)": (
        "charts that repeated another one are gone, and what a column means is said once"
    ),
    r"^report .*: \.\w+\.json\.sections\.What the columns mean$": (
        "one table has the meanings of all columns"
    ),
    r"^report .*\.json\.sections\.(Which attention for which length|Segments and dilation)": (
        "the fastest by length and the longest lengths answer it; rates are in labels"
    ),
    r"^report .*\.json\.sections\.Sparse and dilated attention\.tables": (
        "a share of ideal has its interval as a figure, not as text"
    ),
    r"^report .*\.json\.sections\.(Numeric error|Hang: )": (
        "What was checked has the errors, and records have the stacks"
    ),
    r"^report .*\.json\.sections\.(Answer|All implementations|No results|What the columns mean)": (
        "first screens have other tables, because sections are gone"
    ),
    r"^report .*\.json\.sections\.Capabilities": "a cell counts trials, and has no letter",
    r"^report .*\.json\.sections\.(Lengths swept|Longest lengths)\.tables": (
        "columns Least peak and Time per doubling are gone"
    ),
    r"^report .*\.json\.sections\.Where it begins to pay": (
        "no column Note; a computed dense time is in Against"
    ),
    r"^report .*\.json\.sections\.(One rank against several|Time, memory, rel.*)\.tables": (
        "speed-ups have their interval in one column, and no ratio to the row above"
    ),
    r"^report .*\.json\.sections\.Failures\.tables": (
        "failures are in the order of records; missing figures have reasons of the record alone"
    ),
    r"^report .*\.json\.sections\.Hardware and versions\.tables": "units of clocks are headings",
    r"^report .*\.json\.sections\.How to run it again": "a search names its time limit",
    r"^report .*: \.\w+\.json\.paragraphs": "a first screen says once what all rows share",
    r"^compare .*: \.message": "the sentence no longer lists what each side has",
    r"^(show|report|compare) .*\.timing": "the state before a timed pass is a setting",
    r"^(show|report) .*\]\.(memory_budget|time_budget|threads|fit_only|fingerprint|host|label)$": (
        "rows in JSON have all of their fields"
    ),
    r"^(show|report) .*\]\.(zero_rows|rank_bytes|rank_formulas|bytes_unlike|failure_reason)$": (
        "rows in JSON have all of their fields"
    ),
    r"^(show|report) .*\]\.(density_achieved|(exposed|speedup)_(low|high))$": (
        "rows in JSON have all of their fields"
    ),
    r"^(show|report) .*\]\.(cpu_time_s|sparsity_asked|error_of_allowed|bias|checked_\w+)$": (
        "figures of the check are measurements, and What was checked has them"
    ),
    r"^report .*\.charts.*\.(said|description)$": "a description of a chart is named so",
    r"^compare .*\.label$": "a label is that of reports",
    r"^plan .*\.hardware\.multiprocessors$": "a profile has no multiprocessors",
    r"^plan segments: ": (
        "segments on CUDA are gathered for a kernel of exact attention, no Triton kernel of spans"
    ),
    r"^plan .*: \.printed\.(answer|hardware\.kernels|results\[\d\]\.(rate_.*|.*_s|seconds))": (
        "rates are by kernel, head_dim, pass and mask, from measurements and newer figures"
    ),
    r"^plan exact-h100: .*\.options\.(stage|chunk|order|ring)": "options without a use are gone",
    r"^plan decode: \.printed\.(answer|results\[1\])": (
        "split-KV copies the positions of new tokens once, so a step needs 128 bytes less"
    ),
    r"^plan exact-h100: \.printed\.results\[3\]\.(memory_s|peak_bytes)": (
        "ring on one rank sums two pieces in the output, without a float32 tensor"
    ),
}
"""Differences that are meant: a regular expression for `command: path`, and the reason."""

PLANS = {
    "ring-h200": "--impl ring --gpu h200 --world-size 64 --dtype bfloat16 --heads 32 --kv-heads 8 "
    "--head-dim 128 --mode train",
    "exact-h100": "--impl ring --impl ulysses --impl collective --impl usp --gpu h100 "
    "--world-size 8 --dtype bfloat16 --heads 32 --kv-heads 8 --head-dim 128 --causal --target 1M",
    "sparse-h100": "--impl block-sparse -o sparsity=0.95,0.99 --gpu h100 --dtype bfloat16",
    "segments": "--impl dilated --impl hilbert --gpu gtx1080",
    "decode": "--impl sdpa --impl ring --gpu h100 --mode decode --model llama-3.1-8b",
    "model": "--impl ring --model llama-3.1-8b --gpu h100 --world-size 8 --mode train",
    "memory": "--impl sdpa --gpu h100 --memory 4GiB --mask sliding-window:4k",
}
PAIRS = (
    ("xeon2/maxlen_forward", "xeon2/maxlen_train"),
    ("xeon2/sparsity", "xeon2/sparsity"),
    ("xeon2/parallel", "xeon2/ranks"),
    ("epyc2/peers/sweep", "xeon2/quickstart"),
)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the arguments of each command."""
    for records in sorted((ROOT / "results").rglob("records.jsonl")):
        folder = str(records.parent.relative_to(ROOT))
        yield f"show {folder}", ["show", folder, "--json"]
        yield f"report {folder}", [
            "report", folder, "--kind", "all", "--format", "json", "--json", "--out",
        ]  # fmt: skip
    for first, second in PAIRS:
        arguments = ["compare", f"results/{first}", f"results/{second}", "--json"]
        yield f"compare {first} {second}", arguments
    for name, options in PLANS.items():
        yield f"plan {name}", ["plan", *options.split(), "--json"]


def run(tree: Path, arguments: list[str]) -> dict[str, Any]:
    """Return what a command of a tree prints and writes; its exit code and message if it fails."""
    with tempfile.TemporaryDirectory() as written:
        full = [*arguments, written] if arguments[-1] == "--out" else arguments
        done = subprocess.run(
            [sys.executable, "-m", "longseq_bench", *full],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return {"exit code": done.returncode, "message": done.stderr[-500:]}
        files = {path.name: json.loads(path.read_text()) for path in Path(written).rglob("*.json")}
        # `report --json` ends with lines on the files that it wrote
        printed, _ = json.JSONDecoder().raw_decode(done.stdout.lstrip())
        return {"printed": printed, **files}


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each difference between two JSON values, and both values in words."""
    before, after = _by_title(before), _by_title(after)
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            step = f"{path}.{key}"
            yield from differences(before.get(key, GONE), after.get(key, GONE), step)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif before != after:
        yield path, f"{_short(before)} -> {_short(after)}"


def _by_title(value: Any) -> Any:
    """Return sections as a dict by title, if no two have the same."""
    if not isinstance(value, list) or not all(
        isinstance(v, dict) and v.get("title") for v in value
    ):
        return value
    found = {one["title"].replace(".", " "): one for one in value}
    return found if len(found) == len(value) > 0 else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> int:
    """Compare the trees and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare JSON output with an earlier commit.")
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--only", default="", help="commands whose name contains this text")
    asked = parser.parse_args()
    left, dropped = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), asked.commit], check=True)
        try:
            for name, arguments in commands():
                if asked.only not in name:
                    continue
                found = list(differences(run(tree, arguments), run(ROOT, arguments)))
                for path, change in sorted(found):
                    where = f"{name}: {path}"
                    reason = next((r for p, r in DROPPED.items() if re.search(p, where)), None)
                    if reason:
                        dropped[reason] += 1
                        continue
                    left += 1
                    print(f"{where}: {change}", flush=True)
                print(f"{name}: {len(found)} differences", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    for reason, count in dropped.items():
        print(f"dropped on purpose: {count}, {reason}")
    print(f"{left} differences that are not meant")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
