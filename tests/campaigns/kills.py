"""Kill processes of a small sweep at random moments, resume it, and look for what went wrong.

    python -m tests.campaigns.kills --count 30 --seed 1
    python -m tests.campaigns.kills --count 300 --workers 4

A sweep is struck up to five times while it runs, resumed and struck again until it is complete or
has been struck twenty times; then nothing disturbs it. A finding is a record that is lost, doubled
or blamed on the wrong one, a traceback, or a file or process that the last run leaves. The
exit code is 1 if there is one. A finding names the number of its sweep; `--only NUMBER` with the
same seed repeats that sweep alone. A kill takes about 3 s.

With --workers the sweep has two shards, which take turns, each on this many workers with fake GPUs.
A GPU has a lock while a trial uses it, so that one that is given twice is an error of the trial.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import psutil

from longseq_bench.core.model import Record, is_environment_failure
from longseq_bench.store import RECORDS, load
from tests.cli.sweep_process import Sweep, start_sweep

SWEEP = """\
memory_budget: 64MiB
workload: {heads: 2, head_dim: 16}
tokens: [64, 128, 256, 512]
world_size: [1, 2]
implementations: [ring, collective]
rounds: 1
repeats: 1
"""
BESIDE = """\
memory_budget: 64MiB
workload: {heads: 2, head_dim: 16}
tokens: [64, 128, 192, 256, 320, 384, 448, 512]
device: cuda
implementations: [ring, sdpa, ulysses]
rounds: 2
repeats: 1
"""
FAKE = {"LONGSEQ_LAUNCHER": "fake-devices", "FAKE_DEVICES": "4", "FAKE_SECONDS": "0.3"}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSTOP)
TARGETS = {False: ("parent", "rank"), True: ("parent", "worker")}
DEADLINE_S = 120.0
KILLS_OF_A_SWEEP, KILLS_OF_A_COMMAND = 20, 5
STOPPED_S = 1.0
START_S, TRIAL_S = 4.0, 1.5
"""About the duration of the start of a command, and of a trial."""


@dataclass(frozen=True)
class Kill:
    """Which process gets which signal, and when.

    after_s: from the start of the command, or from its last kill.  ends_stopped: a stopped process
    is killed; else it is continued.
    """

    number: int
    target: str
    signal: Signals
    after_s: float
    ends_stopped: bool

    def __str__(self) -> str:
        then = (" then SIGKILL" if self.ends_stopped else " then SIGCONT") * self.is_stop
        return f"{self.number}: {self.signal.name}{then} to {self.target}"

    @property
    def is_stop(self) -> bool:
        return self.signal == signal.SIGSTOP

    @property
    def fatal(self) -> Signals | None:
        """The signal that ends the process, if one does."""
        if self.is_stop:
            return signal.SIGKILL if self.ends_stopped else None
        return self.signal


def plan_command(number: int, seed: int, workers: int) -> Iterator[Kill]:
    """Yield the kills of a command, `number` and following, at any moments of it."""
    chance = random.Random(f"{seed}/{number}")
    for i in range(KILLS_OF_A_COMMAND):
        yield Kill(
            number + i, chance.choice(TARGETS[workers > 1]), chance.choice(SIGNALS),
            chance.uniform(0, TRIAL_S if i else START_S), ends_stopped=chance.random() < 0.5,
        )  # fmt: skip


# ---- one command ---------------------------------------------------------------------------------


def find(sweep: Sweep, kill: Kill) -> psutil.Process | None:
    """Return a process of the kill's kind, if there is one at this moment."""
    with suppress(psutil.Error):
        parent = psutil.Process(sweep.process.pid)
        if kill.target == "parent":
            return parent
        kind = "spawn_main" if kill.target == "worker" else "forkserver"
        children = [p for p in parent.children() if kind in " ".join(p.cmdline())]
        if kill.target == "rank":
            children = [child for server in children for child in server.children()]
        return random.Random(kill.number).choice(children) if children else None
    return None


def strike(sweep: Sweep, kill: Kill) -> str:
    """Send the signal, or return "" if the sweep ended before there was such a process."""
    start_s = time.monotonic()
    while sweep.process.poll() is None:
        if time.monotonic() - start_s >= kill.after_s and (found := find(sweep, kill)):
            with suppress(psutil.NoSuchProcess):
                found.send_signal(kill.signal)
                if kill.is_stop:
                    time.sleep(STOPPED_S)
                    found.send_signal(signal.SIGKILL if kill.ends_stopped else signal.SIGCONT)
                return f"{_count()} records after {time.monotonic() - start_s:.2f} s"
        time.sleep(0.002)
    return ""


