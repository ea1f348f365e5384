"""Damaged files of records: every field of a valid record is damaged in turn.

    python -m tests.campaigns.records --count 1000 --seed 7

A file has valid records and some that were mutated: samples that nothing can measure, missing and
unknown fields, other types, broken bytes. Two commands (`report` of all kinds, `show`, `compare`)
read it. Exit code 1 on a traceback, on a command that takes more than 10 s, and if a damaged line
is read as a record.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from longseq_bench.cli import run
from longseq_bench.core.model import SCHEMA, Record
from longseq_bench.store import RECORDS, add_checksum, load, write_line
from tests import make
from tests.campaigns import Hang, limited
from tests.reports.examples import rich, sparser

NONSENSE = (float("inf"), float("-inf"), float("nan"), -1, -0.25, "many", [], [1], {}, {"a": 1})
"""Values that no sample may have."""

ODD = (
    None, True, False, "", "x", "full", "\x1b[31m", "=1+1", "a" * 10_000, 0, 1, 7, 1.5, "12",
    [], [None], ["a", 1], {}, {"0": 5}, {"0": [1, None]}, 2**40, 1e-300,
)  # fmt: skip
"""Values that a field may have or not; no command may end with a traceback."""

FACTS = ("stacks", "every_row_checked", "dense", "dense_kernel", "errors", "kernel")


def make_records(rng: random.Random) -> list[Record]:
    """Return some of the reports' records, and one of each kind that those lack."""
    options = {"sparsity": 0.5, "pattern": "local-window"}
    sparse = make.trial("block-sparse", options=options, memory_budget=2**26)
    decode = make.trial("sdpa", mode="decode", kv_heads=2, causal=True)
    here = make.environment(gpus=("H200",), load=(1.0, 2.0, 3.0), power_limits_w=(700.0, None))
    checked = {"dense_kernel": "cudnn", "every_row_checked": ["ramp"], "kernel": "native"}
    measured = make.measured(bytes_to_read=1e6, copy_bandwidth=1e9).model_copy(
        update={"facts": checked}
    )
    return [
        *rng.sample([*rich(), *sparser()], 10),
        make.record(decode, measured, where=here, foreseen={"peak_bytes": 10, "seconds": 0.5}),
        make.record(came_to=make.outcome("wrong", "too far", "check", max_error=float("inf"))),
        make.record(sparse, make.outcome("timeout", "too slow", "time"), purpose="density"),
    ]


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
    how = rng.choice(("value", "value", "value", "fact", "missing", "unknown", "bytes", "digit"))
    if how in ("bytes", "digit"):
        return _damage_bytes(line, how, rng)
    data = json.loads(line)
    del data["checksum"]
    places = [where for where, _ in find_places(data)]
    if data["purpose"] == "density":  # its steps have a sparsity
        places = [where for where in places if where[:2] != ("trial", "options")]
    where = rng.choice(places)
    part = data
    for key in where[:-1]:
        part = part[key]
    is_wrong = False
    if how == "value":
        is_sample = where[0] == "outcome" and where[-2:-1] == ("samples",)
        new = rng.choice(NONSENSE if is_sample else ODD)
        # errors of a failed trial may be infinite
        is_wrong = is_sample and data["outcome"]["status"] == "ok"
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
        name = rng.choice(("extra", "checksum", "schema "))
        data[name] = rng.choice((1, "x", None))
        is_wrong, what = True, f"unknown field {name!r}"
    is_checked = rng.random() < 0.5
    if not is_checked and data.get("schema") == SCHEMA:
        data["schema"] = SCHEMA - 1
    document = json.dumps(data, separators=(",", ":")).encode()
    return add_checksum(document) if is_checked else document + b"\n", what, is_wrong


def _damage_bytes(line: bytes, how: str, rng: random.Random) -> tuple[bytes, str, bool]:
    if how == "digit":
        digits = [at for at, byte in enumerate(line) if chr(byte).isdigit()]
        at = rng.choice(digits)
        other = (line[at] - 48 + rng.randrange(1, 10)) % 10 + 48
        return line[:at] + bytes([other]) + line[at + 1 :], f"another digit at {at}", True
    at = rng.randrange(1, len(line) - 1)  # an empty line is none
    bad: bytes = rng.choice((b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"9" * 5_000, b"}", b'"'))
    if rng.random() < 0.3:
        return line[:at] + b"\n", f"cut at {at}", True
    return line[:at] + bad + line[at:], f"{bad[:8]!r} at {at}", True


def draw_commands(rng: random.Random, folder: Path, out: Path, formats: str) -> list[list[str]]:
    """Return two command lines that read a folder of records."""
    name, written = str(folder), rng.choice(formats.split(","))
    known = [
        ["report", name, "--out", str(out), "--kind", "all", "--format", written],
        ["report", name, "--out", str(out), "--format", "terminal"],
        ["show", name, "--json"],
        ["show", name, "--where", "tokens>=1k", "--sort", "time"],
        ["compare", name, name, "--json", "--across-machines"],
    ]
    return rng.sample(known, 2)


def try_file(rng: random.Random, folder: Path, formats: str) -> Iterator[str]:
    """Write one damaged file, read it with two commands, and yield what is wrong."""
    written = [write_line(record) for record in make_records(rng)]
    mutated = {}
    for at in rng.sample(range(len(written)), rng.randint(1, 4)):
        line, what, is_wrong = mutate(written[at], rng)
        written[at] = line
        mutated[at + 1] = what, is_wrong
    folder.mkdir()
    (folder / RECORDS).write_bytes(b"".join(written))
    done = "; ".join(f"line {at}: {what}" for at, (what, _) in sorted(mutated.items()))
    try:
        with limited():
            found = load(folder)
    except (Exception, Hang) as error:
        yield f"{done}: {type(error).__name__}: {error}"
        return
    for at, (what, is_wrong) in mutated.items():
        if is_wrong and at not in found.reasons:
            yield f"a damaged line was read: line {at}: {what}"
    for command in draw_commands(rng, folder, folder / "out", formats):
        text = StringIO()
        try:
            with limited(), redirect_stdout(text), redirect_stderr(text):
                code = run(command)
        except (Exception, Hang) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"
            yield f"{command[0]}: {type(error).__name__}: {error} ({place}); {done}"
            continue
        if code not in (0, 2):
            yield f"{command[0]}: exit code {code}; {done}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="Number of files.")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--formats", default="md,csv,json,html")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.count:,} files", flush=True)
    count = 0
    with tempfile.TemporaryDirectory() as place:
        for number in range(given.count):
            # each file has its own seed, so that one can be tried again
            rng, folder = random.Random(f"{given.seed} {number}"), Path(place, f"{number}")
            for problem in try_file(rng, folder, given.formats):
                count += 1
                print(f"file {number}: {problem}", flush=True)
            shutil.rmtree(folder)
    print(f"{count:,} failures")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
