"""Parts that commands share: launcher, devices, results folders, past records, exit codes.

Commands that only read records import this too, so psutil (`environment`) is imported in functions.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console

from longseq_bench.cli import FAILED_TRIALS
from longseq_bench.cli.options import SearchOptions, WorkloadOptions, parse_options
from longseq_bench.cli.progress import ProgressLines, SearchProgress
from longseq_bench.cli.stdout import keep_exit_code, stop_writing
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import StoreError
from longseq_bench.core.hardware import Hardware, profiles, this_cpu
from longseq_bench.core.model import Device, Record, Trial
from longseq_bench.core.own_functions import source_of
from longseq_bench.core.units import parse_bytes, parse_seconds
from longseq_bench.launchers.base import Launcher, create_launcher
from longseq_bench.reports import documents, write_documents
from longseq_bench.reports.document import Document
from longseq_bench.reports.render.terminal import print_document
from longseq_bench.reports.render.terminal_text import plain
from longseq_bench.runner import run_schedule
from longseq_bench.search.prediction import Predictor, RateModel
from longseq_bench.search.strategy import Schedule
from longseq_bench.store import RECORDS, Store, load

if TYPE_CHECKING:
    from longseq_bench.cli.live_server import LivePage

FAILED = ("wrong", "crashed", "error")
MEMORY_SHARE = 0.8
MAX_PAST_RECORDS = 2000  # read no more files after this many records
_COARSE, _FINE = 2**30, 64 * 2**20


@dataclass(frozen=True)
class LaunchTarget:
    """Hosts that run the trials instead of this host alone: their launcher and numbers of ranks.

    ranks: the default world size.  ranks_per_host: ranks that share a host's memory.
    """

    make_launcher: Callable[[], Launcher]
    ranks: int
    ranks_per_host: int


LAUNCHER_VARIABLE = "LONGSEQ_LAUNCHER"
"""The environment variable that names the launcher of trials; the default is `local`."""

_target: ContextVar[LaunchTarget | None] = ContextVar("target", default=None)


@contextmanager
def use_launch_target(target: LaunchTarget) -> Iterator[None]:
    """Run the trials of commands within the block on a target instead of this host alone."""
    before = _target.set(target)
    try:
        yield
    finally:
        _target.reset(before)


def make_launcher() -> Launcher:
    """Return the launcher of this command's trials."""
    if target := _target.get():
        return target.make_launcher()
    return create_launcher(os.environ.get(LAUNCHER_VARIABLE, "local"))


@contextmanager
def open_launcher() -> Iterator[tuple[Launcher, Catalogue]]:
    """Start the launcher and get its catalogue, with a status line on a terminal."""
    with make_launcher() as launcher:
        with console(stderr=True).status("checking this machine …"):
            catalogue = launcher.catalogue()
        yield launcher, catalogue


def default_ranks() -> int:
    """Return the default world size: 1, or all ranks of the launch target."""
    target = _target.get()
    return target.ranks if target else 1