def run_struck(number: int, seed: int, workers: int, temporary: Path) -> Iterator[str | Kill]:
    """Start or resume the sweep and strike its processes; yields as `run_chain`."""
    kept, kills = _written(), list[Kill]()
    shard = ("--shard", f"{number // KILLS_OF_A_COMMAND % 2 + 1}/2") if workers > 1 else ()
    sweep = start(Path(f"said-{number}"), temporary, workers, shard)
    for kill in plan_command(number, seed, workers):
        if where := strike(sweep, kill):
            print(f"{kill}: {where}", flush=True)
            kills.append(kill)
            yield kill
    code, text = end_of(sweep), sweep.said.read_text()
    print(f"  exit code {code}", flush=True)
    is_early = _was_interrupted_in_python_s_start(kills, text) or _killed_at_a_worker_s_start(text)
    if code is None:
        yield f"it did not end within {DEADLINE_S:.0f} s: {text[-300:]}"
    elif code not in _codes(kills) and not is_early and (code, text) != (-signal.SIGINT, ""):
        # in its first milliseconds Python has no handler of SIGINT, and ends without a word
        yield f"exit code {code}: {text[-300:]}"
    yield from (f"left running: {line}" for line in sweep.left())
    yield from _find_changes(sweep.said, kept, is_early)


def start(said: Path, temporary: Path, workers: int, shard: Sequence[str] = ()) -> Sweep:
    """Start or resume the sweep, or a shard of it."""
    variables = {"TMPDIR": str(temporary)}
    if workers == 1:
        return start_sweep(said, **variables)
    variables |= FAKE | {"FAKE_FOLDER": str(Path.cwd())}
    return start_sweep(said, after=["--workers", str(workers), *shard], **variables)


def end_of(sweep: Sweep) -> int | None:
    """Return the exit code; None if the sweep does not end, and kill it then."""
    try:
        return sweep.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        sweep.end()
        return None


def run_undisturbed(workers: int, temporary: Path) -> Iterator[str]:
    """Resume the sweep to its end, and yield the findings."""
    kept = _written()
    said = Path("said-last")
    before = {*temporary.rglob("*")}  # a parent that was killed leaves its folder
    sweep = start(said, temporary, workers)
    if (code := end_of(sweep)) not in (0, 3):
        yield f"resuming: exit code {code}: {said.read_text()[-300:]}"
    yield from (f"left running after resuming: {command}" for command in sweep.left())
    yield from (f"left: {path}" for path in {*temporary.rglob("*")} - before)
    yield from _find_changes(said, kept)


def _find_changes(
    said: Path, kept: Mapping[Path, list[bytes]], may_trace: bool = False
) -> Iterator[str]:
    if "Traceback" in said.read_text() and not may_trace:
        yield f"traceback: {said.read_text()[-600:]}"
    if any(_written()[path][: len(lines)] != lines for path, lines in kept.items()):
        yield "a line that was written has changed"


def _was_interrupted_in_python_s_start(kills: Sequence[Kill], said: str) -> bool:
    """Return True if SIGINT came before Python ran a line of longseq: it prints its own traceback.

    With an editable installation this takes some 40 ms.
    """
    is_python_s = "<frozen site>" in said or "<frozen runpy>" in said
    is_struck = any(k.target == "parent" and k.signal == signal.SIGINT for k in kills)
    return is_python_s and "longseq_bench/" not in said and is_struck


def _killed_at_a_worker_s_start(said: str) -> bool:
    """Return True if multiprocessing itself says that a parent died while it started a process."""
    return "in spawn_main" in said and "EOFError: Ran out of input" in said


def _codes(kills: Sequence[Kill]) -> set[int]:
    """Return the exit codes that are right; 3 says that a trial failed, in this run or before."""
    own = [k.fatal for k in kills if k.target == "parent" and k.fatal is not None]
    is_struck = any(kill.target != "parent" and kill.fatal is not None for kill in kills)
    gives_up = {2} if is_struck else set()  # a child that is asked
    if own:  # by itself: before the command is loaded, or SIGKILL
        return gives_up | {128 + n for n in own} | {-n for n in own if n != signal.SIGINT}
    codes = {0} | gives_up
    has_failed = any(r.outcome.status != "ok" for r in records())
    return codes | ({3} if has_failed else set())


