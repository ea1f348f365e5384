"""A run in shards: the trials of each one, and their folders read as one run.

A shard has a folder of its own below that of the run: records, `shard.json`, and at its end an
empty file `finished`. Trials that reports compare are one part, in one shard: those of a workload
on a device, with all rounds; searches of an implementation with its options. The cut depends on the
trials alone, so that every machine comes to the same one.
"""

import re
from collections.abc import Sequence
from hashlib import sha256
from math import inf
from pathlib import Path

from pydantic import ValidationError

from longseq_bench.analysis.runs import group_by
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.errors import StoreError, UserError
from longseq_bench.core.model import Device, Frozen, Record, Trial, options_key
from longseq_bench.search.estimate import run_seconds
from longseq_bench.store import RECORDS, unwritable

FILE, FINISHED, FOLDERS = "shard.json", "finished", "shard-*-of-*"
FLOPS: dict[Device, float] = {"cpu": 1e11, "cuda": 1e14}
"""FLOP/s for which shards are balanced, the same for all machines: of a few cores, of a GPU."""


class Shard(Frozen):
    """One shard of a run, as `shard.json` in its folder describes it.

    index: from 1 to count.  run: hash of all trials of the run.
    parts: the position in the run of each part that belongs to the shard, by key.
    """

    index: int
    count: int
    run: str
    parts: dict[str, int]


def parse_shard(text: str) -> tuple[int, int]:
    """Return the index from 1 and the count of "2/4". Raises UserError for anything else."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", str(text).strip())
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise UserError(f"--shard {text} is no part of a run; write INDEX/COUNT, from 1/4 to 4/4")
    return index, count


def shard_folder(folder: Path | None, shard: str | None) -> Path | None:
    """Return the folder of a shard below that of its run; without a shard that of the run."""
    return folder / "shard-{}-of-{}".format(*parse_shard(shard)) if folder and shard else folder


def choose_shard(
    trials: Sequence[Trial], folder: Path | None, shard: str | None, settings: str, rounds: int = 0
) -> tuple[Path | None, list[Trial]]:
    """Return the folder that a run writes to, and the trials that it runs: all, or a shard's.

    folder: that of the run, in which the shard is described.  settings: those of the run that no
    trial has.  rounds: those of a sweep; 0: searches for the longest length.
    Raises UserError for a text that is no shard, StoreError for a folder of another run.
    """
    if folder and (folder / FILE).exists():
        raise StoreError(f"{folder} is the folder of one shard; name the folder above with --out")
    if not shard:
        return folder, list(trials)
    index, count = parse_shard(shard)
    parts = split_parts(trials, not rounds)
    costs = [part_seconds(part, not rounds) for part in parts.values()]
    positions = balance(costs, count)[index - 1]
    own = {key: i for i, key in enumerate(parts) if i in positions}
    # a default budget is that of the machine
    keys = [trial.model_copy(update={"memory_budget": None}).key for trial in trials]
    run = sha256(" ".join([settings, str(rounds), *keys]).encode()).hexdigest()[:16]
    place = shard_folder(folder, shard)
    if folder and place:
        _describe(Shard(index=index, count=count, run=run, parts=own), folder, place)
    return place, [trial for key in own for trial in parts[key]]


def balance(costs: Sequence[float], count: int) -> list[set[int]]:
    """Return the positions of the costs of each shard, so that their sums are about equal.

    The largest cost goes first, each to the smallest sum so far; the largest sum is at most 4/3 of
    the best one (Graham, 1969, Bounds on multiprocessing timing anomalies).
    """
    shards, sums = [set[int]() for _ in range(count)], [0.0] * count
    for position in sorted(range(len(costs)), key=lambda i: -costs[i]):
        smallest = sums.index(min(sums))
        shards[smallest].add(position)
        sums[smallest] += costs[position]
    return shards


def split_parts(trials: Sequence[Trial], is_search: bool) -> dict[str, list[Trial]]:
    """Return the trials that belong together, by a key that does not depend on the others."""
    return group_by(trials, lambda trial: _part_key(trial, is_search))


def part_seconds(part: Sequence[Trial], is_search: bool) -> float:
    """Return the predicted seconds of a round; searches count as equally long."""
    passes_s = [attention_flops(t.workload) / FLOPS[t.device] for t in part]
    return sum(
        1.0 if is_search else run_seconds(trial, min(pass_s, trial.time_budget or inf))
        for trial, pass_s in zip(part, passes_s, strict=True)
    )


def _part_key(trial: Trial, is_search: bool) -> str:
    if is_search:
        return f"{trial.implementation} {options_key(trial.options)}"
    # shapes that differ in their labels alone are measured once
    labels = {"model", "weights"}
    shape = trial.workload.model_dump_json(exclude=labels, exclude_defaults=True)
    return f"{trial.device} {shape}"


def _describe(shard: Shard, folder: Path, place: Path) -> None:
    """Write the description of a shard. Raises StoreError if the folder of its run has others."""
    if (folder / RECORDS).exists():
        raise StoreError(f"{folder} holds a run without shards; name another folder with --out")
    for other in read_shards(folder).values():
        _check_same_run(folder, shard, other)
    new = place / f"{FILE}.new"
    try:
        place.mkdir(parents=True, exist_ok=True)
        new.write_text(shard.model_dump_json(indent=1) + "\n")
        new.replace(place / FILE)  # a shard that starts now reads all of it or nothing
    except OSError as error:
        raise unwritable(place, error) from None


def _check_same_run(folder: Path, one: Shard, other: Shard) -> None:
    both = f"shards {one.index}/{one.count} and {other.index}/{other.count} of {folder}"
    if one.run != other.run:
        why = "settings, rounds, an own function or the device changed between them"
        raise StoreError(f"{both} are of different runs: {why}; keep each run in its own folder")
    if one.count != other.count:
        raise StoreError(f"{both} overlap; keep one number of shards in a folder")


def run_folder(folder: Path) -> Path:
    """Return the folder of the run that a results folder belongs to: that above a shard's."""
    return folder.parent if (folder / FILE).exists() else folder


def read_shards(folder: Path) -> dict[Path, Shard]:
    """Return the shards of a run by their folders. Raises StoreError for a damaged description."""
    found = {}
    for file in sorted(folder.glob(f"*/{FILE}")):
        try:
            found[file.parent] = Shard.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            remedy = "delete it and run the shard again, which keeps its records"
            raise StoreError(f"{file} does not describe a shard; {remedy}") from None
    return found


def join_shards(folder: Path, records: list[Record]) -> tuple[list[Record], list[str]]:
    """Return the records of a run in the order of one without shards, and what is missing.

    Raises StoreError for shards that don't belong together.
    """
    shards = read_shards(folder)
    if not shards:
        return sorted(records, key=lambda r: -1 if r.part is None else r.part), []
    by_part = group_by(records, lambda r: _part_key(r.trial, r.purpose != "measure"))
    first, positions = next(iter(shards.values())), dict[str, int]()
    missing = {*range(1, first.count + 1)}
    for place, one in shards.items():
        _check_same_run(folder, first, one)
        positions |= one.parts
        if (place / FINISHED).exists():
            missing.discard(one.index)
    in_order = sorted(by_part, key=lambda key: positions.get(key, inf))
    notes = [f"shard {i}/{first.count} of {folder} has not finished" for i in sorted(missing)]
    return [record for key in in_order for record in by_part[key]], notes