def console(stderr: bool = False) -> Console:
    """Return a rich console on stdout or stderr."""

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with its own code
            stop_writing(cast("TextIO", self.file), BrokenPipeError())

    return Piped(stderr=stderr, highlight=False, soft_wrap=stderr)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout. Raises ValueError for NaN and infinity."""
    print(json.dumps(document, indent=2, allow_nan=False), flush=True)


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Print lines on stderr; markup in them is printed as it is."""
    screen = console(stderr=True)
    for line in lines:
        screen.print(plain(line, style))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on what could not be read, on stderr."""
    print_lines(notes, "yellow")


def print_answer(
    as_json: bool, data: Callable[[], Any], document: Callable[[], Document],
    hint: str = "a wider terminal or report.md has them", code: int = 0,
) -> int:  # fmt: skip
    """Print a command's answer on stdout, as JSON or as a document, and return its exit code.

    hint: where to find the columns that do not fit in a narrow terminal.
    """
    with keep_exit_code(code):
        if as_json:
            print_json(data())
        else:
            print_document(document(), console(), hint)
    return code


def print_records(
    records: list[Record], as_json: bool, data: Callable[[list[Record]], Any],
    brief: Callable[[list[Record]], Document],
) -> int:  # fmt: skip
    """Print the answer of a command that ran trials, and return its exit code."""
    code = exit_code(records)
    return print_answer(as_json, lambda: data(records), lambda: brief(records), code=code)


def default_out() -> Path:
    """Return a new folder under results/, named by date and machine."""
    host = re.sub(r"[^A-Za-z0-9.]+", "-", platform.node()) or "machine"
    return Path("results") / f"{datetime.now():%Y-%m-%dT%H%M%S}-{host}"


def make_predictor(
    launcher: Launcher, catalogue: Catalogue, device: Device, out: Path | None
) -> Predictor:
    """Return a predictor of trials on this machine that uses its records below results/.

    Records in `out` are ignored: a search that is resumed there must make the same predictions.
    """
    past = past_records(Path("results"), out)
    hardware = hardware_here(catalogue, device)
    dry_run = partial(launcher.dry_run, **hardware.dry_run_options)
    return Predictor(dry_run, RateModel(hardware, past))


def build_trials(
    catalogue: Catalogue, search: SearchOptions, workload: WorkloadOptions, out: Path | None,
    worlds: Sequence[int],
) -> list[Trial]:  # fmt: skip
    """Return a trial of one token for each implementation and number of ranks.

    Raises UserError for a device, dtype, name or option that is not available.
    """
    ranks = max(worlds)
    device = catalogue.resolve_device(search.device, ranks)
    shape = workload.workload(catalogue.default_dtype(device))
    if model := workload.model_shape():
        print_lines([model.describe(shape)])
    budget = parse_bytes(search.memory_budget) if search.memory_budget else None
    time_budget = parse_seconds(search.time_budget)
    catalogue.check_device(device)
    catalogue.check_dtype(device, shape.dtype)
    catalogue.check_ranks(device, ranks, "--world-size")
    implementations = parse_options(catalogue, search.impl, search.option)
    budget = budget or default_memory(device, out, ranks)
    return [
        Trial(
            implementation=name, options=options, workload=shape, device=device, world_size=world,
            memory_budget=budget, time_budget=time_budget, repeats=0, threads=search.threads,
            seed=search.seed, keep=workload.keep, allocator=search.allocator,
            source=source_of(name),
        )
        for name, options in implementations.items() for world in worlds
    ]  # fmt: skip


def describe_devices(catalogue: Catalogue, trials: Iterable[Trial]) -> str:
    """Return a line with the devices and dtypes of trials, and why CUDA is not used.

    It also says which GPUs other processes use, because they change figures.
    """
    from longseq_bench.core.gpus import read_visible_gpus

    trials = list(trials)
    ranks = max((trial.world_size for trial in trials), default=1)
    used = dict.fromkeys((trial.device, trial.workload.dtype) for trial in trials)
    devices = list(dict.fromkeys(device for device, _ in used))
    names = [f"{d} ({catalogue.devices[d].name})" if d == "cuda" else d for d in devices]
    line = f"device: {', '.join(names)}; dtype: {', '.join(dict.fromkeys(d for _, d in used))}"
    cuda = catalogue.devices.get("cuda")
    if "cuda" in devices:
        gpus = read_visible_gpus().visible[:ranks]
        return "; ".join([line, *(reason for gpu in gpus if (reason := gpu.in_use_reason()))])
    if cuda is not None and cuda.unavailable:
        line += f"; no cuda here: {cuda.unavailable}"
    elif cuda is not None and cuda.count < ranks:
        line += f"; no cuda for {ranks} ranks: {cuda.count} GPU(s), and two ranks can't share one"
    return line


def read_results(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Return the records of results folders and files, and notes on what could not be read.

    A folder that has no records file stands for all folders below it. Raises StoreError if there
    are none.
    """
    loaded = [load(path) for path in record_files(paths)]
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
            raise StoreError(f"results {str(path)[:200]} can't be read: {error}") from None
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


def past_records(folder: Path, skip: Path | None = None) -> list[Record]:
    """Return records of this machine below a folder, newest files first, up to a limit."""
    from longseq_bench.environment import collect

    fingerprint, records = collect().fingerprint, []
    paths = [
        p for p in folder.rglob(RECORDS) if skip is None or p.parent.resolve() != skip.resolve()
    ]
    for path in sorted(paths, key=lambda p: -p.stat().st_mtime):
        try:
            loaded = load(path).records
        except StoreError:
            continue
        records += [r for r in loaded if r.environment.fingerprint == fingerprint]
        if len(records) > MAX_PAST_RECORDS:
            break
    return records


