"""The search on random machines: exact, noisy, crashing.

`run` simulates the machine and logs every request. Promises are checked against that log: the
result was run, no longer length passed without a failure, and the bracket is closed and its winner
confirmed, or the maximum number of runs is used up.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import pytest

from longseq_bench.search.bracket import (
    CONFIRMATIONS,
    LONG_RUNS,
    MAX_CONFIRMATIONS,
    MAX_RUNS,
    Request,
    Result,
    find_longest,
)
from longseq_bench.search.edge_model import ExpectedLoads, History

Machine = Callable[[int], Result]
CEILING = 2**30
LEAST_TIME = 0.55


@dataclass
class SearchLog:
    """A finished search: its history, and the request and result of every run."""

    history: History = field(default_factory=History)
    requests: list[Request] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


def run(
    machine: Machine,
    start: int = 2048,
    ceiling: int = CEILING,
    expected: ExpectedLoads | None = None,
) -> SearchLog:
    """Run a search to its end; a search that does not end is a failure."""
    search, log = find_longest(start, ceiling, expected), SearchLog()
    request = next(search)
    for _ in range(MAX_RUNS + MAX_CONFIRMATIONS):
        assert 1 <= request.tokens <= ceiling
        log.requests.append(request)
        result = machine(request.tokens)
        if result.passed:
            log.passed.append(request.tokens)
        else:
            log.failed.add(request.tokens)
        try:
            request = search.send(result)
        except StopIteration as done:
            log.history = done.value
            return log
    raise AssertionError(f"no end after {len(log.requests)} runs: {log.requests[-5:]}")


def assert_promises(log: SearchLog, ceiling: int = CEILING, share: float = 0.16) -> None:
    """Check what is true on every machine. share: maximum width of the bracket, for noise."""
    history = log.history
    winners = {n for n in log.passed if n not in log.failed}
    assert history.low == max(winners, default=0)
    assert history.high == min((n for n in log.failed if n > history.low), default=None)
    assert history.passes[history.low] == log.passed.count(history.low)
    if len(log.requests) < MAX_RUNS:
        assert_closed(log, ceiling, share)


def assert_closed(log: SearchLog, ceiling: int = CEILING, share: float = 0.01) -> None:
    """Check the winner: confirmed, with a failure or the ceiling right above it.

    If time is the limit, the winner takes most of it; no run is left where most of them were late.
    """
    history = log.history
    time = median(history.times.get(history.low, [0.0]))
    late = sum(t > 1 for times in history.times.values() for t in times)
    is_late = history.high in history.times and history.high not in history.failures
    end = ceiling if history.high is None else history.high
    is_wide = history.low < end - (history.high is not None) * max(64, share * history.low)
    if is_late or is_wide:
        assert LEAST_TIME < time <= 1 or late >= LONG_RUNS - 1
    elif history.low and time < LEAST_TIME and late < LONG_RUNS - 1:
        assert history.passes[history.low] > CONFIRMATIONS
        assert log.requests[-1].purpose == "confirm"


def loads_of(n: int, memory: float, seconds: float) -> Result:
    return Result(max(memory, seconds) <= 1, {"memory": memory, "time": seconds})


def smooth(draw: random.Random) -> Machine:
    """Memory is piecewise linear and convex in the length, or quadratic; time is a power of it."""
    edge = int(10 ** draw.uniform(1.0, 8.5))
    square = draw.choice([0.0, draw.random()])
    base = draw.choice([0.0, 0.2 * draw.random()])
    bend, knee = draw.choice([0.0, 0.5]), edge * draw.random()
    exponent, slow = draw.uniform(0.8, 2.2), edge * 10 ** draw.uniform(-1, 2)

    def growth(n: int) -> float:
        return (1 - square) * n / edge + square * (n / edge) ** 2 + bend * max(0, n - knee) / edge

    top = growth(edge)

    def machine(n: int) -> Result:
        memory = base + (1 - base) * growth(n) / top
        return loads_of(n, memory, (n / slow) ** exponent)

    return machine


def noisy(draw: random.Random) -> Machine:
    """The loads of every run are wrong by some percent, so the edge moves."""
    exact, size = smooth(draw), draw.choice([0.001, 0.01, 0.2])

    def machine(n: int) -> Result:
        loads = {k: x * (1 + draw.uniform(-size, size)) for k, x in exact(n).loads.items()}
        return loads_of(n, loads["memory"], loads["time"])

    return machine


def crashing(draw: random.Random) -> Machine:
    """Every run of some lengths crashes, at any load."""
    exact, modulus, share = smooth(draw), draw.randrange(2, 9), draw.random() * 0.5
    salt = draw.random()

    def machine(n: int) -> Result:
        crashes = n % modulus == 0 or random.Random(f"{salt} {n}").random() < share
        return Result(False) if crashes else exact(n)

    return machine


def flaky(draw: random.Random) -> Machine:
    """Any run may crash."""
    exact, share = smooth(draw), draw.choice([0.05, 0.3])
    return lambda n: Result(False) if draw.random() < share else exact(n)


@pytest.mark.parametrize("kind", [smooth, noisy, crashing, flaky], ids=lambda k: k.__name__)
def test_promises_are_kept_on_random_machines(kind: Callable[[random.Random], Machine]) -> None:
    """Fault 12: the result is never below a length that passed; it is closed and confirmed.

    Also with expected loads: memory is wrong by up to 3 times, time by up to 6.
    """
    for seed in range(300):
        draw = random.Random(f"{kind.__name__} {seed}")
        start, ceiling = draw.choice([1, 100, 2048]), int(10 ** draw.uniform(0, 9))
        factors = 3 ** draw.uniform(-1, 1), 6 ** draw.uniform(-1, 1)
        quiet = smooth(random.Random(draw.random()))
        for expected in (None, expected_loads_of(quiet, *factors)):
            log = run(kind(random.Random(seed)), start, ceiling, expected)
            assert_promises(log, ceiling, 0.01 if kind is smooth else 0.16)


def test_a_machine_without_noise_is_always_closed_and_confirmed() -> None:
    """Fault 12. With exact loads and the usual first length, the maximum of runs is enough."""
    for seed in range(400):
        assert_closed(run(smooth(random.Random(seed))))


# ---- limited by time on a noisy machine ---------------------------------------------------------


def run_timed_search(
    draw: random.Random, noise: float, spikes: float = 0.0, uncertainty: float = 0.0
) -> tuple[History, dict[int, list[float]]]:
    """Search on a machine with noisy times: normal noise, and slow runs (share `spikes`).

    uncertainty: the factor by which expected times may be wrong; 0: nothing is expected. A run that
    is late by more than 10 % is killed, so its time is unknown.
    """
    edge, exponent = 10 ** draw.uniform(3.5, 6), draw.uniform(1, 2.1)

    def quiet(n: int) -> float:
        return (n / edge) ** exponent

    factor = uncertainty ** draw.uniform(-1, 1) if uncertainty else 0.0
    expected = ExpectedLoads(lambda n: {"time": factor * quiet(n)}, {"time": uncertainty})
    search = find_longest(2048, CEILING, expected if uncertainty else None)
    request, times = next(search), dict[int, list[float]]()
    while True:
        slow = draw.uniform(1.2, 1.8) if draw.random() < spikes else 1.0
        time = quiet(request.tokens) * (1 + abs(draw.gauss(0, noise))) * slow
        times.setdefault(request.tokens, []).append(time)
        loads = {"time": time} if time <= 1.1 else {}
        try:
            request = search.send(Result(time <= 1, loads, late=time > 1))
        except StopIteration as done:
            return done.value, times


@pytest.mark.parametrize("uncertainty", [0.0, 1.3, 6.0])
@pytest.mark.parametrize(("noise", "spikes"), [(0.0, 0.0), (0.01, 0.0), (0.1, 0.1), (0.2, 0.2)])
def test_the_winner_is_in_time_by_the_median_of_its_runs(
    noise: float, spikes: float, uncertainty: float
) -> None:
    """150 machines each, judged by the times of the machine."""
    for seed in range(150):
        history, runs = run_timed_search(random.Random(seed), noise, spikes, uncertainty)
        passed = {n for n, times in runs.items() if sum(t <= 1 for t in times) > len(times) / 2}
        assert history.low == max(passed, default=0)
        assert history.high == min((n for n in runs if n > history.low), default=None)


@pytest.mark.parametrize(("noise", "slower"), [(0.0, 1.0), (0.02, 1.0), (0.02, 1.3), (0.05, 1.8)])
def test_a_search_that_time_limits_has_few_runs_and_ends_near_the_limit(
    noise: float, slower: float
) -> None:
    """Short passes are up to 12 % slow for their length. From the third run on the machine is slow.

    The profile's rate is up to three times too high or too low; memory has room for longer ones.
    """
    runs, ends, late = list[int](), list[float](), 0
    for seed in range(200):
        draw = random.Random(f"{noise} {slower} {seed}")
        edge, overhead = 10 ** draw.uniform(3.5, 6), draw.uniform(0, 0.12)
        rate, memory = 3 ** draw.uniform(-1, 1), edge * 10 ** draw.uniform(0.5, 2)
        loads = lambda n: {"memory": n / memory, "time": rate * (n / edge) ** 2}  # noqa: B023, E731
        search = find_longest(2048, CEILING, ExpectedLoads(loads, {"time": 6.0}))
        request, count = next(search), 0
        while True:
            count += 1
            pace = (slower if count > 2 else 1.0) * draw.gauss(1, noise)
            ratio = request.tokens / edge
            time = ratio**2 * (1 + overhead * (1 - min(1.0, ratio))) * pace
            late += time > 1
            result = {"memory": request.tokens / memory, "time": time} if time <= 1 else {}
            try:
                request = search.send(Result(time <= 1, result, late=time > 1))
            except StopIteration as done:
                runs.append(count)
                ends.append(done.value.low / edge * slower**0.5)
                break
    assert max(runs) <= (4 if slower == 1 else 5)
    assert 0.9 < sorted(ends)[100] <= 1.0 if slower == 1 else 0.6 < sorted(ends)[100] < 1
    assert late == 0 or noise
    assert min(ends) > (0.84 if slower == 1 else 0.4)


# ---- with expected loads -----------------------------------------------------------------------


def expected_loads_of(machine: Machine, memory: float = 1.0, time: float = 1.0) -> ExpectedLoads:
    """Return the machine's loads, each times a factor; time is marked as uncertain."""

    def loads(n: int) -> dict[str, float]:
        exact = machine(n).loads
        return {"memory": memory * exact["memory"], "time": time * exact["time"]}

    return ExpectedLoads(loads, {"time": 6.0})


def test_good_expected_loads_need_five_runs_on_average() -> None:
    counts = []
    for seed in range(200):
        draw = random.Random(f"good {seed}")
        machine = smooth(draw)
        factor = draw.uniform(0.98, 1.02)
        log = run(machine, expected=expected_loads_of(machine, factor, draw.uniform(0.3, 3)))
        assert_closed(log)
        counts.append(len(log.requests))
    assert max(counts) <= 8
    assert sum(counts) / len(counts) <= 5
