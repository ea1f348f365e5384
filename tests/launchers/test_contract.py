"""The contract of every registered launcher, a plug-in's included."""

from collections.abc import Iterator

import pytest

from longseq_bench.api.machine import LAUNCHER_VARIABLE, make_launcher
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UnknownNameError
from longseq_bench.launchers.base import LAUNCHERS, Launcher, LaunchResult
from tests.make import trial
from tests.simulated import SimulatedLauncher


@pytest.fixture(scope="module", params=LAUNCHERS.names())
def named(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    with LAUNCHERS.get(request.param)() as launcher:
        yield launcher


def test_it_lists_what_can_run_here(named: Launcher) -> None:
    catalogue = named.catalogue()
    assert isinstance(catalogue, Catalogue)
    assert "cpu" in catalogue.devices


def test_a_dry_run_has_one_answer_for_each_trial(named: Launcher) -> None:
    of = trial("sdpa", 64, {"backend": "auto"})
    assert named.dry_run([]) == []
    answers = named.dry_run([of, of.at(128)], limit=60.0)
    assert len(answers) == 2
    assert all(a.unsupported or a.peak_bytes > 0 for a in answers)


def test_a_trial_announces_its_phases_and_ends_with_measurements(named: Launcher) -> None:
    phases: list[str] = []
    of = trial("sdpa", 64, {"backend": "auto"}, repeats=1)
    result = named.run(of, lambda phase, part: phases.append(phase))
    assert isinstance(result, LaunchResult)
    assert (result.outcome.status, result.outcome.reason) == ("ok", None)
    assert "forward" in phases
    assert result.processes >= 1
    assert {"peak", "pass_time", "time"} <= {m.name for m in result.outcome.measurements}


def test_what_can_not_be_done_is_an_outcome_and_not_an_exception(named: Launcher) -> None:
    outcome = named.run(trial("sdpa", 1, {"backend": "auto"}, world_size=2), print).outcome
    assert outcome.status == "unsupported"
    assert outcome.reason


def test_a_command_takes_the_launcher_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "locl")
    with pytest.raises(UnknownNameError, match="'local'"):
        make_launcher()
    monkeypatch.setattr(LAUNCHERS, "get", {"of-a-plug-in": SimulatedLauncher}.__getitem__)
    monkeypatch.setenv(LAUNCHER_VARIABLE, "of-a-plug-in")
    assert isinstance(make_launcher(), SimulatedLauncher)
