"""This machine for a run: launcher, device, default budget, predictions from past records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from longseq_bench import environment
from longseq_bench.api.progress import Reporter
from longseq_bench.api.shards import FOLDERS
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import StoreError
from longseq_bench.core.gpus import read_visible_gpus
from longseq_bench.core.hardware import Hardware, find_profile, profiles, this_cpu
from longseq_bench.core.model import Device, Record, Trial
from longseq_bench.core.registry import canonical_name, is_own
from longseq_bench.launchers.base import LAUNCHERS, Launcher
from longseq_bench.launchers.engine import HostsLauncher
from longseq_bench.launchers.hosts import Hosts, refuse_several_tasks
from longseq_bench.search.prediction import Predictor
from longseq_bench.search.rates import RateModel
from longseq_bench.store import RECORDS, load

MEMORY_SHARE, BUSY = 0.8, 0.75
_COARSE, _FINE = 2**30, 64 * 2**20


LAUNCHER_VARIABLE = "LONGSEQ_LAUNCHER"  # the launcher of trials; the default is `local`
_hosts: ContextVar[Hosts | None] = ContextVar("hosts", default=None)


@contextmanager
def use_hosts(hosts: Hosts) -> Iterator[None]:
    """Run the trials of commands within the block on these hosts instead of this one alone."""
    before = _hosts.set(hosts)
    try:
        yield
    finally:
        _hosts.reset(before)


def runs_on_hosts() -> bool:
    """Return True within `longseq launch`."""
    return _hosts.get() is not None


def launcher_name() -> str:
    """Return the name of the launcher on one host."""
    return os.environ.get(LAUNCHER_VARIABLE, "local")


def make_launcher() -> Launcher:
    """Return the launcher of trials."""
    if hosts := _hosts.get():
        return HostsLauncher(hosts)
    return LAUNCHERS.get(launcher_name())()


@contextmanager
def open_launcher(
    reporter: Reporter, names: Iterable[str] = ()
) -> Iterator[tuple[Launcher, Catalogue]]:
    """Start the launcher and get its catalogue, while the reporter says so.

    names: of implementations; functions of the user among them are in the catalogue.
    """
    refuse_several_tasks(os.environ)
    own = dict.fromkeys(canonical_name(name) for name in names if is_own(name))
    with make_launcher() as launcher:
        with reporter.waiting("checking this machine …"):
            catalogue = launcher.catalogue([*own])
        yield launcher, catalogue


def default_ranks() -> int:
    """Return the default world size: 1, or all ranks of the hosts of a launch."""
    hosts = _hosts.get()
    return hosts.ranks if hosts else 1


def make_predictor(launcher: Launcher, catalogue: Catalogue, device: Device) -> Predictor:
    """Return a predictor of trials on this machine.

    Rates are those of a profile: a search measures its own, and must predict the same when it is
    resumed.
    """
    hardware = hardware_here(catalogue, device)
    dry_run = partial(launcher.dry_run, capability=hardware.capability)
    return Predictor(dry_run, RateModel(hardware))


def describe_devices(catalogue: Catalogue, trials: Iterable[Trial]) -> str:
    """Return a line with the devices and dtypes of trials, and why CUDA is not used.

    It also says which GPUs, and how many cores, other processes use, because they change figures.
    """
    trials, cuda = list(trials), catalogue.devices.get("cuda")
    ranks = max((trial.world_size for trial in trials), default=1)
    devices = dict.fromkeys(trial.device for trial in trials)
    dtypes = dict.fromkeys(trial.workload.dtype for trial in trials)
    names = [f"{d} ({cuda.name})" if cuda and d == "cuda" else d for d in devices]
    words = [f"device: {', '.join(names)}", f"dtype: {', '.join(dtypes)}"]
    if "cuda" in devices:
        words += filter(None, (g.in_use_reason() for g in read_visible_gpus().visible[:ranks]))
    elif cuda and (cuda.unavailable or cuda.count < ranks):
        few = f"no cuda for {ranks} ranks: {cuda.count} GPU(s), and two ranks can't share one"
        words.append(f"no cuda here: {cuda.unavailable}" if cuda.unavailable else few)
    busy = environment.busy_elsewhere() if "cpu" in devices else 0
    if busy > BUSY * (cores := os.cpu_count() or 1):
        words.append(f"BUSY: {busy} other threads run on {cores} cores, so passes take longer")
    return "; ".join(words)


def past_records(folder: Path) -> list[Record]:
    """Return the records of this machine below a folder."""
    fingerprint, records = environment.collect().fingerprint, []
    for path in folder.rglob(RECORDS):
        with suppress(StoreError):
            records += [r for r in load(path).records if r.environment.fingerprint == fingerprint]
    return records


def hardware_here(catalogue: Catalogue, device: Device) -> Hardware:
    """Return the profile of this machine's device by its name, or a guess."""
    info, machine = catalogue.devices[device], environment.collect()
    if device == "cpu":
        return this_cpu(machine.cpu, machine.cores, machine.memory_bytes)
    match = find_profile(info.name)
    base = match or profiles()["gtx1080"]
    # a profile may lack dtypes that the device reports: assume its highest rate for them
    flops = dict.fromkeys(info.dtypes, max(base.flops.values())) | base.flops
    name = info.name if match else f"{info.name}, guessed from {base.name}"
    changes = {"name": name, "memory": info.total_bytes or base.memory, "flops": flops}
    return base.model_copy(update=changes)


def default_memory(device: Device, out: Path | None, ranks: int = 1, workers: int = 1) -> int:
    """Return the default budget of a rank: 80 % of the free memory, rounded down.

    On a CPU, the ranks of all workers of a host share the memory. If `out` or a shard beside it has
    records, their budget is used, so that a resumed run makes the same trials, unless the machine
    has too little.
    """
    earlier: list[Record] = []
    beside = sorted(out.parent.glob(FOLDERS)) if out and out.match(FOLDERS) else []
    for folder in [*beside, *filter(None, [out])]:
        with suppress(StoreError):
            earlier += load(folder).records
    hosts = _hosts.get()
    local_ranks = min(ranks, hosts.ranks_per_host if hosts else ranks)
    sharing_ranks = local_ranks * workers if device == "cpu" else 1
    for record in reversed(earlier):
        budget = record.trial.memory_budget
        if record.trial.device != device or not budget:
            continue
        budget += record.trial.workload.weights
        if sharing_ranks == 1 or sharing_ranks * budget <= record.environment.memory_bytes:
            return budget

    free = int(environment.free_memory(device, local_ranks) * MEMORY_SHARE) // sharing_ranks
    step = _COARSE if free >= 4 * _COARSE else _FINE
    return max(step, free // step * step)
