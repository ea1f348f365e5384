"""Read records: results folders, folders of them, and single files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from longseq_bench import store
from longseq_bench.api.results import Results
from longseq_bench.core.errors import ConfigError, StoreError, UserError
from longseq_bench.core.model import Record
from longseq_bench.core.own_functions import short_name
from longseq_bench.core.user_files import read_text_file
from longseq_bench.store import RECORDS

CONFIG = "config.yaml"


def load(*paths: str | Path) -> Results:
    """Return the results in folders, folders of them, or `records.jsonl` files.

    Lines that could not be read are in `notes`. The baseline is that of the sweep's config, if the
    records have it. Raises StoreError if a path has no records.
    """
    if not paths:
        raise StoreError("no results are named; give a results folder or a records.jsonl file")
    from longseq_bench.config.loader import MAX_BYTES

    named = [Path(path) for path in paths]
    records, notes = read_results(named)
    folder = named[0] if named[0].is_dir() else named[0].parent
    configs = {}
    for config in (file.with_name(CONFIG) for file in record_files(named)):
        with suppress(OSError, ValueError, UserError):
            configs[str(config)] = read_text_file(config, max_bytes=MAX_BYTES)
    baseline = _find_baseline(configs.get(str(folder / CONFIG), ""), records)
    return Results(records, folder, baseline, tuple(notes), configs)


def read_results(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Return the records of results folders and files, and notes on what could not be read.

    A folder that has no records file stands for all folders below it. Raises StoreError if there
    are none.
    """
    loaded = [store.load(path) for path in record_files(paths)]
    notes = [note for file in loaded for note in file.notes]
    records: list[Record] = []
    seen: dict[tuple[object, ...], list[Record]] = {}
    for file in loaded:
        # the same run in a copy of a file; equal records of one file are different runs
        new = [record for record in file.records if record not in seen.get(_run_of(record), [])]
        for record in new:
            seen.setdefault(_run_of(record), []).append(record)
        records += new
    if copies := sum(len(file.records) for file in loaded) - len(records):
        notes.append(f"duplicate records ignored: {copies}")
    return records, notes


def _run_of(record: Record) -> tuple[object, ...]:
    """Return a part of a record that is cheaper to compare than all of it."""
    return record.started_at, record.wall_s, record.trial.implementation, record.trial.round


def record_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of records that paths refer to, each once.

    Raises StoreError for a path that cannot be searched.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        try:
            below = sorted(path.rglob(RECORDS)) if path.is_dir() else []
            own = path / RECORDS if (path / RECORDS).is_file() else path
            for file in below if below and own == path else [own]:
                files.setdefault(file.resolve(), file)
        except OSError as error:
            raise StoreError(f"results {path} can't be read: {error.strerror}") from None
    return list(files.values())


def _find_baseline(config: str, records: list[Record]) -> str | None:
    """Return the baseline that a config names, if the records have it."""
    from longseq_bench.analysis.short_labels import find_short_labels
    from longseq_bench.config.loader import parse_config

    try:
        values = parse_config(config, CONFIG).data
    except ConfigError:
        return None
    baseline = values.get("baseline") if isinstance(values, dict) else None
    if not isinstance(baseline, str):
        return None
    trials = [record.trial for record in records]
    names = {*find_short_labels(trials), *(trial.implementation for trial in trials)}
    names |= {short_name(trial.implementation) for trial in trials}
    return baseline if names & {baseline, baseline.split(" ")[0]} else None
