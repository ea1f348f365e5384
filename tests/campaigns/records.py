"""Hostile files of records: every field of a valid record is damaged in turn.

    python -m tests.campaigns.records --count 1000 --seed 7

A file has valid records and some that were mutated: numbers that nothing can measure, text or
`true` for a number, missing and unknown fields, other types, broken bytes. `verify` and two other
commands (`report` of all kinds, `show`, `compare`) read it. Exit code 1 on a traceback, on a
command that takes more than 10 s, and if a line with nonsense is read as a record.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from longseq_bench.cli import run
from longseq_bench.core.model import SCHEMA, Record
from longseq_bench.core.record_line import write_line
from longseq_bench.store import RECORDS, read
from tests import make
from tests.campaigns import print_failures

LIMIT_S = 10

NONSENSE = (
    float("inf"), float("-inf"), float("nan"), -1, -0.25, 2**64, 10**30, 1e300, "12", "0.1", "many",
    True, False, [], [1], {}, {"a": 1},
)  # fmt: skip
"""Values that no number of a record may have."""

ODD = (
    None, "", "x", "full", "\x1b[31m", "=1+1", "\ud800", "a" * 10_000, 0, 1, 7, 1.5, *NONSENSE,
    [None], [[]], ["a", 1], {"0": 5}, {"0": [1, None]}, {"": ""}, 2**63, 1e-300,
)  # fmt: skip
"""Values that a field may have or not; no command may end with a traceback."""

FREE = (("outcome", "facts"), ("trial", "options"))
"""Parts that may hold any value."""

FACTS = ("stacks", "every_row_checked", "dense", "dense_kernel", "heap", "errors", "kernel")


def make_records() -> list[Record]:
    """Return records of every kind: sweeps, ranks, sparse, decode, searches, failures."""
    sparse = {"sparsity": 0.9, "pattern": "local-window"}
    ring = make.trial("ring", world_size=2, options={"chunk": 64, "stages": (1, 2)})
    base = make.trial("block-sparse", options=sparse, memory_budget=2**26)
    decode = make.trial("sdpa", mode="decode", kv_heads=2, causal=True)
    here = make.environment(gpus=("H200",), load=(1.0, 2.0, 3.0), power_limits_w=(700.0, None))
    known = {"flops": 1e9, "own_tokens": 64.0, "checked_rows": 8.0, "checked_passes": 2.0}
    hang = {"stacks": {"0": ["a.py:1", "b.py:2"], "1": "c.py:3"}}
    return [
        make.record(came_to=make.measured(**known)),
        make.record(make.trial(round=1), make.measured(0.2), where=here),
        make.record(make.trial("dense", time_budget=2.0), make.measured(peak=2**30)),
        make.record(ring, make.measured(ranks=2, bytes_sent=9.0, compute_time=[0.05] * 10)),
        make.record(ring.replace(seed=1), make.outcome("hang", "no progress", "forward", hang)),
        make.record(base, make.outcome(
            facts={"dense": "measured", "every_row_checked": ["ramp"], "kernel": "native"},
            time=[0.1] * 9, dense_time=[0.3] * 9, density_achieved=0.1, density_asked=0.1,
            flops=1e8, dense_flops=1e9, peak=4096.0, max_error=1e-6, error_of_allowed=0.1,
        )),
        make.record(decode, make.measured(bytes_to_read=1e6, copy_bandwidth=1e9)),
        make.record(came_to=make.outcome("wrong", "too far", "check", max_error=float("inf"))),
        make.step(2048), make.step(4096, "oom"), make.step(3072, purpose="edge"),
        make.record(base, make.measured(), purpose="density"),
        make.record(base.replace(options={**sparse, "sparsity": 0.5}),
                    make.outcome("timeout", "too slow", "time"), purpose="density"),
        make.record(foreseen={"peak_bytes": 10, "seconds": 0.5, "rate": "guess"},
                    predicted_tokens=99),
    ]  # fmt: skip


Where = tuple[str | int, ...]


def find_places(data: Any, above: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Yield the path and the value of every part of a JSON document."""
    items = enumerate(data) if isinstance(data, list) else data.items() if data else ()
    for key, value in items:
        yield (*above, key), value
        if isinstance(value, (dict, list)) and value:
            yield from find_places(value, (*above, key))


def mutate(line: bytes, rng: random.Random) -> tuple[bytes, str, bool]:
    """Return a damaged line, what was done, and True if it must not be read as a record."""
    data = json.loads(line)
    del data["checksum"]
    how = rng.choice(("value", "value", "value", "fact", "missing", "unknown", "bytes", "digit"))
    if how in ("bytes", "digit"):
        return _damage_bytes(line, how, rng)
    places = list(find_places(data))
    where, old = rng.choice(places)
    part = data
    for key in where[:-1]:
        part = part[key]
    is_wrong = False
    if how == "value":
        is_number = isinstance(old, (int, float)) and not isinstance(old, bool)
        new = rng.choice(NONSENSE if is_number and rng.random() < 0.7 else ODD)
        is_wrong = is_number and _is_nonsense(new, where, data)
        part[where[-1]] = copy.deepcopy(new)
        what = f"{'.'.join(map(str, where))} = {str(new)[:40]!r}"
    elif how == "fact":
        name = rng.choice(FACTS)
        data["outcome"]["facts"][name] = copy.deepcopy(rng.choice(ODD))
        what = f"fact {name} = {str(data['outcome']['facts'][name])[:40]!r}"
    elif how == "missing":
        del part[where[-1]]
        what = f"no {'.'.join(map(str, where))}"
    else:
        name = rng.choice(("extra", "checksum", "schema ", "\x00"))
        data[name] = rng.choice((1, "x", None))
        is_wrong, what = True, f"unknown field {name!r}"
    return _write(data, rng), what, is_wrong


