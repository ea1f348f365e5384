"""Extrapolate the dry run of a large block layout from two smaller ones.

A layout with a fixed sparsity grows with the square of the length: 16M tokens in blocks of 128 with
a tenth of the blocks are 800 million blocks. To build it takes minutes and many GB. Two small
layouts are enough:

- On several ranks they have the same tokens in larger blocks: kernels over spans take any block.
  What a rank holds, fetches and sends is the same, except for the rounding to blocks.
- On one rank they have fewer tokens in the same blocks, because kernels over blocks depend on their
  size. Tensors are a line in the tokens.

Lists of the layout (tensors of integers) are a multiple of the tokens plus a multiple of the kept
blocks, whose number is known without the layout. FLOPs are in proportion to the visible pairs.
"""

from collections.abc import Callable, Sequence

import numpy as np

from longseq_bench.attention.base import Attention
from longseq_bench.core.model import DryRunEstimate, Trial

MAX_KEPT_BLOCKS = 2**20
"""Blocks of the larger of the two layouts: a fifth of a second."""

EXTRAPOLATED_FROM = 2**22
"""Layouts with more blocks than this are extrapolated."""


def smaller_trials(make: type[Attention], trial: Trial) -> tuple[Trial, Trial] | None:
    """Return the two trials from which to extrapolate; None if the trial has its own dry run.

    On a CPU the layout is part of the peak, so it is always built. With a mask it is always built
    too, because its rows are not alike.
    """
    is_built = trial.device == "cpu" or trial.workload.mask is not None
    if is_built or _kept(make, trial) <= EXTRAPOLATED_FROM:
        return None

    def coarser(factor: int) -> Trial:
        return trial.replace(options=trial.options | {"block": factor * _block(trial)})

    def shorter(factor: int) -> Trial:
        # whole blocks: a short last block is a list more
        blocks = max(1, trial.workload.seq_len // (factor * _block(trial)))
        return trial.at(blocks * _block(trial))

    shrink = coarser if trial.world_size > 1 else shorter
    factor = 1
    while _kept(make, shrink(factor)) > MAX_KEPT_BLOCKS:
        factor += 1 + factor // 8
    return shrink(factor), shrink(2 * factor)


def extrapolate(
    make: type[Attention], trial: Trial, smaller: Sequence[Trial],
    estimates: Sequence[DryRunEstimate],
) -> DryRunEstimate:  # fmt: skip
    """Return the estimate of a trial from those of `smaller_trials`."""
    if refused := next((one for one in estimates if one.unsupported), None):
        return refused
    at = _block if trial.world_size > 1 else _tokens
    (a, b), target = map(at, smaller), at(trial)

    def on_line(name: str) -> float:
        """Extrapolate by a line in the size of a block, or in the tokens."""
        at_a, at_b = (float(getattr(one, name)) for one in estimates)
        return at_a + (at_a - at_b) / (a - b) * (target - a)

    def from_terms(name: str, terms: Callable[[Trial], tuple[float, float]]) -> float:
        """Extrapolate a sum of two terms with unknown factors."""
        known = np.array([terms(one) for one in smaller])
        values = np.array([float(getattr(one, name)) for one in estimates])
        # scaled by the first; terms that depend on each other get the smallest factors
        factors = np.linalg.lstsq(known / known[0], values, rcond=None)[0]
        return float(factors @ (np.array(terms(trial)) / known[0]))

    def list_terms(one: Trial) -> tuple[float, float]:
        return _tokens(one), _kept(make, one)

    def pair_terms(one: Trial) -> tuple[float, float]:
        # a causal diagonal block has half of its pairs
        return float(_tokens(one) * _block(one)), float(_kept(make, one) * _block(one) ** 2)

    def peak(name: str, of_lists: str) -> tuple[int, int]:
        lists = from_terms(of_lists, list_terms)
        return round(on_line(name) - on_line(of_lists) + lists), round(lists)

    # lists grow most, so the moment with most lists may become the peak
    moments = peak("peak_bytes", "index_bytes"), peak("peak_at_most_index", "most_index_bytes")
    peak_bytes, index_bytes = max(moments)
    lines = ("host_bytes", "floor_bytes", "bytes_sent", "transfers", "inside_bytes")
    return estimates[0].model_copy(
        update={name: round(on_line(name)) for name in lines}
        | {
            "peak_bytes": peak_bytes,
            "index_bytes": index_bytes,
            "peak_at_most_index": moments[1][0],
            "most_index_bytes": moments[1][1],
            "flops": from_terms("flops", pair_terms),
            "smaller_layouts": tuple((_tokens(one), _block(one)) for one in smaller),
        }
    )


def _kept(make: type[Attention], trial: Trial) -> int:
    return make.kept_blocks(trial.workload, **trial.options)


def _tokens(trial: Trial) -> int:
    return trial.workload.seq_len


def _block(trial: Trial) -> int:
    block = trial.options.get("block")
    assert isinstance(block, int), "an implementation with kept_blocks has an option block"
    return block
