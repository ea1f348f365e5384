"""Shards of a run: which trials each has, and their folders as one run. No processes."""

import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import longseq_bench
from longseq_bench.analysis.runs import group_by
from longseq_bench.api.grid import sweep
from longseq_bench.api.length_search import maxlen
from longseq_bench.api.results import Results
from longseq_bench.api.shards import FILE, FINISHED, balance, choose_shard, read_shards
from longseq_bench.cli import run
from longseq_bench.config.loader import parse_config
from longseq_bench.config.trials import make_sweep
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Record, Trial, environment_failure
from longseq_bench.launchers.base import LaunchResult, OnPhase
from longseq_bench.store import RECORDS
from tests.api.test_api import Machine
from tests.cli.commands import Capture, refusal
from tests.config.test_trials import CATALOGUE, EXAMPLE
from tests.make import trial, write_records
from tests.reports.examples import on_two_machines, searched, sparser

SHORT = "tokens: [64, 96, 128, 160]\nimplementations: [sdpa, ring]\nrounds: 2\nbaseline: sdpa\n"
GRID = "tokens: [512, 1k]\nworld_size: [1, 2]\ndevice: cpu\nimplementations: [sdpa, ring]\n"
MODELS = GRID + "workload: {model: [llama-3.1-8b, qwen3-8b]}\n"


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Machine)
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(SHORT + "memory_budget: 64MiB\ndevice: cpu\n")


def swept(shard: str | None = None, out: str | None = "out", **more: Any) -> Results:
    return sweep("sweep.yaml", out=out, shard=shard, progress=False, **more)


def keys(records: Sequence[Record]) -> list[str]:
    return sorted(record.key for record in records)


# ---- the cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [EXAMPLE, SHORT, GRID, MODELS])
def test_shards_have_each_trial_once_and_keep_together_what_is_compared(text: str) -> None:
    whole = make_sweep(parse_config(text, "sweep.yaml"), CATALOGUE).trials
    elsewhere = [one.replace(memory_budget=2**30) for one in whole]
    for count in range(1, 8):
        places, found = defaultdict(set), list[Trial]()
        for index in range(1, count + 1):
            _, own = choose_shard(whole, None, f"{index}/{count}", "", 2)
            _, same = choose_shard(elsewhere, None, f"{index}/{count}", "", 2)
            assert [one.replace(memory_budget=2**30) for one in own] == same
            found += own
            for one in own:
                # names of one shape are labels, which no key has
                shape = one.workload.model_copy(update={"model": ""})
                places[shape, one.device].add(index)
        assert sorted(one.key for one in found) == sorted(one.key for one in whole)
        assert {len(shards) for shards in places.values()} == {1}
    for shard, trials in (("1/2", whole), ("2/2", elsewhere)):
        choose_shard(trials, Path("out"), shard, "", 2)
    assert len({one.run for one in read_shards(Path("out")).values()}) == 1