def judge(records: list[Record], kills: Sequence[Kill], expected: Counter[str]) -> Iterator[str]:
    """Yield what is wrong with the records of a sweep that was resumed to its end."""
    deadly = {kill.fatal.name for kill in kills if kill.target == "rank" and kill.fatal}
    yield from find_differences(records, expected)
    for record in records:
        outcome = record.outcome
        named = f"{record.trial.implementation}, {outcome.status}: {outcome.reason}"
        if is_environment_failure(outcome):
            yield f"not run again: {named}"
        elif outcome.status != "ok" and not any(
            f"killed by {name}" in (outcome.reason or "") for name in deadly
        ):
            yield f"blamed: {named}"


def find_differences(records: Iterable[Record], expected: Counter[str]) -> Iterator[str]:
    """Yield the keys of records that are lost or doubled."""
    found = Counter(record.key for record in records)
    for key in (expected - found).elements():
        yield f"lost: {key}"
    for key in (found - expected).elements():
        yield f"doubled: {key}"


def records() -> list[Record]:
    """Return the records of the sweep, also of its shards."""
    return [r for path in sorted(Path("out").rglob(RECORDS)) for r in load(path, True).records]


def _written() -> dict[Path, list[bytes]]:
    """Return the complete lines of each file of records."""
    read = {path: path.read_bytes() for path in sorted(Path("out").rglob(RECORDS))}
    lines = {path: text.splitlines(keepends=True) for path, text in read.items()}
    return {path: [one for one in some if one.endswith(b"\n")] for path, some in lines.items()}


def _count() -> int:
    return sum(map(len, _written().values()))


# ---- the campaign --------------------------------------------------------------------------------


def reference(workers: int, temporary: Path) -> Counter[str]:
    """Return the keys of a sweep that nothing disturbs."""
    sweep = start(Path("said"), temporary, workers)
    if (code := end_of(sweep)) != 0:
        sys.exit(f"the sweep itself ends with exit code {code}: {Path('said').read_text()}")
    return Counter(record.key for record in records())


def run_chain(number: int, seed: int, workers: int, expected: Counter[str]) -> Iterator[str | Kill]:
    """Strike one sweep until it is complete; yields the kills that hit, and the findings."""
    kills: list[Kill] = []
    with in_new_folder(workers) as temporary:
        for first in range(0, KILLS_OF_A_SWEEP, KILLS_OF_A_COMMAND):
            for found in run_struck(number * KILLS_OF_A_SWEEP + first, seed, workers, temporary):
                kills += [found] if isinstance(found, Kill) else []
                yield found
            if _count() >= expected.total():
                break
        yield from run_undisturbed(workers, temporary)
        yield from judge(records(), kills, expected)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes of sweeps, and resume them.")
    parser.add_argument("--count", type=int, default=10, help="kills, or a few more (default: 10)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="default: random")
    parser.add_argument("--workers", type=int, default=1, help="2 to 4: two shards on fake GPUs")
    parser.add_argument("--only", type=int, help="repeat this sweep of the seed alone")
    asked = parser.parse_args()
    print(f"seed {asked.seed}, {asked.count} kills", flush=True)
    # a shell may ignore them for what it runs in the background, and sweeps would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    root = Path(__file__).parents[2]
    path = [str(root), str(root / "tests/plugins"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with in_new_folder(asked.workers) as temporary:
        undisturbed = reference(asked.workers, temporary)
    kills = findings = 0
    for number in itertools.count() if asked.only is None else [asked.only]:
        for found in run_chain(number, asked.seed, asked.workers, undisturbed):
            if isinstance(found, Kill):
                kills += 1
            else:
                findings += 1
                print(f"  FINDING in sweep {number}: {found}", flush=True)
        if kills >= asked.count:
            break
    print(f"seed {asked.seed}: {kills} kills, {findings} findings")
    return 1 if findings else 0


@contextmanager
def in_new_folder(workers: int) -> Iterator[Path]:
    """Work in a new folder with the sweep's file; yields a new folder for its temporary files."""
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as folder,
        tempfile.TemporaryDirectory(prefix="kills-") as temporary,
        chdir(folder),
    ):
        Path("sweep.yaml").write_text(SWEEP if workers == 1 else BESIDE)
        yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main())
