"""The search against thousands of drawn machines, each a function of the length alone or noisy.

`run` plays the machine and keeps what it saw; the promises are checked on that, not on what the
search says: nothing is returned that was not run, nothing shorter than a pass that held; and the
bracket is closed and its winner confirmed, or the most runs there may be were spent.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from longseq_bench.search.bracket import (
    CONFIRMATIONS,
    MAX_CONFIRMATIONS,
    MAX_RUNS,
    TOLERANCE_SHARE,
    TOLERANCE_TOKENS,
    Bracket,
    Request,
    Result,
    find_longest,
    tolerance,
)
from longseq_bench.search.edge_model import ExpectedLoads

Machine = Callable[[int], Result]
CEILING = 2**30


@dataclass
class Seen:
    """A search that ended: its bracket, and every run with its answer."""

    bracket: Bracket
    asks: list[Request] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


def run(
    machine: Machine,
    start: int = 2048,
    ceiling: int = CEILING,
    expected: ExpectedLoads | None = None,
) -> Seen:
    """Play a search to its end; a search that does not end is a failure."""
    search, seen = find_longest(start, ceiling, expected), Seen(Bracket(0, None, None, 0))
    ask = next(search)
    for _ in range(MAX_RUNS + MAX_CONFIRMATIONS):
        assert 1 <= ask.tokens <= ceiling
        seen.asks.append(ask)
        answer = machine(ask.tokens)
        if answer.passed:
            seen.passed.append(ask.tokens)
        else:
            seen.failed.add(ask.tokens)
        try:
            ask = search.send(answer)
        except StopIteration as done:
            seen.bracket = done.value
            return seen
    raise AssertionError(f"no end after {len(seen.asks)} runs: {seen.asks[-5:]}")


def assert_promises(seen: Seen, ceiling: int = CEILING, share: float = 0.16) -> None:
    """What holds on every machine. share: how wide the bracket may be; noise widens it."""
    got = seen.bracket
    winners = {n for n in seen.passed if n not in seen.failed}
    assert got.passed == max(winners, default=0)
    assert got.failed == min((n for n in seen.failed if n > got.passed), default=None)
    assert got.confirmations == max(0, seen.passed.count(got.passed) - 1)
    if len(seen.asks) < MAX_RUNS:
        assert_closed(seen, ceiling, share)


def assert_closed(seen: Seen, ceiling: int = CEILING, share: float = 0.01) -> None:
    """The winner passed again in another run, and a failure, or the ceiling, is right above it."""
    got = seen.bracket
    if got.passed:
        assert got.confirmations >= CONFIRMATIONS
        assert seen.asks[-1].purpose == "confirm"
    if got.failed is None:
        assert got.passed == ceiling
    else:
        assert got.failed - got.passed <= max(64, share * got.passed)


def loads_of(n: int, memory: float, seconds: float) -> Result:
    return Result(max(memory, seconds) <= 1, {"memory": memory, "time": seconds})


def smooth(draw: random.Random) -> Machine:
    """Memory piecewise linear and convex in the length (at times quadratic), time a power."""
    edge = int(10 ** draw.uniform(1.0, 8.5))
    square = draw.choice([0.0, draw.random()])
    base = draw.choice([0.0, 0.2 * draw.random()])
    bend, knee = draw.choice([0.0, 0.5]), edge * draw.random()
    exponent, slow = draw.uniform(0.8, 2.2), edge * 10 ** draw.uniform(-1, 2)

    def grown(n: int) -> float:
        return (1 - square) * n / edge + square * (n / edge) ** 2 + bend * max(0, n - knee) / edge

    top = grown(edge)

    def machine(n: int) -> Result:
        memory = base + (1 - base) * grown(n) / top
        return loads_of(n, memory, (n / slow) ** exponent)

    return machine


def noisy(draw: random.Random) -> Machine:
    """Loads off by some percent at every run: the edge moves."""
    exact, size = smooth(draw), draw.choice([0.001, 0.01, 0.2])

    def machine(n: int) -> Result:
        loads = {k: x * (1 + draw.uniform(-size, size)) for k, x in exact(n).loads.items()}
        return loads_of(n, loads["memory"], loads["time"])

    return machine


def crashing(draw: random.Random) -> Machine:
    """At some lengths it dies, whatever the loads, the same at every visit."""
    exact, modulus, share = smooth(draw), draw.randrange(2, 9), draw.random() * 0.5
    salt = draw.random()

    def machine(n: int) -> Result:
        dies = n % modulus == 0 or random.Random(f"{salt} {n}").random() < share
        return Result(False) if dies else exact(n)

    return machine


def flaky(draw: random.Random) -> Machine:
    """Any run may die."""
    exact, share = smooth(draw), draw.choice([0.05, 0.3])
    return lambda n: Result(False) if draw.random() < share else exact(n)


def mute(draw: random.Random) -> Machine:
    """Passes and failures without a load to learn from."""
    exact = smooth(draw)
    return lambda n: Result(exact(n).passed)


@pytest.mark.parametrize("kind", [smooth, noisy, crashing, flaky, mute], ids=lambda k: k.__name__)
def test_promises_hold_on_drawn_machines(kind: Callable[[random.Random], Machine]) -> None:
    """Fault 12: never ends below a length that passed, always confirmed, always closed."""
    for seed in range(800):
        draw = random.Random(f"{kind.__name__} {seed}")
        start, ceiling = draw.choice([1, 100, 2048]), int(10 ** draw.uniform(0, 9))
        assert_promises(run(kind(draw), start, ceiling), ceiling, 0.01 if kind is smooth else 0.16)


def test_a_calm_machine_is_always_closed_and_confirmed() -> None:
    """Fault 12. Exact loads and the usual first length: the runs there may be must be enough."""
    for seed in range(2000):
        assert_closed(run(smooth(random.Random(seed))))


def test_the_edge_of_a_machine_is_found_to_one_percent_or_64_tokens() -> None:
    """Known from outside: the true edge by bisection over the machine itself."""
    for seed in range(500):
        machine = smooth(random.Random(seed))
        low, high = 0, CEILING + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if machine(middle).passed else (low, middle)
        seen = run(machine)
        assert low - max(64, 0.01 * low) <= seen.bracket.passed <= low


@pytest.mark.parametrize("edge", [64, 100, 1000, 5000, 8191, 8193, 20_000])
def test_steps_are_finer_than_8192_tokens(edge: int) -> None:
    """Fault 12."""
    seen = run(lambda n: loads_of(n, n / edge, 0))
    assert edge - max(64, edge // 100) <= seen.bracket.passed <= edge


def test_few_runs_where_memory_is_linear() -> None:
    """Runs are dear: two for a line, one near the edge, its failure, the confirmation."""
    for edge in (10_000, 123_457, 10**6, 10**7):
        assert len(run(lambda n, edge=edge: loads_of(n, n / edge, 0)).asks) <= 8


def test_everything_fits_up_to_the_ceiling() -> None:
    seen = run(lambda n: loads_of(n, n / 10**12, 0), ceiling=100_003)
    assert seen.bracket.passed == 100_003
    assert seen.bracket.failed is None
    assert seen.bracket.confirmations == 1


def test_a_ceiling_of_one_token_is_run() -> None:
    seen = run(lambda n: Result(True), ceiling=1)
    assert [a.tokens for a in seen.asks] == [1, 1]
    assert seen.bracket == Bracket(1, None, None, 1)


def test_nothing_fits() -> None:
    seen = run(lambda n: Result(False))
    assert seen.bracket.passed == 0
    assert seen.bracket.failed is not None
    assert seen.bracket.failed <= TOLERANCE_TOKENS
    assert seen.bracket.confirmations == 0


def test_only_one_token_fits() -> None:
    seen = run(lambda n: Result(n == 1))
    assert (seen.bracket.passed, seen.bracket.confirmations) == (1, 1)


def test_a_hopeless_run_ends_the_search_at_once() -> None:
    seen = run(lambda n: Result(False, hopeless=True))
    assert len(seen.asks) == 1
    assert seen.bracket == Bracket(0, seen.asks[0].tokens, None, 0)


def test_a_late_hopeless_run_keeps_what_passed() -> None:
    seen = run(lambda n: Result(n < 9000, {"memory": n / 10**5}, hopeless=n >= 9000))
    assert seen.bracket.passed == max(seen.passed)
    assert seen.asks[-1].tokens >= 9000


def test_a_failure_below_a_pass_says_nothing() -> None:
    """The first length of all fails, longer ones pass once shorter ones have shown the line."""
    seen = run(lambda n: Result(False) if n == 2048 else loads_of(n, n / 100_000, 0))
    assert seen.bracket.passed < 2048
    beyond = run(lambda n: Result(False) if 3000 < n < 9000 else loads_of(n, n / 10**5, 0), 2900)
    assert beyond.bracket.passed >= 2900
    for one in (seen, beyond):
        assert_promises(one)


def test_a_winner_that_fails_its_confirmation_is_no_winner() -> None:
    visits: dict[int, int] = {}

    def machine(n: int) -> Result:
        visits[n] = visits.get(n, 0) + 1
        if n > 9000 and visits[n] > 1:
            return Result(False)
        return loads_of(n, n / 10_000, 0)

    seen = run(machine)
    assert seen.bracket.passed <= 9000
    assert seen.bracket.confirmations == 1
    assert_promises(seen)


def test_what_was_expected_is_told_before_the_edge_is_run() -> None:
    seen = run(lambda n: loads_of(n, n / 500_000, 0))
    assert seen.bracket.predicted == pytest.approx(500_000, rel=0.001)
    near = next(a for a in seen.asks if a.tokens > 400_000)
    assert (near.purpose, near.predicted) == ("edge", seen.bracket.predicted)
    assert seen.asks[0].purpose == "probe"


def test_tolerance_is_the_larger_of_both() -> None:
    assert (TOLERANCE_TOKENS, TOLERANCE_SHARE) == (64, 0.01)
    assert [tolerance(n) for n in (1, 6400, 6500, 10**6)] == [64, 64, 65, 10_000]


def test_contradictions_widen_the_tolerance_but_not_for_ever() -> None:
    assert [tolerance(10**6, c) for c in (0, 1, 2, 4, 40)] == [
        10_000, 20_000, 40_000, 160_000, 160_000,
    ]  # fmt: skip


# ---- limited by time on a noisy machine ---------------------------------------------------------


@dataclass
class TimedRun:
    """A time-limited search that ended: its bracket, the runs with their times, the true edge."""

    bracket: Bracket
    times: list[tuple[int, float]]
    edge: int


def run_in_time(
    draw: random.Random, noise: float, spikes: float = 0.0, rough: float = 0.0
) -> TimedRun:
    """Search on a machine whose time is noisy: a normal share, and now and then a slow run.

    A run that is late by more than 10 % is killed, so that its time is unknown.
    """
    edge, exponent = 10 ** draw.uniform(3.5, 6), draw.uniform(1, 2.1)

    def quiet(n: int) -> float:
        return (n / edge) ** exponent

    off = rough ** draw.uniform(-1, 1) if rough else 0.0
    told = ExpectedLoads(lambda n: {"time": off * quiet(n)}, {"time": rough}) if rough else None
    search, times = find_longest(2048, CEILING, told), []
    request = next(search)
    while True:
        slow = draw.uniform(1.2, 1.8) if draw.random() < spikes else 1.0
        time = quiet(request.tokens) * (1 + abs(draw.gauss(0, noise))) * slow
        times.append((request.tokens, time))
        loads = {"time": time} if time <= 1.1 else {}
        try:
            request = search.send(Result(time <= 1, loads, late=time > 1))
        except StopIteration as done:
            return TimedRun(done.value, times, int(edge))


@pytest.mark.parametrize("rough", [0.0, 1.3, 6.0])
@pytest.mark.parametrize(("noise", "spikes"), [(0.0, 0.0), (0.01, 0.0), (0.1, 0.1), (0.2, 0.2)])
def test_the_winner_is_in_time_by_the_median_of_its_runs(
    noise: float, spikes: float, rough: float
) -> None:
    """1,000 machines each: judged by what the machine saw, not by what the search says."""
    for seed in range(1000):
        seen = run_in_time(random.Random(seed), noise, spikes, rough)
        by_length: dict[int, list[float]] = {}
        for tokens, time in seen.times:
            by_length.setdefault(tokens, []).append(time)
        passed = {
            n for n, times in by_length.items() if sum(t <= 1 for t in times) > len(times) / 2
        }
        assert seen.bracket.passed == max(passed, default=0)
        assert seen.bracket.failed == min(
            (n for n in by_length if n > seen.bracket.passed), default=None
        )


def test_noise_does_not_multiply_the_time_of_a_search() -> None:
    """Time is counted in limits of one pass; a late run costs at most 1.1 of them."""
    for noise, spikes in ((0.0, 0.0), (0.05, 0.05), (0.2, 0.2)):
        spent = []
        for seed in range(500):
            seen = run_in_time(random.Random(seed), noise, spikes, 6.0)
            spent.append(sum(min(time, 1.1) for _, time in seen.times))
        assert sorted(spent)[450] <= 8
        assert max(spent) <= 12


def test_a_quiet_machine_is_searched_to_one_percent() -> None:
    for seed in range(500):
        seen = run_in_time(random.Random(seed), 0.0, rough=1.3)
        got = seen.bracket
        assert got.failed is not None
        assert got.passed <= seen.edge < got.failed
        assert got.failed - got.passed <= max(64, 0.05 * got.passed)


def test_a_bracket_is_no_narrower_than_the_spread_of_the_times() -> None:
    """A pass and a late run disagree by 5 % on the edge: 1 % would be invented precision."""

    def machine(n: int) -> Result:
        time = 0.97 if n == 99_500 else 1.05
        return Result(time <= 1, {"time": time}, late=time > 1)

    seen = run(machine, expected=ExpectedLoads(lambda n: {"time": n / 100_000}))
    first, second, third = (ask.tokens for ask in seen.asks)
    assert first == third == seen.bracket.passed == 99_500
    assert 102_000 < second == seen.bracket.failed < 102_600


def test_one_late_run_of_three_is_noise() -> None:
    """The confirmation is late; a third run decides, and the winner stays."""
    visits: dict[int, int] = {}

    def machine(n: int) -> Result:
        visits[n] = visits.get(n, 0) + 1
        late = n > 50_000 or visits[n] == 2
        return Result(not late, {"time": n / 50_000 * (1.02 if late else 1)}, late=late)

    seen = run(machine)
    assert seen.bracket.passed > 49_000
    assert visits[seen.bracket.passed] == 3
    assert seen.bracket.confirmations == 1


# ---- with an expectation -----------------------------------------------------------------------


def told_by(machine: Machine, memory: float = 1.0, time: float = 1.0) -> ExpectedLoads:
    """The loads of a machine without noise, each off by a factor; that of time is known to be."""

    def loads(n: int) -> dict[str, float]:
        exact = machine(n).loads
        return {"memory": memory * exact["memory"], "time": time * exact["time"]}

    return ExpectedLoads(loads, {"time": 6.0})


def one_of(draw: random.Random) -> tuple[Machine, Machine]:
    """A drawn machine, and the same without its noise."""
    kind, seed = draw.choice([smooth, noisy, crashing, flaky]), draw.random()
    return kind(random.Random(seed)), smooth(random.Random(seed))


@pytest.mark.parametrize("part", range(4))
def test_promises_hold_whatever_is_expected(part: int) -> None:
    """10,000 limits in all, noisy or not monotone, the expectation off by up to three times: never
    a length that was not run, never one below another that passed."""
    for seed in range(part * 2500, (part + 1) * 2500):
        draw = random.Random(f"expected {seed}")
        machine, quiet = one_of(draw)
        off = 3 ** draw.uniform(-1, 1), 6 ** draw.uniform(-1, 1)
        ceiling = int(10 ** draw.uniform(0, 9))
        seen = run(machine, 2048, ceiling, told_by(quiet, *off))
        assert_promises(seen, ceiling)


def test_a_good_expectation_needs_five_runs_at_most_and_mostly_fewer() -> None:
    counts = []
    for seed in range(400):
        draw = random.Random(f"good {seed}")
        machine = smooth(draw)
        off = draw.uniform(0.98, 1.02)
        seen = run(machine, expected=told_by(machine, off, draw.uniform(0.3, 3)))
        assert_closed(seen)
        counts.append(len(seen.asks))
    assert max(counts) <= 8
    assert sum(counts) / len(counts) <= 5


def test_the_first_run_is_just_under_what_is_expected() -> None:
    def line(n: int) -> Result:
        return loads_of(n, n / 100_000, 0.0)

    seen = run(line, expected=told_by(line))
    asked = [ask.tokens for ask in seen.asks]
    assert asked[0] == pytest.approx(99_500, abs=200)
    assert {ask.predicted for ask in seen.asks} == {seen.asks[0].predicted}
    assert seen.asks[0].predicted == pytest.approx(100_000, rel=0.002)
    assert len(asked) == 3


def test_what_is_roughly_known_is_met_far_from_its_edge() -> None:
    """A pass that takes six times as long as expected is still inside the limit."""

    def slow(n: int) -> Result:
        return loads_of(n, n / 1e6, (n / 50_000) ** 2)

    seen = run(slow, expected=told_by(slow, time=1.0))
    assert seen.asks[0].tokens == pytest.approx(50_000 / 6**0.5, rel=0.02)
    assert not seen.failed & {seen.asks[0].tokens, seen.asks[1].tokens}


def test_an_expectation_that_fails_is_left_step_by_step() -> None:
    def line(n: int) -> Result:
        return loads_of(n, n / 80_000, 0.0)

    seen = run(line, expected=told_by(lambda n: loads_of(n, n / 100_000, 0.0)))
    asked = [ask.tokens for ask in seen.asks]
    assert asked[:4] == [int(asked[0] * share) for share in (1, 0.97, 0.9, 0.7)]
    assert_closed(seen)


@pytest.mark.parametrize("loads", [{}, {"memory": 0.0}], ids=["nothing told", "nothing taken"])
def test_an_expectation_of_nothing_is_no_expectation(loads: dict[str, float]) -> None:
    def line(n: int) -> Result:
        return loads_of(n, n / 80_000, 0.0)

    plain, other = run(line), run(line, expected=ExpectedLoads(lambda n: loads))
    assert [a.tokens for a in other.asks] == [a.tokens for a in plain.asks]


def test_an_expectation_beyond_the_ceiling_asks_for_the_ceiling() -> None:
    def line(n: int) -> Result:
        return loads_of(n, n / 80_000, 0.0)

    seen = run(line, ceiling=5000, expected=told_by(line))
    assert [ask.tokens for ask in seen.asks] == [5000, 5000]
    assert seen.bracket == Bracket(5000, None, 5000, 1)