def test_searches_of_an_implementation_stay_together() -> None:
    kinds = product(("ring", "sdpa"), (1, 2), (True, False))
    whole = [trial(name, 1, {"chunk": n}, fit_only=fit) for name, n, fit in kinds]
    shards = [choose_shard(whole, None, f"{i}/3", "")[1] for i in (1, 2, 3)]
    assert [len(own) for own in shards] == [4, 2, 2]
    for own in shards:
        assert [one.fit_only for one in own] == [True, False] * (len(own) // 2)


def test_shards_take_about_equally_long() -> None:
    assert balance([1, 9, 5, 5, 4], 2) == [{1, 4}, {0, 2, 3}]
    assert balance([1.0], 3) == [{0}, set(), set()]
    lengths = [2**n for n in range(14, 20)]
    whole = [trial("sdpa", n, batch=b, device="cuda") for n in lengths for b in (1, 2, 3, 4)]
    parts = (choose_shard(whole, None, f"{i}/4", "", 1)[1] for i in (1, 2, 3, 4))
    work = [sum(attention_flops(one.workload) for one in own) for own in parts]
    assert max(work) <= 1.25 * sum(work) / 4  # the largest trial is 0.3 of all


# ---- folders that are read as one run ------------------------------------------------------------

FIXED = [*on_two_machines(sparser()[::3]), *searched()]


def fixed(is_search: bool) -> list[Record]:
    """Records of a sweep or of searches; those of a part follow each other, no two are copies."""
    found = [record for record in FIXED if (record.purpose != "measure") == is_search]
    name = "implementation" if is_search else "workload"
    parts = group_by(found, lambda r: (getattr(r.trial, name), is_search and repr(r.trial.options)))
    in_order = [record for part in parts.values() for record in part]
    return [r.model_copy(update={"wall_s": 1 + i / 1000}) for i, r in enumerate(in_order)]


def write_shards(records: Sequence[Record], rounds: int) -> None:
    """Write the records of three shards of a run; the last one was the first to end."""
    trials = [record.trial for record in records]
    for index in (3, 1, 2):
        place, own = choose_shard(trials, Path("out"), f"{index}/3", "", rounds)
        assert place
        kept = {one.key for one in own}
        write_records(place, [record for record in records if record.key in kept])
        (place / FINISHED).touch()


@pytest.mark.parametrize("is_search", [False, True])
def test_a_report_of_shards_is_that_of_the_run_without_shards(is_search: bool) -> None:
    records = fixed(is_search)
    write_shards(records, rounds=int(not is_search))
    write_records("whole", records)
    joined, whole = longseq_bench.load("out"), longseq_bench.load("whole")
    assert joined.notes == ()
    assert [r.key for r in joined.records] == [r.key for r in whole.records]
    assert joined.report() == whole.report()
    assert run(["compare", "out", "whole"]) == 0


class Killed(Machine):
    """A machine on which a run ends in its third trial."""

    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        if len(self.ran) == 2:
            raise KeyboardInterrupt
        return super().run(trial, on_phase)


def test_a_missing_shard_is_named(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    swept("3/3")
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Killed)
    with pytest.raises(KeyboardInterrupt):
        swept("1/3")
    path, named = Path("out/shard-1-of-3", RECORDS), "shard {}/3 of out has not finished"
    for text in (path.read_bytes(), b""):
        path.write_bytes(text)
        assert run(["report", "out", "--format", "md"]) == 0
        said = [line for line in capfd.readouterr().err.splitlines() if "finished" in line]
        assert said == [named.format(1), named.format(2)]
        assert named.format(2) in Path("out/report.md").read_text()
    Path("out/shard-3-of-3", RECORDS).unlink()
    assert refusal(capfd, "show", "out") == f"the results hold no record; {said[0]}; {said[1]}"
    Path("out/shard-1-of-3", FILE).write_text("{")
    assert "3/shard.json does not describe a shard; delete it" in refusal(capfd, "show", "out")


class Ended(Machine):
    """A machine on which something other than the trial ends it, such as a killed worker."""

    def run(self, trial: Trial, on_phase: OnPhase) -> LaunchResult:
        return LaunchResult(environment_failure("worker 1 was killed by SIGKILL"), 2)


def test_a_shard_with_a_trial_to_run_again_has_not_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("longseq_bench.api.machine.make_launcher", Ended)
        swept("1/1")
    assert longseq_bench.load("out").notes == ("shard 1/1 of out has not finished",)
    assert (swept().notes, Path("out/shard-1-of-1", FINISHED).exists()) == ((), True)


# ---- runs ----------------------------------------------------------------------------------------


def test_shards_of_a_sweep_are_the_whole_sweep_and_resume() -> None:
    whole = swept(out="whole")
    assert swept("3/3").folder == Path("out/shard-3-of-3")
    first, path = swept("1/3"), Path("out/shard-1-of-3", RECORDS)
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept[:2]) + kept[2][:40])  # killed in its third trial
    assert keys(swept("1/3").records) == keys(first.records)
    assert path.read_bytes().count(b"\n") == len(kept) + 1
    joined = swept()  # without a shard all that is left
    assert keys(joined.records) == keys(whole.records)
    assert (joined.baseline, [*joined.configs]) == ("sdpa", ["out/config.yaml"])
    assert not Path("out", RECORDS).exists()


def test_a_shard_without_trials_says_so_and_is_not_missing(capfd: Capture) -> None:
    for i in range(1, 6):
        assert run(["sweep", "sweep.yaml", "--out", "out", "--shard", f"{i}/5"]) == 0
    assert "nothing to run: this shard has no trials" in capfd.readouterr().err
    assert longseq_bench.load("out").notes == ()