def _is_nonsense(new: Any, where: Where, data: dict[str, Any]) -> bool:
    if where[:2] in FREE:
        return False
    if isinstance(new, (bool, str, list, dict)):
        return True
    if new is None or 0 <= new < 2**64:
        return False
    if "samples" in where:
        # FLOPs are computed and may be more; errors of a failed trial may be infinite
        one = data["outcome"]["measurements"][where[2]]
        is_large_flops = one["unit"] == "FLOP" and 0 <= new < 2**128
        return not is_large_flops and not (one["name"] == "max_error" and "wrong" in str(data))
    return True


def _write(data: dict[str, Any], rng: random.Random) -> bytes:
    """Return the line of a document: of a schema without checksums, or with one that matches."""
    is_checked = rng.random() < 0.5
    if not is_checked and data.get("schema") == SCHEMA:
        data["schema"] = SCHEMA - 1
    body = json.dumps(data, separators=(",", ":")).encode()
    if not is_checked:
        return body + b"\n"
    from longseq_bench.core import record_line

    return body[:-1] + record_line._FIELD + record_line._hash(body[:-1]) + b'"}\n'


def _damage_bytes(line: bytes, how: str, rng: random.Random) -> tuple[bytes, str, bool]:
    if how == "digit":
        digits = [at for at, byte in enumerate(line) if chr(byte).isdigit()]
        at = rng.choice(digits)
        other = (line[at] - 48 + rng.randrange(1, 10)) % 10 + 48
        return line[:at] + bytes([other]) + line[at + 1 :], f"another digit at {at}", True
    at = rng.randrange(1, len(line) - 1)  # an empty line is none
    bad: bytes = rng.choice((
        b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"[" * 100_000, b"9" * 5_000, b"}", b'"',
        b"\xe2\x80\xae",
    ))  # fmt: skip
    if rng.random() < 0.3:
        return line[:at] + b"\n", f"cut at {at}", True
    return line[:at] + bad + line[at:], f"{bad[:8]!r} at {at}", True


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def draw_commands(rng: random.Random, folder: Path, out: Path, formats: str) -> list[list[str]]:
    """Return `verify` and two other command lines that read a folder of records."""
    name, written = str(folder), rng.choice(formats.split(","))
    others = [
        ["report", name, "--out", str(out), "--kind", "all", "--format", written],
        ["report", name, "--out", str(out), "--format", "terminal"],
        ["show", name, "--json"],
        ["show", name, "--where", "tokens>=1k", "--sort", "time"],
        ["compare", name, name, "--json", "--across-machines"],
    ]
    return [["verify", name, "--json"], *rng.sample(others, 2)]


def try_file(rng: random.Random, folder: Path, formats: str) -> Iterator[str]:
    """Write one hostile file, read it with three commands, and yield what is wrong."""
    lines = [write_line(record) for record in make_records()]
    mutated = {
        at: mutate(lines[at], rng) for at in rng.sample(range(len(lines)), rng.randint(1, 4))
    }
    separate = {at: line.replace(b"\n", b" ")[:-1] + b"\n" for at, (line, _, _) in mutated.items()}
    written = [separate.get(at, line) for at, line in enumerate(lines)]
    folder.mkdir()
    (folder / RECORDS).write_bytes(b"".join(written))
    done = "; ".join(f"line {at + 1}: {what}" for at, (_, what, _) in sorted(mutated.items()))
    try:
        with time_limit(LIMIT_S):
            found = read(folder)
    except Exception as error:
        yield f"{done}: {type(error).__name__}: {error}"
        return
    # lines of a schema that is newer are not read either
    skipped = {*found.broken, *(line for lines in found.newer.values() for line in lines)}
    for at, (_, what, is_wrong) in mutated.items():
        if is_wrong and at + 1 not in skipped:
            yield f"nonsense was read: line {at + 1}: {what}"
    for command in draw_commands(rng, folder, folder / "out", formats):
        text = StringIO()
        try:
            with time_limit(LIMIT_S), redirect_stdout(text), redirect_stderr(text):
                code = run(command)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"
            yield f"{command[0]}: {type(error).__name__}: {error} ({place}); {done}"
            continue
        if code not in (0, 2) and not (code == 1 and command[0] == "verify"):
            yield f"{command[0]}: exit code {code}; {done}"


def find_failures(count: int, seed: int, formats: str = "md,csv,json,html") -> Iterator[str]:
    """Try `count` hostile files and yield what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            # each file has its own seed, so that one can be tried again
            rng, folder = random.Random(f"{seed} {number}"), Path(place, f"{number}")
            for problem in try_file(rng, folder, formats):
                yield f"file {number}: {problem}"
            shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="Number of files.")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--formats", default="md,csv,json,html")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.count:,} files", flush=True)
    return print_failures(find_failures(given.count, given.seed, given.formats))


if __name__ == "__main__":
    sys.exit(main())
