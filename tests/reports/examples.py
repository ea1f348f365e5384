"""Small records with rows for every section of every report; no two values are equal.

rich()       two machines, ranks 1, 2 and 4, every status, rounds, single samples, zeros, searches
sparser()    sparse attention, segments and the curve, with dense
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from longseq_bench.core.model import Outcome, Record, Status, Trial
from tests import make
from tests.reports.oracle import dense_flops

MIB = 2**20
DAY = "2026-11-{:02d}T09:00:00Z"
BETA = {"gpus": ("X1", "X1"), "driver": "570", "torch": "2.12.0", "load": (0.5, 0.4, 0.3)}


def spread(middle: float, n: int, share: float = 0.02) -> list[float]:
    """n samples around `middle`, all different."""
    return [middle * (1 + share * ((i * 11) % n - n / 3) / n) for i in range(n)]


def timing(trial: Trial, time: float, n: int = 9, peak: float = 0, **more: Any) -> Outcome:
    """An ok outcome of one rank, with FLOPs of dense attention."""
    floor = 1024 * trial.workload.seq_len
    samples = {"time": spread(time, n), "peak": peak or floor * 2.3, "max_error": time * 1e-5}
    flops = dense_flops(trial.workload)
    return make.outcome(**{**samples, "flops": flops, **more})


def timings(trial: Trial, time: float, n: int = 9, share: float = 0.8, **more: Any) -> Outcome:
    """An ok outcome of several ranks, each a little slower and larger than the one before."""
    tokens, ranks = trial.workload.seq_len, trial.world_size
    each: list[dict[str, Any]] = []
    for rank in range(ranks):
        slower = time * (1 + 0.01 * rank)
        each.append(
            {
                "time": spread(slower, n), "compute_time": spread(slower * share, n),
                "communication_time": spread(slower * 0.4, n),
                "peak": tokens * 900 + 4096 * rank * rank, "own_tokens": tokens / ranks + rank,
                "bytes_sent": tokens * 64, "bytes_formula": tokens * 64,
                "max_error": 3e-6, "flops": dense_flops(trial.workload), **more,
            }
        )  # fmt: skip
    return make.on_ranks(*each)


def widen(outcome: Outcome, share: float) -> Outcome:
    """The same outcome; the times of each rank are spread by another share of their median."""
    known = (
        replace(m, samples=tuple(spread(median(m.samples), len(m.samples), share)))
        if m.name == "time"
        else m
        for m in outcome.measurements
    )
    return outcome.model_copy(update={"measurements": tuple(known)})


def single(name: str, tokens: int, time: float, n: int = 9, **fields: Any) -> Record:
    given = {key: fields.pop(key) for key in ("peak", "density_achieved", "uncovered", "plan_time",
             "dense_time", "density_asked", "flops", "zero_rows") if key in fields}  # fmt: skip
    where, facts = fields.pop("where", None), fields.pop("facts", {})
    trial = make.trial(name, tokens, fields.pop("options", None), **fields)
    outcome = timing(trial, time, n, **given).model_copy(update={"facts": facts})
    return make.record(trial, outcome, where, started_at=DAY.format(1 + tokens % 20))


def failed(
    status: Status, name: str, tokens: int, reason: str | None = None, **more: Any
) -> Record:
    fields = {k: more.pop(k) for k in ("world_size", "options", "causal", "mode") if k in more}
    outcome = make.outcome(status, reason, **more)
    return make.record(make.trial(name, tokens, **fields), outcome)


def swept() -> Iterator[Record]:
    """Exact attention at five lengths on one rank: rounds, single samples, a zero, failures."""
    for i, tokens in enumerate((1000, 2000, 4000, 5120, 8000)):
        scale = (tokens / 1000) ** 2
        yield single("sdpa", tokens, 0.00213 * scale, 9 + i, peak=1.1 * MIB * tokens / 1000)
        ring = single("ring", tokens, 0.0031 * scale**0.9, 7, options={"chunk": 64}, threads=None)
        for round_ in range(2):
            again = {"round": round_, "seed": round_}
            yield ring.model_copy(update={"trial": ring.trial.replace(**again), "processes": 2})
        yield single("ring", tokens, 0.00316 * scale**0.9, 1, options={"chunk": 128})
    yield single("dense", 1000, 0.004, 6, peak=0)
    yield single("dense", 2000, 0.0171, 5, peak=70.3 * MIB)
    yield failed("oom", "dense", 4000, "512 MiB | asked", phase="forward", peak=90 * MIB)
    yield failed("timeout", "ring", 16000, options={"chunk": 64}, phase="time", peak=33 * MIB)
    yield failed("wrong", "sdpa", 9000, "row 3 sums to 2", phase="check", max_error=0.5)
    yield failed("crashed", "sdpa", 9001, "signal 11", phase="forward")
    yield failed("limit", "sdpa", 9002, phase="plan")
    yield failed("unsupported", "sdpa", 9003, "no such dtype", phase="start")
    yield failed("error", "sdpa", 9004, phase="inputs")
    thrashing = single("sdpa", 3000, 0.02, 4, mode="train", heads=4, kv_heads=2)
    more = (*thrashing.outcome.measurements, make.measurement("alloc_retries", 3.0))
    yield thrashing.model_copy(
        update={"outcome": thrashing.outcome.model_copy(update={"measurements": more})}
    )
    yield make.record(make.trial("ring", 3000, {"chunk": 64}, mode="train", heads=4, kv_heads=2),
                      make.outcome(time=[0.0, 0.0], peak=0.0))  # fmt: skip


def ranked() -> Iterator[Record]:
    """The same on one, two and four ranks; one with miscounted bytes; a hang."""
    for tokens in (1024, 2048, 4096):
        one = 0.01 * (tokens / 1024) ** 2
        ways = (("ring", 0.9, 0.8), ("ulysses", 0.55, 0.35), ("ulysses2", 0.3, 0.5))
        for name, gain, share in ways:
            alone = make.trial(name, tokens, {"chunk": 64} if name == "ring" else {}, causal=True)
            yield make.record(alone, timing(alone, one, 8))
            for ranks in (2, 4):
                trial = alone.replace(world_size=ranks)
                yield make.record(trial, timings(trial, one / gain / ranks, 8, share))
    off = make.trial("ring", 8192, {"chunk": 64}, causal=True, world_size=2)
    yield make.record(off, timings(off, 0.5, 1, bytes_sent=1001, bytes_formula=1000.0))
    stacks = {"0": ["at a", "at b"], "1": ["at a", "at b"], "2": "at c\nat d", "3": ["x"] * 20}
    hang = {"phase": "communication", "facts": {"stacks": stacks, "backend": "gloo"}}
    yield failed("hang", "ulysses", 8192, "rank 2 is late", causal=True, world_size=4, **hang)


BUDGET = 64 * MIB


def search(
    name: str, best: int, status: Status = "oom", beyond: int = 64, **fields: Any
) -> list[Record]:
    """A search with this maximum, 0 for none, and a failure above it."""
    of = make.trial(name, 1, **{"memory_budget": BUDGET, "repeats": 0, **fields})
    passed = [make.step(best, of=of)] if best else []
    return [*passed, make.step(best + beyond, status, of=of, purpose="edge")]


def searched() -> Iterator[Record]:
    """Searches: brackets, ties, a ceiling, no pass, fit only, in place, sparse."""

    def steps(
        name: str, best: int, failed: int, status: Status = "oom", ranks: int = 1, again: int = 1,
        density: float | None = None, options: dict[str, Any] | None = None, **fields: Any,
    ) -> Iterator[Record]:  # fmt: skip
        fields = {"memory_budget": BUDGET, "repeats": 0, "world_size": ranks, **fields}
        of = make.trial(name, 1, options, **fields)
        yield make.step(best // 2, of=of, predicted_tokens=best + 77, processes=ranks)
        if failed:
            yield make.step(failed, status, of=of, purpose="edge", processes=2 * ranks)
        for i in range(1 + again):
            found = {"peak": best * 8000.0 + i, "pass_time": 0.2, "own_tokens": -(-best // ranks)}
            if density is not None:
                found["density_achieved"] = density
            each = [found | {"peak": found["peak"] + 512 * r} for r in range(ranks)]
            purpose = "confirm" if i else "edge"
            yield make.record(of.at(best), make.on_ranks(*each), purpose=purpose, processes=ranks)

    yield from steps("ring", 7881, 7955, options={"chunk": 64})
    yield from steps("ring", 14995, 15144, ranks=2, options={"chunk": 64})
    yield from steps("ring", 29795, 30092, "timeout", ranks=4, again=2, options={"chunk": 64})
    yield from steps("sdpa", 7000, 7990, again=0)
    yield from steps("ulysses", 12744, 12871, ranks=2)
    yield from steps("ring", 8192, 8300, fit_only=True, options={"chunk": 64})
    yield from steps("sdpa", 15000, 16001, keep="nothing")
    yield from steps("sdpa", 7100, 7991, keep="inputs", mode="train")
    yield from steps("dense", 2000, 2100, mode="train")
    yield from steps("ring", 50000, 0, memory_budget=None, time_budget=30.0, options={"chunk": 64})
    for sparsity, best in ((0.9, 31000), (0.99, 45000)):
        yield from steps("block-sparse", best, best + 300, "timeout", density=1 - sparsity,
                         options={"sparsity": sparsity})  # fmt: skip
    yield from steps("dilated", 400000, 410000, density=0.25,
                     options={"segments": (4096, 8192), "dilation": (1, 2)})  # fmt: skip
    yield make.step(512, "crashed", of=make.trial("slow", memory_budget=BUDGET, repeats=0))


def _blocks(tokens: int, dense: float, sparsity: float, gain: float, n: int) -> Record:
    kept = 1 - sparsity
    source = "measured" if tokens < 16384 else "computed from 1,024 of 16,384 rows"
    return single(
        "block-sparse", tokens, dense / gain, n, density_achieved=kept * 1.1, density_asked=kept,
        flops=kept * 1.05 * 4 * tokens**2 * 512, options={"sparsity": sparsity},
        facts={"dense": source, "pattern": "window"}, peak=tokens * 2500 / gain,
        zero_rows=0.0, uncovered=0.0, dense_time=spread(dense, n + 1), plan_time=0.003,
    )  # fmt: skip


def _segments(name: str, tokens: int, time: float, rate: int, seen: float) -> Record:
    bare = 0.0 if rate == 1 else 0.5
    return single(
        name, tokens, time, 3 if rate == 3 else 8, density_achieved=seen,
        flops=seen * 4 * tokens**2 * 512, options={"segments": (4096,), "dilation": (rate,)},
        uncovered=bare, zero_rows=bare,
    )  # fmt: skip


def sparser() -> list[Record]:
    """Dense and sparse attention, segments along both, at three lengths and on two ranks."""
    found = []
    for tokens in (4096, 8192, 16384):
        one = 0.02 * (tokens / 4096) ** 2
        found.append(single("dense", tokens, one * 1.3, peak=tokens * 9000.0))
        for sparsity, gain, n in ((0.5, 1.7, 9), (0.9, 6.1, 9), (0.99, 9.3, 1), (0.995, 9.31, 6)):
            found.append(_blocks(tokens, one, sparsity, gain, n))
        for name, slower in (("dilated", 1.0), ("hilbert", 1.07)):
            for rate, seen, gain in ((1, 0.5, 1.9), (2, 0.125, 5.5), (3, 0.1, 5.9)):
                found.append(_segments(name, tokens, one * slower / gain, rate, seen))
    spread_out = make.trial("dilated", 8192, {"segments": (4096,), "dilation": (2,)}, world_size=2)
    some = {"density_achieved": 0.125, "flops": 0.125 * 4 * 8192**2 * 512}
    found.append(make.record(spread_out, timings(spread_out, 0.009, 8, **some)))
    trial = make.trial("block-sparse", 2**15, {"sparsity": 0.5})
    return [*found, make.record(trial, make.outcome("timeout", "over 20 s", "forward"))]


def on_two_machines(records: list[Record]) -> list[Record]:
    """The same, some on a second machine, and one with a fact."""
    beta = make.environment("beta", **BETA)
    copies = [r.model_copy(update={"environment": beta}) for r in records[::5]]
    return [*records, *copies]


def rich() -> list[Record]:
    """Records for all sections except those of `sparser`."""
    return [*swept(), *ranked(), *searched()]