def hardware_here(catalogue: Catalogue, device: Device) -> Hardware:
    """Return the profile of this machine's device by its name, or a guess."""
    from longseq_bench.environment import collect

    info, machine = catalogue.devices[device], collect()
    if device == "cpu":
        return this_cpu(machine.cpu, machine.cores, machine.memory_bytes)
    words = re.split(r"[^a-z0-9]+", info.name.lower())
    known_profiles = profiles()
    match = next((profile for name, profile in known_profiles.items() if name in words), None)
    base = match or known_profiles["gtx1080"]
    # a profile may lack dtypes that the device reports: assume its highest rate for them
    flops = dict.fromkeys(info.dtypes, max(base.flops.values())) | base.flops
    name = info.name if match else f"{info.name}, guessed from {base.name}"
    changes = {"name": name, "memory": info.total_bytes or base.memory, "flops": flops}
    return base.model_copy(update=changes)


def run_search(
    launcher: Launcher, catalogue: Catalogue, trials: Sequence[Trial], out: Path | None,
    make_schedule: Callable[[Predictor], Schedule],
) -> list[Record]:  # fmt: skip
    """Run a search over the trials, with progress lines, and write its report."""
    predictor = make_predictor(launcher, catalogue, trials[0].device, out)
    heading = describe_devices(catalogue, trials)
    watcher = SearchProgress(console(stderr=True), trials, heading)
    return run_and_report(make_schedule(predictor), launcher, out, watcher)


def run_and_report(
    schedule: Schedule,
    launcher: Launcher,
    out: Path | None,
    watcher: ProgressLines,
    baseline: str | None = None,
    config: str | None = None,
    live: LivePage | None = None,
) -> list[Record]:
    """Run a schedule into a results folder and write its report there.

    config: the text of a sweep file, which is written there too.  live: a page to serve meanwhile.
    Raises StoreError for a folder that can't be used.
    """
    from longseq_bench.environment import collect

    with Store(out or default_out()) as store:
        print_notes(store.notes)
        if config is not None:
            _write_config(config, store.folder)
        with watcher, live or nullcontext():
            watchers = [watcher, live] if live else [watcher]
            command = shlex.join(["longseq", *sys.argv[1:]])
            records = run_schedule(schedule, launcher, store, collect, watchers, command)
        built = documents(records, baseline=baseline, notes=store.notes)
        paths = write_documents(built, store.folder, attachments=False)
    print_lines(f"wrote {path}" for path in [store.path, *paths])
    print_lines([f"charts and a page: longseq report {store.folder} --format md,html"])
    return records


def _write_config(config: str, folder: Path) -> None:
    path = folder / "config.yaml"
    try:
        path.write_text(config, encoding="utf-8")
    except OSError as error:
        reason = f"{error.strerror} ({path})"
        raise StoreError(f"results folder {folder} can't be written: {reason}") from None


def exit_code(records: Iterable[Record]) -> int:
    """Return 3 if a trial ended wrong, crashed or error; else 0."""
    return FAILED_TRIALS if any(r.outcome.status in FAILED for r in records) else 0


def default_memory(device: Device, out: Path | None, ranks: int = 1) -> int:
    """Return the default budget of a rank: 80 % of the free memory, rounded down.

    On a CPU, the ranks of a host share the memory. If `out` has records, their budget is used, so
    that a resumed run makes the same trials, unless the machine has too little for these ranks.
    """
    from longseq_bench.environment import free_memory

    try:
        earlier = load(out).records if out else []
    except StoreError:
        earlier = []
    target = _target.get()
    local_ranks = min(ranks, target.ranks_per_host if target else ranks)
    sharing_ranks = local_ranks if device == "cpu" else 1
    for record in reversed(earlier):
        budget = record.trial.memory_budget
        if record.trial.device != device or not budget:
            continue
        if sharing_ranks == 1 or sharing_ranks * budget <= record.environment.memory_bytes:
            return budget

    free = int(free_memory(device, local_ranks) * MEMORY_SHARE) // sharing_ranks
    step = _COARSE if free >= 4 * _COARSE else _FINE
    return max(step, free // step * step)
