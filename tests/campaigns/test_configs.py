"""A short seed of the campaign of configs and command lines."""

from longseq_bench.config.trials import make_sweep, parse_config
from tests.campaigns.configs import FormulaLauncher, judge_accepted, run_campaign
from tests.config.test_trials import CATALOGUE, SHORT


def test_a_short_campaign_finds_nothing() -> None:
    assert run_campaign(60, seed=5, launcher=FormulaLauncher(CATALOGUE)) == []


def test_the_campaign_sees_nonsense_that_is_accepted() -> None:
    found = make_sweep(parse_config(SHORT, "c.yaml"), CATALOGUE)
    assert judge_accepted(found, SHORT) is None
    assert judge_accepted(found, SHORT + "seed: true\n") == "accepted seed: True"
    assert "no plain YAML" in str(judge_accepted(found, SHORT + "seed: !x 1\n"))
    wide = found.trials[0].model_copy(update={"threads": 10**6})
    broken = type(found)((wide,), None, 3, SHORT)
    assert judge_accepted(broken, SHORT) == "accepted threads 1000000"
