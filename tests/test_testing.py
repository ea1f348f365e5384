"""The contract test that ships with the package, as a plug-in's authors run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MODULE = """
import misbehaving
from longseq_bench.testing import ImplementationContract


def contract(kind):
    class WithGroups(kind):  # these take as many KV heads as heads
        def __call__(self, q, k, v):
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
            return super().__call__(q, k, v)

    return type("Test" + kind.__name__, (ImplementationContract,), {"cases": [(WithGroups, {})]})


for name in ("Sound", *SHOWN_BY):
    globals()["Test" + name] = contract(getattr(misbehaving, name))


class TestByName(ImplementationContract):
    cases = [("bad-refuses", {}), ("bad-refuses", {"odd": True})]
"""

SHOWN_BY = {
    "OverHeads": "test_a_token_moves_the_rows_that_see_it_and_no_others[WithGroups-full]",
    "BlockSoftmax": "test_constant_values_come_back[WithGroups-full]",
    "Leak": "test_the_future_never_reaches_the_past[WithGroups]",
    "Nan": "test_longer_than_a_tile[WithGroups]",
    "BlockDiagonal": "test_a_token_moves_the_rows_that_see_it_and_no_others[WithGroups-full]",
    "Gradient": "test_output_and_gradients_equal_the_reference[WithGroups-127-mha-full]",
    "FarKey": "test_a_token_moves_the_rows_that_see_it_and_no_others[WithGroups-full]",
}

BY_NAME = [
    f"TestByName::test_output_and_gradients_equal_the_reference[{case}-127-mha-full]"
    for case in ("bad-refuses", "bad-refuses-True")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of tests of a plug-in's module, with pytest's line about it.

    Of a faulty implementation only the test that shows its fault runs; a sound one runs all these.
    """
    folder = tmp_path_factory.mktemp("plugin")
    module = folder / "test_plugin.py"
    module.write_text(f"SHOWN_BY = {[*SHOWN_BY]}\n{MODULE}")
    shown = [f"Test{name}::{test}" for name, test in SHOWN_BY.items()]
    sound = [f"TestSound::{test}" for test in SHOWN_BY.values()]
    chosen = [f"{module}::{test}" for test in (*BY_NAME, *sound, *shown)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-vv", "-rA", "--tb=no", "-p", "no:cacheprovider",
         "--rootdir", str(folder), *chosen],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "500"},  # pytest 8 cuts its lines
    )  # fmt: skip
    print(done.stdout[-6000:])
    lines = re.findall(r"^(PASSED|FAILED) \S*?::(Test\w+::[^\]\s]+\]?)(.*)$", done.stdout, re.M)
    return {test: outcome + rest for outcome, test, rest in lines}


def test_a_sound_implementation_passes_them(outcomes: dict[str, str]) -> None:
    """The plug-in of tests/test_docs.py passes the whole contract."""
    sound = {test: line for test, line in outcomes.items() if test.startswith("TestSound::")}
    assert {test.partition("::")[2] for test in sound} == {*SHOWN_BY.values()}
    assert set(sound.values()) == {"PASSED"}


@pytest.mark.parametrize("name", sorted(SHOWN_BY))
def test_a_faulty_implementation_fails_with_its_figures(
    outcomes: dict[str, str], name: str
) -> None:
    line = outcomes[f"Test{name}::{SHOWN_BY[name]}"]
    assert line.startswith("FAILED")
    assert re.search(r"assert|AssertionError|not close", line)


def test_names_and_options_are_cases(outcomes: dict[str, str]) -> None:
    refused, passed = (outcomes[test] for test in BY_NAME)
    assert passed == "PASSED"
    assert "odd lengths need odd=true" in refused
