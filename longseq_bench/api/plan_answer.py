"""The sentence that answers a plan: how many devices, which implementation, and why."""

from collections.abc import Sequence

from longseq_bench.core.hardware import Hardware
from longseq_bench.core.units import format_seconds, format_tokens
from longseq_bench.search.prediction import Prediction

TIE = 1.25
"""Predicted times within this factor are a tie: they may be wrong by as much."""

NOT_MODELLED = "Not modelled: weights, other layers, fragmentation of the allocator."


def answer_sentence(
    results: Sequence[Prediction | str], hardware: Hardware, target: int | None, whole_nodes: bool
) -> str:
    """Return the answer to "how many devices" for a target, else to "how many tokens".

    results: a prediction for each implementation, or the reason why there is none.
    whole_nodes: devices are counted in nodes.
    """
    best = find_best(results, target)
    if best is None:
        what = f"{format_tokens(target)} tokens" if target else "this shape"
        return f"No implementation fits {what}."
    tokens = format_tokens(best.trial.workload.seq_len)
    devices = _devices(best.trial.world_size, hardware, whole_nodes)
    head = f"{tokens} tokens: {devices}" if target else f"{devices}: {tokens} tokens"
    others = [one for one in results if isinstance(one, Prediction) and one.fits and one != best]
    reason = ""
    if others:
        reason = f", because {_reason(best, others, target)}"
    elif len(results) > 1:
        reason = ", because nothing else fits"
    return f"{head}. Use {best.trial.implementation}{reason}. {NOT_MODELLED}"


def find_best(results: Sequence[Prediction | str], target: int | None) -> Prediction | None:
    """Return the prediction with the fewest ranks for a target, else with most tokens.

    The shorter time decides between equal ones. None: nothing fits.
    """
    fitting = [one for one in results if isinstance(one, Prediction) and one.fits]
    return min(fitting, key=lambda one: (*_rank(one, target), one.times.total), default=None)


def _rank(one: Prediction, target: int | None) -> tuple[int]:
    """Return what decides before time; the lower is better."""
    return (one.trial.world_size if target else -one.trial.workload.seq_len,)


def _devices(ranks: int, hardware: Hardware, whole_nodes: bool) -> str:
    if whole_nodes and ranks % hardware.per_node == 0:
        nodes = ranks // hardware.per_node
        return f"{nodes} node{'s' if nodes > 1 else ''} of {hardware.per_node} {hardware.name}"
    return f"{ranks} {hardware.name}"


def _reason(best: Prediction, others: Sequence[Prediction], target: int | None) -> str:
    """Return why the best one is better than the others."""
    equal = [one for one in others if _rank(one, target) == _rank(best, target)]
    if not equal:
        next_best = min(others, key=lambda one: _rank(one, target))
        if target:
            return f"{next_best.trial.implementation} needs {next_best.trial.world_size} devices"
        tokens = format_tokens(next_best.trial.workload.seq_len)
        return f"the next longest, {next_best.trial.implementation}, ends at {tokens}"
    time, second = best.times.total, min(equal, key=lambda one: one.times.total)
    compared = f"{format_seconds(time)} a pass, {second.trial.implementation} "
    compared += format_seconds(second.times.total)
    if second.times.total <= TIE * time:
        return f"it is predicted to be the fastest, by less than the usual error ({compared})"
    return f"it is predicted to be the fastest ({compared})"