def test_searches_run_in_shards() -> None:
    given: dict[str, Any] = {"memory_budget": "1MiB", "progress": False, "ceiling": 512}
    for i in (2, 1, 3):
        maxlen(["ring", "sdpa"], out="out", shard=f"{i}/3", **given)
    found, whole = (maxlen(["ring", "sdpa"], out=out, **given).maxima for out in ("out", None))
    assert [(m.label, m.max_tokens) for m in found] == [(m.label, m.max_tokens) for m in whole]


def test_a_dry_run_lists_the_trials_of_the_shard(capfd: Capture) -> None:
    assert run(["sweep", "sweep.yaml", "--dry-run", "--shard", "1/3", "--json"]) == 0
    (length,) = {one["workload"]["seq_len"] for one in json.loads(capfd.readouterr().out)["trials"]}
    assert length == 160
    assert not Path("out").exists()


def test_the_budget_of_one_shard_is_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sweep.yaml").write_text(SHORT)
    free = iter(range(2**34, 2**36, 2**32))
    monkeypatch.setattr("longseq_bench.environment.free_memory", lambda *_: next(free))
    shards = [swept("1/2"), swept("2/2"), swept("1/2")]
    assert len({r.trial.memory_budget for one in shards for r in one.records}) == 1


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["0/4", "5/4", "a/b", "2", "1/0", "-1/4"])
def test_an_index_out_of_range_is_refused(shard: str, capfd: Capture) -> None:
    sentence = f"--shard {shard} is no part of a run; write INDEX/COUNT, from 1/4 to 4/4"
    for command in (["sweep", "sweep.yaml"], ["maxlen", "--impl", "ring"]):
        assert refusal(capfd, *command, "--out", "out", f"--shard={shard}") == sentence
    assert not Path("out").exists()


def test_folders_of_other_runs_are_refused_and_nothing_is_lost(capfd: Capture) -> None:
    swept("1/2")
    swept(out="plain")
    Path("smaller.yaml").write_text(SHORT + "memory_budget: 32MiB\ndevice: cpu\n")
    kept = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    swept_again = ["sweep", "sweep.yaml", "--out"]
    said = refusal(capfd, *swept_again, "out", "--shard", "2/3")
    assert said == "shards 2/3 and 1/2 of out overlap; keep one number of shards in a folder"
    for changed in (["sweep.yaml", "--rounds", "5"], ["smaller.yaml"]):
        said = refusal(capfd, "sweep", *changed, "--out", "out", "--shard", "2/2")
        assert "shards 2/2 and 1/2 of out are of different runs: settings" in said
        assert "of different runs" in refusal(capfd, "sweep", *changed, "--out", "out")
    for arguments, sentence in (
        (["plain", "--shard", "1/2"], "plain holds a run without shards; name another folder"),
        (["out/shard-1-of-2"], "2 is the folder of one shard; name the folder above with --out"),
    ):
        assert sentence in refusal(capfd, *swept_again, *arguments)
    for out, sentence in (
        ("out", "out holds the shards of another run"),
        ("out/shard-1-of-2", "2 is the folder of one shard; name the folder above with --out"),
    ):
        assert run(["scaling", "--impl", "ring", "--out", out]) == 2
        assert sentence in capfd.readouterr().err
    assert "--shard needs --out" in refusal(capfd, *swept_again[:2], "--shard", "1/2")
    assert kept == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    Path("full").write_text("")
    assert "can't be written" in refusal(capfd, *swept_again, "full", "--shard", "1/2")


def test_two_runs_and_overlapping_shards_in_one_folder_are_not_read(capfd: Capture) -> None:
    for out, shard, more in (("a", "1/2", {}), ("b", "1/3", {}), ("c", "2/2", {"rounds": 1})):
        swept(shard, out=out, **more)
    for other, sentence in (("b", "overlap"), ("c", "are of different runs")):
        for one in (*Path("a").glob("shard-*"), *Path(other).glob("shard-*")):
            shutil.copytree(one, Path(f"both-{other}", one.name))
        assert sentence in refusal(capfd, "report", f"both-{other}")
