"""Read records: results folders, folders of them, and single files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from longseq_bench import store
from longseq_bench.api.results import Results
from longseq_bench.core.errors import StoreError, UserError
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
    named = [Path(path) for path in paths]
    records, notes = read_results(named)
    folder = named[0] if named[0].is_dir() else named[0].parent
    configs = _read_configs(named)
    return Results(
        records, folder, find_baseline(configs.get(str(folder / CONFIG), ""), records),
        tuple(notes), configs,
    )  # fmt: skip


def read_results(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Return the records of results folders and files, and notes on what could not be read.

    A folder that has no records file stands for all folders below it. Raises StoreError if there
    are none.
    """
    loaded = [store.load(path) for path in record_files(paths)]
    records, copies = _drop_copies([file.records for file in loaded])
    notes = [note for file in loaded for note in file.notes]
    if copies:
        notes.append(f"duplicate records ignored: {copies}")
    return records, notes


def record_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of records that paths refer to, each once.

    Raises StoreError for a path that cannot be searched.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        try:
            below = sorted(path.rglob(RECORDS)) if path.is_dir() else []
            own = path / RECORDS if (path / RECORDS).is_file() else path
            matching = below if below and own == path else [own]
            files |= {file.resolve(): file for file in matching if file.resolve() not in files}
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreError(f"results {str(path)[:200]} can't be read: {reason}") from None
    return list(files.values())


def _drop_copies(files: list[list[Record]]) -> tuple[list[Record], int]:
    """Return the records of several files without copies from earlier files, and their number."""
    if len(files) == 1:
        return files[0], 0

    def key(record: Record) -> tuple[object, ...]:  # cheaper to compare than a record
        return record.started_at, record.wall_s, record.trial.implementation, record.trial.round

    distinct, copies = [], 0
    known: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for records in files:
        new = [record for record in records if record not in known[key(record)]]
        copies += len(records) - len(new)
        distinct += new
        for record in new:
            known[key(record)].append(record)
    return distinct, copies


def _read_configs(results: list[Path]) -> dict[str, str]:
    """Return the text of each sweep's config next to its records, by path."""
    texts = {}
    for file in record_files(results):
        config = file.with_name(CONFIG)
        with suppress(OSError, ValueError, UserError):
            texts[str(config)] = read_text_file(config)
    return texts


def find_baseline(config: str, records: list[Record]) -> str | None:
    """Return the baseline that a config names, if the records have it."""
    from longseq_bench.analysis.short_labels import find_short_labels
    from longseq_bench.config.loader import find_scalar

    baseline = find_scalar(config, "baseline")
    if not baseline:
        return None
    trials = [record.trial for record in records]
    names = {*find_short_labels(trials), *(trial.implementation for trial in trials)}
    names |= {short_name(trial.implementation) for trial in trials}
    return baseline if names & {baseline, baseline.split(" ")[0]} else None
