"""Memory of a trial over its length: dry runs at some lengths, interpolated between them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longseq_bench.core.cost import floor_tokens
from longseq_bench.core.hardware import Hardware
from longseq_bench.core.model import DryRunEstimate, Trial

DryRun = Callable[[Sequence[Trial]], list[DryRunEstimate]]
"""A launcher's `dry_run`: the predicted cost of each trial, by a dry run."""

GRID = (0.02, 0.2, 0.5, 0.8, 0.9, 0.96, 1.0)
"""Lengths of dry runs, as shares of the floor's length: memory is nearly linear in between, and
most edges are near the end."""
MAX_REFINEMENTS = 6  # further dry runs at the edge of the curve
EDGE_TOLERANCE = 0.002  # a dry run within this share of the edge ends the refinement
MAX_EDGE_GAP = 1.07  # so do dry runs on both sides of the edge with at most this length ratio
LIMIT_DRY_RUNS = 7  # lengths that are tried at once to find where a kernel's limit begins
LIMIT_TOLERANCE = 0.001  # that search ends within this share of the limit
MIN_TREND = 0.5  # minimum growth of memory beyond the last length, as a share of the mean before

Point = tuple[int, DryRunEstimate]  # a length and the estimate of its dry run


@dataclass(frozen=True)
class Curve:
    """Dry runs of a trial at some lengths, ascending, and the interpolation between them.

    refused: the shortest length that is known to be too long for the trial's kernel.
    """

    points: tuple[Point, ...]
    refused: Point | None = None

    def peak(self, tokens: int) -> float:
        """Return the bytes of tensors on the fullest rank, interpolated linearly."""
        return self._between(tokens, lambda one: one.peak_bytes + one.rest_bytes, power=False)

    @property
    def outside_bytes(self) -> int:
        """Bytes of the device outside tensors, which hardly depend on the length."""
        return max(estimate.outside_bytes for _, estimate in self.points)

    def at(self, tokens: int) -> DryRunEstimate:
        """Return the cost at a length, interpolated by powers of the length, the peak linearly."""
        (_, shorter), _ = self._neighbours(tokens)
        return shorter.model_copy(
            update={
                "peak_bytes": round(self.peak(tokens)),
                "flops": self._between(tokens, lambda estimate: estimate.flops, power=True),
                "bytes_sent": round(self._between(tokens, lambda e: e.bytes_sent, power=True)),
                "transfers": round(self._between(tokens, lambda e: e.transfers, power=True)),
            }
        )

    def gap(self, tokens: int) -> float:
        """Return the ratio of the neighbouring lengths; infinite beyond the last one."""
        (a, _), (b, _) = self._neighbours(tokens)
        return b / a if a <= tokens <= b else math.inf

    def _neighbours(self, tokens: int) -> tuple[Point, Point]:
        """Return the points around a length; beyond the last one, the last two."""
        lengths = [n for n, _ in self.points]
        at = min(max(1, bisect_left(lengths, tokens)), len(lengths) - 1)
        return self.points[at - 1], self.points[at]

    def _between(self, tokens: int, value: Callable[[DryRunEstimate], float], power: bool) -> float:
        (a, first), (b, last) = self._neighbours(tokens)
        low, high = value(first), value(last)
        if power and min(low, high) > 0:
            slope = math.log(high / low) / math.log(b / a)
            return float(low * (tokens / a) ** slope)
        line = low + (high - low) * (tokens - a) / (b - a)
        # a longer length may need less, if it is split into other blocks; that is not a trend
        minimum = high + MIN_TREND * high * (tokens - b) / b
        return max(line, minimum) if tokens > b else max(0.0, line)


def dry_run_curve(
    trial: Trial, budget: int, dry_run: DryRun, ceiling: int, grid: Sequence[float] = GRID
) -> Curve | str:
    """Return a trial's curve up to the length whose floor fills the budget, or why not."""
    floor = floor_tokens(trial.workload, budget, trial.world_size)
    min_tokens = 2 * trial.world_size
    lengths = sorted({max(min_tokens, min(ceiling, round(share * floor))) for share in grid})
    lengths = lengths if len(lengths) > 1 else [lengths[0], 2 * lengths[0]]
    estimates = dry_run([_at(trial, n) for n in lengths])
    found = list(zip(lengths, estimates, strict=True))
    found += _find_limit(trial, found, dry_run, min_tokens)
    points = [(n, e) for n, e in found if not e.unsupported]
    if len(points) < 2:
        return next((e.unsupported for e in estimates if e.unsupported), "too short")
    too_long = [(n, e) for n, e in found if e.too_long]
    refused = min(too_long, key=_length, default=None)
    for _ in range(MAX_REFINEMENTS):
        curve = Curve(tuple(sorted(points, key=_length)), refused)
        edge = max(min_tokens, find_edge(curve, budget, ceiling))
        near_edge = any(abs(edge - n) <= EDGE_TOLERANCE * n for n, _ in points)
        if near_edge or curve.gap(edge) <= MAX_EDGE_GAP:
            break
        (estimate,) = dry_run([_at(trial, edge)])
        if estimate.unsupported:
            break
        points.append((edge, estimate))
    return Curve(tuple(sorted(points, key=_length)), refused)


def _length(point: Point) -> int:
    return point[0]


def _find_limit(
    trial: Trial, found: Sequence[Point], dry_run: DryRun, min_tokens: int
) -> list[Point]:
    """Return dry runs up to the longest length that the trial's kernel can take, if it has a limit.

    Without them a plan would end at the last length of the grid that the kernel takes.
    """
    too_long = [n for n, estimate in found if estimate.too_long]
    longest = max((n for n, estimate in found if not estimate.unsupported), default=min_tokens)
    more: list[Point] = []
    if not too_long or min(too_long) <= longest:
        return more
    limit = min(too_long)
    while limit - longest > max(1, LIMIT_TOLERANCE * limit):
        parts = LIMIT_DRY_RUNS + 1
        cuts = {longest + (limit - longest) * i // parts for i in range(1, parts)}
        lengths = sorted(cuts - {longest})
        for n, estimate in zip(lengths, dry_run([_at(trial, n) for n in lengths]), strict=True):
            more.append((n, estimate))
            if estimate.unsupported:
                limit = n
                break
            longest = n
    return more


def _at(trial: Trial, tokens: int) -> Trial:
    return trial.at(tokens).replace(repeats=0, round=0)


def add_outside(dry_run: DryRun, hardware: Hardware) -> DryRun:
    """Return a dry run whose estimates also have the memory of the device outside tensors."""
    return lambda trials: [
        one.model_copy(update={"outside": hardware.outside_tensors(trial.world_size, one.peers)})
        for trial, one in zip(trials, dry_run(trials), strict=True)
    ]


def add_rest(dry_run: DryRun, rest: Callable[[Trial], int]) -> DryRun:
    """Return a dry run whose estimates also have the bytes of a model beside the layer."""
    return lambda trials: [
        one.model_copy(update={"rest_bytes": rest(trial)})
        for trial, one in zip(trials, dry_run(trials), strict=True)
    ]


def find_edge(curve: Curve, budget: int, ceiling: int) -> int:
    """Return the longest length whose peak on a curve is within the budget; 0 without any."""
    left = budget - curve.outside_bytes
    return bisect_right(range(1, ceiling + 1), left, key=lambda n: math.ceil(curve.peak(n)))
