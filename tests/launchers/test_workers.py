"""Workers: trials side by side on fake devices, in processes; and what is refused."""

import os
import signal
from dataclasses import replace
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import pytest

import longseq_bench
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.api.results import Results
from longseq_bench.api.side_by_side import choose_workers
from longseq_bench.core.model import Place, Record
from longseq_bench.launchers.workers import Workers
from longseq_bench.runner import Watcher, run_side_by_side
from longseq_bench.search import strategy
from longseq_bench.store import load
from tests.cli.commands import Capture, refusal
from tests.make import trial
from tests.plugins.fake_devices import FakeDevices

LENGTHS = [512, 1024, 2048, 4096]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGSEQ_LAUNCHER", "fake-devices")
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("FAKE_DEVICES", "4")
    monkeypatch.chdir(tmp_path)


def swept(workers: Any = 1, out: str | None = "out", **more: Any) -> Results:
    given: dict[str, Any] = {
        "tokens": LENGTHS, "implementations": ["ring", "sdpa"], "rounds": 2, "device": "cuda",
        "memory_budget": "64MiB", "progress": False, "workers": workers, "out": out,
    }  # fmt: skip
    return longseq_bench.sweep(**{**given, **more})


def without_machine(results: Results) -> list[SweepRow]:
    """Return the rows without what depends on the number of workers."""
    return [replace(row, fingerprint="", workers=None) for row in results.rows]


def test_workers_give_the_records_of_one_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.05")
    alone, beside = swept(out="alone"), swept(2)
    assert without_machine(beside) == without_machine(alone)
    assert without_machine(longseq_bench.load("out")) == without_machine(alone)
    places = [record.place for record in beside.records]
    assert {place.worker: place.devices for place in places if place} == {
        1: ("fake-0", "fake-1"), 2: ("fake-2", "fake-3"),
    }  # fmt: skip
    assert any(place and place.neighbours for place in places)
    # all rounds of a workload are on one worker
    parts = {(r.trial.workload.seq_len, r.place.worker) for r in beside.records if r.place}
    assert len(parts) == len(LENGTHS)
    assert {r.environment.workers for r in beside.records} == {2}
    assert {r.environment.workers for r in alone.records} == {None}
    assert "2 trials side by side" in Path("out/report.md").read_text()
    assert len(swept(2).records) == len(load("out").records)  # none ran again
    # a shard with fewer parts than workers is the same machine as the others
    (alone_in_shard,) = swept(4, None, tokens=512, implementations="ring", rounds=1).records
    assert (alone_in_shard.environment.workers, alone_in_shard.place) == (
        4, Place(worker=1, devices=("fake-0",)),
    )  # fmt: skip


def test_rows_with_neighbours_are_another_condition(capsys: Capture) -> None:
    swept(out="alone")
    swept(2)
    assert "trials side by side none and 2" in refusal(capsys, "compare", "alone", "out")


class Killing(Watcher):
    """Kills the process of a worker at its first phase."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.killed = workers, False

    def phase(self, phase: str, part: str) -> None:
        if not self.killed:
            self.killed = True
            os.kill(self.workers._all[0]._process.pid or 0, signal.SIGKILL)


def test_a_killed_worker_runs_its_trial_once_more_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.2")  # else it may have ended before it is killed
    trials = [trial("ring", n, device="cuda") for n in LENGTHS]
    with Workers(1, "cuda", ["fake-0"], "fake-devices") as workers:
        found = run_side_by_side(
            [lambda own: strategy.sweep(trials, 1)], [0], workers, None,
            longseq_bench.environment.collect, Killing(workers),
        )  # fmt: skip
    assert [one.outcome.status for one in found] == ["ok"] * len(LENGTHS)
    assert found[0].outcome.reason == (
        "passed in a second process; the first failed: worker 1 was killed by SIGKILL"
    )
    assert [one.processes for one in found] == [2, 1, 1, 1]


def test_ctrl_c_while_workers_start_is_for_the_parent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks, start = list[set[int]](), util.spawnv_passfds

    def spawn(*arguments: Any) -> int:
        masks.append({*signal.pthread_sigmask(signal.SIG_BLOCK, [])})
        return start(*arguments)

    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    for name in ("_fd", "_pid"):  # as in a new process
        monkeypatch.setattr(tracker, name, None)
    monkeypatch.setattr(util, "spawnv_passfds", spawn)
    with Workers(1, "cuda", ["fake-0"], "fake-devices"):
        assert signal.SIGINT in masks[-1]
    os.close(tracker._fd)


class Failing(Watcher):
    """A full disk: the first record that ends."""

    def ends(self, step: strategy.Step, record: Record, from_store: bool) -> None:
        raise OSError("No space left on device")


def test_an_error_of_one_worker_ends_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    monkeypatch.setenv("FAKE_UNIT", "4096")
    trials = [trial("ring", n, device="cuda") for n in (1, 4096)]

    def schedule(one: Any) -> Any:
        return lambda own: strategy.sweep([one], 1)

    with (
        Workers(2, "cuda", ["fake-0", "fake-1"], "fake-devices") as workers,
        pytest.raises(OSError, match="No space"),
    ):
        run_side_by_side(
            [*map(schedule, trials)], [0, 1], workers, None, longseq_bench.environment.collect,
            Failing(),
        )  # fmt: skip
    assert not any(one._process.is_alive() for one in workers._all)


def test_searches_run_side_by_side() -> None:
    given: dict[str, Any] = {"device": "cuda", "memory_budget": "16MiB", "progress": False}
    one, two = (
        longseq_bench.maxlen(["ring", "sdpa", "ulysses"], workers=n, **given) for n in (1, 3)
    )
    assert [row.max_tokens for row in two.maxima] == [row.max_tokens for row in one.maxima]
    assert len({record.place.worker for record in two.records if record.place}) == 3


@pytest.mark.parametrize(
    ("workers", "changes", "sentence"),
    [
        ("5", {}, "--workers 5: this machine shows 4 GPUs; use at most 4"),
        ("4", {"world_size": 2}, "and world_size 2 needs 2 GPUs; use at most 2"),
        ("0", {}, "--workers 0: write auto, or a number from 1"),
        ("x", {}, "--workers x: write auto"),
        ("2", {"options": {"offload": "host"}}, "--workers and offload=host exclude each other"),
    ],
)
def test_what_workers_can_not_do_is_refused(
    workers: str, changes: dict[str, Any], sentence: str
) -> None:
    trials = [trial("ring", device="cuda", **changes)]
    with pytest.raises(longseq_bench.UserError, match=sentence):
        choose_workers(workers, trials, FakeDevices())


def test_auto_takes_all_gpus_and_one_worker_on_a_cpu() -> None:
    fake = FakeDevices()
    assert choose_workers("auto", [trial(device="cuda")], fake)[0] == 4
    assert choose_workers("auto", [trial(device="cuda", world_size=3)], fake)[0] == 1
    assert choose_workers("auto", [trial(device="cpu")], fake)[0] == 1
    assert choose_workers(None, [trial(device="cuda")], fake) == (1, ())
