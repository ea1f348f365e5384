"""Growth with tokens and ranks: fitted exponents."""

import math

import pytest

from longseq_bench.analysis.scaling import complexities, power_law
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.core.cost import attention_flops
from longseq_bench.core.model import Record
from tests import make


def timed(tokens: int, ranks: int, seconds: float, name: str = "ring") -> Record:
    trial = make.trial(name, tokens, world_size=ranks)
    flops = attention_flops(trial.workload)
    each = {"time": [seconds], "flops": flops}
    return make.record(trial, make.on_ranks(*[each] * ranks))


def test_exponents_need_three_lengths_that_were_ok() -> None:
    two = [timed(n, 1, 1.0) for n in (1024, 2048)]
    assert complexities(sweep_rows(two)) == []
    late = make.record(
        make.trial("ring", 4096), make.outcome("timeout", "late", "time", time=[9.0])
    )
    assert complexities(sweep_rows([*two, late])) == []
    (one,) = complexities(sweep_rows([*two, timed(4096, 1, 4.0)]))
    assert (one.ranks, one.points) == (None, 3)
    assert one.formula_tokens == pytest.approx(2.0)


def test_quantities_that_vary_together_have_no_exponents() -> None:
    """Weak scaling: tokens grow in proportion to ranks, so no fit can separate them."""
    records = [timed(1024 * p, p, 1e-9 * (1024 * p) ** 2 / p) for p in (1, 2, 4)]
    (one,) = complexities(sweep_rows(records))
    assert (one.tokens, one.ranks, one.points) == (None, None, 3)


def test_one_degree_of_freedom_has_the_widest_interval() -> None:
    (one,) = power_law([[0.0, 1.0, 2.0]], [0.0, 1.1, 2.0])
    assert one.high is not None
    # residuals are -1/30, 2/30, -1/30: s = sqrt(6/900), over sqrt(2), times t(1) = 12.7062
    expected = 12.7062 * math.sqrt(6 / 900) / math.sqrt(2)
    assert one.high - one.value == pytest.approx(expected, rel=1e-5)


def test_without_degrees_of_freedom_there_is_no_interval() -> None:
    (one,) = power_law([[0.0, 1.0]], [0.0, 3.0])
    assert (one.value, one.low, one.high) == (pytest.approx(3.0), None, None)
