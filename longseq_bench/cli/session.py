"""What the commands share: where things go, what is asked of the machine, how they end."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Device, Record

if TYPE_CHECKING:
    from rich.console import Console

    from longseq_bench.cli.live_server import Live
    from longseq_bench.cli.progress import Progressing
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.core.hardware import Hardware
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.prediction import Outlook
    from longseq_bench.search.strategy import Plan

FAILED = ("wrong", "crashed", "error")
MEMORY_SHARE = 0.8
MOST_RECORDS = 2000
"""Past ones that are read for rates."""

_COARSE, _FINE = 2**30, 64 * 2**20


@dataclass(frozen=True)
class Stage:
    """Where the trials of a command run: what starts them, over how many ranks where a command does
    not say, and how many of them are on one host."""

    make: Callable[[], Launcher]
    ranks: int
    per: int


LAUNCHER_VARIABLE = "LONGSEQ_LAUNCHER"
"""The environment variable that names the launcher of trials; the default is `local`."""

_stage: ContextVar[Stage | None] = ContextVar("stage", default=None)


@contextmanager
def on(stage: Stage) -> Iterator[None]:
    """Commands that are run inside run their trials there, instead of on this host alone."""
    before = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(before)


def make_launcher() -> Launcher:
    """What starts the trials of this command."""
    import os

    from longseq_bench.launchers.base import create_launcher

    stage = _stage.get()
    return stage.make() if stage else create_launcher(os.environ.get(LAUNCHER_VARIABLE, "local"))


def default_ranks() -> int:
    """The ranks of a trial where nothing is said: all that there are."""
    stage = _stage.get()
    return stage.ranks if stage else 1


def sharing(ranks: int) -> int:
    """How many of so many ranks share a host."""
    stage = _stage.get()
    return min(ranks, stage.per) if stage else ranks


def console(stderr: bool = False) -> Console:
    """A console of rich on stdout or stderr."""
    from rich.console import Console

    from longseq_bench.cli.stdout import give_up

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # on stderr; of which rich makes an exit code of its own
            give_up(cast("TextIO", self.file), BrokenPipeError())

    return Piped(stderr=stderr, highlight=False, soft_wrap=stderr)


def print_json(document: Any) -> None:
    """One JSON document on stdout; what is not a number is null."""
    print(json.dumps(document, indent=2, allow_nan=False), flush=True)


def default_out() -> Path:
    """A new folder under results/, named by date and machine."""
    import platform

    host = re.sub(r"[^A-Za-z0-9.]+", "-", platform.node()) or "machine"
    return Path("results") / f"{datetime.now():%Y-%m-%dT%H%M%S}-{host}"


def command_line() -> str:
    """This command, as a person would type it again."""
    return shlex.join(["longseq", *sys.argv[1:]])


def outlook(launcher: Launcher, catalogue: Catalogue, device: Device, out: Path | None) -> Outlook:
    """What trials on this machine may be expected to take, by its records below results/ but those
    of `out`: a search that is resumed there has to ask what it asked before."""
    from longseq_bench.search.prediction import Outlook, Pace

    past = past_records(Path("results"), out)
    return Outlook(launcher.dry_run, Pace(hardware_here(catalogue, device), past))


def read_results(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Records of results folders and files, and notes on what could not be read; of a folder that
    holds none itself those of all folders below it.

    Raises StoreError where there are none.
    """
    from longseq_bench.store import load

    loaded = [load(file) for file in record_files(paths)]
    records, copies = _once([one.records for one in loaded])
    notes = [note for one in loaded for note in one.notes]
    if copies:
        notes.append(f"{copies} records are there more than once, as copies; each is taken once")
    return records, notes


def record_files(paths: Iterable[Path]) -> list[Path]:
    """The files of records that such paths mean, each once. Raises StoreError for a path that can't
    be looked through."""
    from longseq_bench.core.errors import StoreError
    from longseq_bench.store import RECORDS

    files: dict[Path, Path] = {}
    for path in paths:
        try:
            below = sorted(path.rglob(RECORDS)) if path.is_dir() else []
            own = path / RECORDS if (path / RECORDS).is_file() else path
            some = below if below and own == path else [own]
            files |= {file.resolve(): file for file in some if file.resolve() not in files}
        except (OSError, RuntimeError) as error:
            raise StoreError(f"results {str(path)[:200]} can't be read: {error}") from None
    return list(files.values())


def _once(files: list[list[Record]]) -> tuple[list[Record], int]:
    """The records of several files without what is in an earlier one too, as where a folder was
    copied; and how many such there were."""
    kept, copies = list(files[0]) if files else [], 0
    known: dict[tuple[object, ...], list[Record]] = {}
    for earlier, later in pairwise(files):
        for record in earlier:
            known.setdefault(_moment(record), []).append(record)
        new = [record for record in later if record not in known.get(_moment(record), ())]
        copies += len(later) - len(new)
        kept += new
    return kept, copies


def _moment(record: Record) -> tuple[object, ...]:
    """Hardly the same for two runs."""
    return record.started_at, record.wall_s, record.trial.implementation, record.trial.round


