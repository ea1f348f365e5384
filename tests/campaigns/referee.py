"""Compare what this tree prints as JSON with what an earlier commit printed, on committed records.

    python -m tests.campaigns.referee HEAD~1 --only plan --meant "plan decode: .*peak_bytes"

`report` (all kinds, rows and documents), `show`, `compare` and `plan` run in both trees. Every
difference is printed by its path in the JSON; those that are meant are counted only. The exit code
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
            "report", folder, "--kind", "all", "--format", "json", "--out",
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
        printed = json.loads(done.stdout) if "--json" in arguments else None
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
    parser.add_argument(
        "--meant", action="append", default=[],
        help="a regular expression for `command: path` of differences that are meant (repeatable)",
    )  # fmt: skip
    asked = parser.parse_args()
    left, meant = 0, Counter[str]()
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
                    if pattern := next((p for p in asked.meant if re.search(p, where)), ""):
                        meant[pattern] += 1
                        continue
                    left += 1
                    print(f"{where}: {change}", flush=True)
                print(f"{name}: {len(found)} differences", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    for pattern, count in meant.items():
        print(f"meant: {count}, {pattern}")
    print(f"{left} differences that are not meant")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
