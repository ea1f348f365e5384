"""Records made by hand: small, deterministic, and any field can be given.

`trial(...)`, `environment(...)`, `outcome(...)` and `record(...)` take the fields that a test is
about and fill in the rest; `on_ranks(...)` is an outcome of several. Times are seconds, sizes
bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longseq_bench.core.model import (
    Environment,
    Measurement,
    OptionValue,
    Outcome,
    Phase,
    Purpose,
    Record,
    Status,
    Trial,
    Workload,
)
from longseq_bench.store import RECORDS, write_line

GIB = 2**30

_NAMES = {
    "s": "time cpu_time compute_time communication_time pass_time plan_time dense_time",
    "B": "peak peak_bound reserved outside_allocator floor bytes_sent bytes_formula",
    "FLOP": "flops dense_flops",
}
UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}

_WORKLOAD = set(Workload.model_fields)


def trial(
    implementation: str = "sdpa",
    seq_len: int = 4096,
    options: Mapping[str, OptionValue] | None = None,
    **fields: Any,
) -> Trial:
    """A Trial; keywords go to the Workload or the Trial, wherever they belong."""
    workload = {k: fields.pop(k) for k in _WORKLOAD & fields.keys()}
    return Trial(
        implementation=implementation,
        options=dict(options or {}),
        workload=Workload(seq_len=seq_len, **workload),
        **fields,
    )


def environment(host: str = "alpha", **fields: Any) -> Environment:
    """An Environment of a two-core machine without a GPU."""
    known: dict[str, Any] = {
        "os": "Linux 6.1", "cpu": "Test CPU", "cores": 2, "memory_bytes": 8 * GIB,
        "python": "3.11.9", "torch": "2.13.0", "longseq": "0.1.0", "commit": "abc1234",
    }  # fmt: skip
    return Environment(host=host, **{**known, **fields})


def measurement(name: str, *samples: float, rank: int = 0) -> Measurement:
    """A Measurement with the unit that belongs to its name (1 where it is a plain number)."""
    return Measurement(name=name, unit=UNITS.get(name, "1"), samples=samples, rank=rank)


def outcome(
    status: Status = "ok",
    reason: str | None = None,
    phase: Phase | None = None,
    facts: Mapping[str, Any] | None = None,
    **samples: float | Sequence[float],
) -> Outcome:
    """An Outcome; keywords are measurements of rank 0: `time=[0.1, 0.2], peak=4096`."""
    return Outcome(
        status=status,
        reason=reason,
        phase=phase,
        facts=dict(facts or {}),
        measurements=tuple(
            measurement(name, *([value] if isinstance(value, (int, float)) else value))
            for name, value in samples.items()
        ),
    )


def on_ranks(*ranks: Mapping[str, float | Sequence[float]], **fields: Any) -> Outcome:
    """An Outcome of as many ranks as there are mappings, each a rank's measurements."""
    each = [outcome(**fields, **samples) for samples in ranks]
    known = [replace(m, rank=rank) for rank, one in enumerate(each) for m in one.measurements]
    return outcome(**fields).model_copy(update={"measurements": tuple(known)})


def record(
    of: Trial | None = None,
    came_to: Outcome | None = None,
    where: Environment | None = None,
    purpose: Purpose = "measure",
    **fields: Any,
) -> Record:
    """A Record of one trial: by default ok, ten samples round 0.1 s, a peak of 1 MiB."""
    known: dict[str, Any] = {"started_at": "2026-11-21T09:00:00Z", "wall_s": 1.5}
    known |= {"command": "longseq sweep quickstart.yaml", "purpose": purpose, **fields}
    parts = {"trial": of or trial(), "outcome": came_to or measured()}
    return Record.model_validate({**parts, "environment": where or environment(), **known})


def measured(
    time: float = 0.1,
    peak: float = 2**20,
    samples: int = 10,
    ranks: int = 1,
    **more: float | Sequence[float],
) -> Outcome:
    """An ok Outcome: `samples` times spread evenly within 1 % round `time`, odd or even count.

    ranks: as many, each the same.
    """
    step = 0.02 * time / max(samples - 1, 1)
    times = [time * 0.99 + step * i for i in range(samples)] if samples > 1 else [time]
    extra: dict[str, Any] = {"cpu_time": [t * 2 for t in times], **more}
    return on_ranks(*[{"time": times, "peak": peak, "max_error": 1e-6, **extra}] * ranks)


def step(
    seq_len: int,
    status: Status = "ok",
    purpose: Purpose = "probe",
    reason: str | None = None,
    phase: Phase | None = "forward",
    of: Trial | None = None,
    peak: float | None = None,
    **fields: Any,
) -> Record:
    """A Record of one step of a search: repeats 0, under a budget of 64 MiB."""
    base = of or trial(memory_budget=64 * 2**20, repeats=0)
    if status == "ok":
        size = seq_len * 1024.0 if peak is None else peak
        came_to = outcome(status, reason, pass_time=0.2, peak=size)
    else:
        came_to = outcome(status, reason or f"{status} at {seq_len}", phase)
    return record(base.at(seq_len), came_to, purpose=purpose, **fields)


def write_records(folder: str | Path, records: Iterable[Record]) -> Path:
    """Write records into a results folder, and return the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / RECORDS).write_bytes(b"".join(map(write_line, records)))
    return Path(folder)