def past_records(folder: Path, but: Path | None = None) -> list[Record]:
    """Records of this machine below a folder, the newest files first, as many as tell enough."""
    from longseq_bench.core.errors import StoreError
    from longseq_bench.environment import collect
    from longseq_bench.store import RECORDS, load

    here, found = collect().fingerprint, []
    paths = [p for p in folder.rglob(RECORDS) if but is None or p.parent.resolve() != but.resolve()]
    for path in sorted(paths, key=lambda p: -p.stat().st_mtime):
        try:
            found += [r for r in load(path).records if r.environment.fingerprint == here]
        except StoreError:
            continue
        if len(found) > MOST_RECORDS:
            break
    return found


def hardware_here(catalogue: Catalogue, device: Device) -> Hardware:
    """The profile of this machine's device: one that its name tells, or a guess."""
    from longseq_bench.core.hardware import profiles, this_cpu
    from longseq_bench.environment import collect

    info, here = catalogue.devices[device], collect()
    cpu = this_cpu(here.cpu, here.cores, here.memory_bytes)
    if device == "cpu":
        return cpu
    words = re.split(r"[^a-z0-9]+", info.name.lower())
    ours = profiles()
    found = next((one for name, one in ours.items() if name in words), None)
    known = found or ours["gtx1080"]
    # of a card that nobody described all is a guess, and it has the dtypes that it says
    flops = dict.fromkeys(info.dtypes, max(known.flops.values())) | known.flops
    named = info.name if found else f"{info.name}, guessed from {known.name}"
    changes = {"name": named, "memory": info.total_bytes or known.memory, "flops": flops}
    return known.model_copy(update=changes)


def carry_out(
    steps: Plan,
    launcher: Launcher,
    out: Path | None,
    watcher: Progressing,
    baseline: str | None = None,
    config: str | None = None,
    live: Live | None = None,
) -> list[Record]:
    """Run a plan into a results folder, watched, and write its report beside the records.

    config: a sweep's YAML, kept beside them too.  live: a page that is served meanwhile.
    Raises StoreError for a folder that can't be used.
    """
    from longseq_bench.environment import collect
    from longseq_bench.reports import write_report
    from longseq_bench.reports.render.terminal_text import plain
    from longseq_bench.runner import Watchers, drive
    from longseq_bench.store import Store

    screen = watcher.console
    with Store(out or default_out()) as store:
        for note in store.notes:
            screen.print(plain(note, "yellow"))
        if config is not None:
            _keep(config, store.folder)
        with watcher, live or nullcontext():
            told = Watchers(watcher, live) if live else watcher
            records = drive(steps, launcher, store, collect, told, command_line())
        paths = write_report(
            records, store.folder, beside=False, baseline=baseline, notes=store.notes
        )
    for path in [store.path, *paths]:
        screen.print(plain(f"wrote {path}"))
    screen.print(plain(f"charts and a page: longseq report {store.folder} --format md,html"))
    return records


def _keep(config: str, folder: Path) -> None:
    from longseq_bench.core.errors import StoreError

    kept = folder / "config.yaml"
    try:
        kept.write_text(config, encoding="utf-8")
    except OSError as error:
        why = f"{error.strerror} ({kept})"
        raise StoreError(f"results folder {folder} can't be written: {why}") from None


def exit_code(records: Iterable[Record]) -> int:
    """3 where a trial ended wrong, crashed or error; else 0."""
    return 3 if any(r.outcome.status in FAILED for r in records) else 0


def check_device(catalogue: Catalogue, device: str, dtype: str, ranks: int = 1) -> None:
    """Raises UserError where the device is not here, lacks the dtype, or is too few for the ranks:
    each has a CUDA device of its own; on a CPU they share the cores, however many."""
    info = catalogue.devices[device]
    if info.unavailable:
        others = [d for d, i in catalogue.devices.items() if not i.unavailable]
        raise UserError(f"device {device!r} can't be used: {info.unavailable}; here: {others[0]}")
    if dtype not in info.dtypes:
        have = ", ".join(info.dtypes)
        raise UserError(f"{info.name} ({device}) has no {dtype}; it has {have}")
    if device == "cuda" and ranks > info.count:
        there = f"there is {info.count}" if info.count == 1 else f"there are {info.count}"
        raise UserError(
            f"--world-size {ranks} is more than the CUDA devices here, of which {there}"
        )


def default_memory(device: Device, out: Path | None, ranks: int = 1) -> int:
    """80 % of what is free now, rounded down; on a CPU a rank's share of it, as ranks share the
    memory. In a folder that has records what they had, so that a resumed run asks for the same,
    unless that is more than the machine has for so many ranks."""
    from longseq_bench.core.errors import StoreError
    from longseq_bench.environment import free_memory
    from longseq_bench.store import load

    try:
        earlier = load(out).records if out else []
    except StoreError:
        earlier = []
    here = sharing(ranks) if device == "cpu" else 1
    for record in reversed(earlier):
        budget = record.trial.memory_budget
        if record.trial.device != device or not budget:
            continue
        if here == 1 or here * budget <= record.environment.memory_bytes:
            return budget

    free = int(free_memory(device) * MEMORY_SHARE) // here
    step = _COARSE if free >= 4 * _COARSE else _FINE
    return max(step, free // step * step)
