"""The contract test that ships with the package, as a plug-in's authors run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SHOWN_BY = {
    "first key not seen": "test_a_token_moves_the_rows_that_see_it_and_no_others[{}-full]",
    "window of half the length": "test_a_token_moves_the_rows_that_see_it_and_no_others[{}-full]",
    "a softmax for each block": "test_constant_values_come_back[{}-full]",
    "one key of the future": "test_the_future_never_reaches_the_past[{}]",
    "one NaN": "test_longer_than_a_tile[{}]",
    "dk is half": "test_output_and_gradients_equal_the_reference[{}-127-mha-full]",
}
"""Kinds of fault, and the test that shows each; {} stands for the case."""
SOUND = sorted({test.format("Faulty-none") for test in SHOWN_BY.values()})

MODULE = f"""
from faulty import Faulty
from longseq_bench.testing import ImplementationContract

class TestPlugIn(ImplementationContract):
    cases = [(Faulty, {{"kind": kind}}) for kind in ("none", *{[*SHOWN_BY]})]
    cases += [("bad-refuses", {{}}), ("bad-refuses", {{"odd": True}})]
"""
REFUSED, PASSED = (
    f"test_output_and_gradients_equal_the_reference[{case}-127-mha-full]"
    for case in ("bad-refuses", "bad-refuses-True")
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of tests of a plug-in's module, with pytest's line about it.

    Of a faulty implementation only the test that shows its fault runs; a sound one runs all these.
    """
    folder = tmp_path_factory.mktemp("plugin")
    module = folder / "test_plugin.py"
    module.write_text(MODULE)
    shown = [test.format(f"Faulty-{kind}") for kind, test in SHOWN_BY.items()]
    chosen = [f"{module}::TestPlugIn::{test}" for test in (REFUSED, PASSED, *SOUND, *shown)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-vv", "-rA", "--tb=no", "-p", "no:cacheprovider",
         "--rootdir", str(folder), *chosen],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "500"},  # pytest 8 cuts its lines
    )  # fmt: skip
    print(done.stdout[-6000:])
    lines = re.findall(r"^(PASSED|FAILED) \S*?::TestPlugIn::([^\]]+\])(.*)$", done.stdout, re.M)
    return {test: outcome + rest for outcome, test, rest in lines}


def test_a_sound_implementation_passes_them(outcomes: dict[str, str]) -> None:
    """The plug-in of tests/test_docs.py passes the whole contract."""
    assert {outcomes[test] for test in SOUND} == {"PASSED"}


@pytest.mark.parametrize("kind", SHOWN_BY)
def test_a_faulty_implementation_fails_with_its_figures(
    outcomes: dict[str, str], kind: str
) -> None:
    line = outcomes[SHOWN_BY[kind].format(f"Faulty-{kind}")]
    assert line.startswith("FAILED")
    assert re.search(r"assert|AssertionError|not close", line)


def test_names_and_options_are_cases(outcomes: dict[str, str]) -> None:
    assert outcomes[PASSED] == "PASSED"
    assert "odd lengths need odd=true" in outcomes[REFUSED]
