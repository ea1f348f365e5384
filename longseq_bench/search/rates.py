"""FLOP/s of trials on a machine: from its records of the same trial, else from a profile."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from longseq_bench.analysis.runs import pass_seconds, per_iteration
from longseq_bench.core.cost import BACKWARD_MATMULS, FORWARD_MATMULS
from longseq_bench.core.hardware import Hardware, KernelRate
from longseq_bench.core.model import Record, Trial, Workload

RECORD_UNCERTAINTY = 1.3  # the factor by which a rate from records of this machine may be wrong
PROFILE_UNCERTAINTY = 6.0  # the factor by which a rate from a profile may be wrong


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a rank, and their source.

    uncertainty: the factor by which they may be wrong.  exposed: seconds per byte sent that
    communication added to a pass; None without a record.  figure: that of the kernel, if it is
    used.  best: that of the fastest kernel.  peak: FLOP/s of a GPU for which nothing was measured.
    """

    flops: float
    uncertainty: float
    source: str
    exposed: float | None = None
    figure: KernelRate | None = None
    best: KernelRate | None = None
    peak: float | None = None


class RateModel:
    """Rates of trials on one machine, from its records of the same trial where there are any."""

    def __init__(self, hardware: Hardware, records: Iterable[Record] = ()) -> None:
        self.hardware = hardware
        # for each kind of trial: (length, rate, exposed) of its records
        self._rates: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}
        self._bandwidths: list[float] = []
        for record in records:
            self._learn(record)

    def _learn(self, record: Record) -> None:
        outcome, trial = record.outcome, record.trial
        if outcome.status != "ok" or trial.device != self.hardware.device:
            return
        flops, sent = outcome.largest("flops"), outcome.largest("bytes_sent")
        if (seconds := pass_seconds(record)) and flops:
            # compute and communication grow differently: use the time without communication
            computing = per_iteration(record, "compute_time")
            compute_s = min(seconds, median(computing)) if computing and sent else seconds
            rate = flops / trial.world_size / compute_s
            exposed = (seconds - compute_s) / sent if sent else 0.0
            of_kind = self._rates.setdefault(_rate_key(trial), [])
            of_kind.append((trial.workload.seq_len, rate, exposed))
        if sent and (transfer_s := per_iteration(record, "communication_time")):
            self._bandwidths.append(sent / median(transfer_s))

    def rate(self, trial: Trial, kernel: str = "") -> Rate:
        """Return the rate of the records of the nearest length, else that of the profile.

        kernel: name of the kernel that computes most. Raises UserError for a dtype that the
        hardware does not have.
        """
        known = self._rates.get(_rate_key(trial))
        if known:
            tokens = trial.workload.seq_len
            nearest = min((n for n, _, _ in known), key=lambda n: abs(math.log(n / tokens)))
            rates, exposed = zip(*((r, e) for n, r, e in known if n == nearest), strict=True)
            source = f"{len(known)} record(s), nearest at {nearest:,} tokens"
            return Rate(median(rates), RECORD_UNCERTAINTY, source, median(exposed))
        w = trial.workload
        found = self._profile_rate(w, kernel)
        if w.train and trial.keep != "all":
            # the forward runs twice, but the FLOPs count it once
            matmuls = FORWARD_MATMULS + BACKWARD_MATMULS
            found = replace(found, flops=found.flops * matmuls / (matmuls + FORWARD_MATMULS))
        return found

    def _profile_rate(self, w: Workload, kernel: str) -> Rate:
        hardware, source = self.hardware, f"profile of {self.hardware.name}"
        usual, figures = hardware.rate(w.dtype, w.mode), {}
        if w.dtype != "float32" and not w.decode and w.v_head_dim == w.head_dim:
            figures = hardware.figures(w.train, w.head_dim, w.causal)
        if figure := figures.get(kernel):
            flops, source = figure.flops(w.train) or usual, f"{source}: {figure.words(w.train)}"
            best = max(figures.values(), key=lambda one: one.flops(w.train) or 0.0)
            return Rate(flops, PROFILE_UNCERTAINTY, source, figure=figure, best=best)
        on_gpu = hardware.device == "cuda"
        if kernel and on_gpu:
            what = f"{kernel}, {w.mode}, {w.dtype}, head_dim {w.head_dim}"
            what += f", v_head_dim {w.v_head_dim}" if w.v_head_dim != w.head_dim else ""
            source += f", which has no figure for {what}"
        peak = hardware.flops[w.dtype] if on_gpu else None
        return Rate(usual, PROFILE_UNCERTAINTY, source, peak=peak)

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes/s that a rank sends."""
        measured = median(self._bandwidths) if self._bandwidths else 0.0
        return measured or self.hardware.link(ranks).bandwidth


def _rate_key(trial: Trial) -> tuple[object, ...]:
    """Return what must be the same for a rate to be valid at another length."""
    labels = {"seq_len", "model", "weights"}
    shape = {n: value for n, value in vars(trial.workload).items() if n not in labels}
    options = tuple(sorted((k, str(v)) for k, v in trial.options.items()))
    how = trial.implementation, trial.source, trial.device, trial.world_size
    return (*how, options, trial.threads, trial.keep, trial.timing, tuple(shape.items()))
