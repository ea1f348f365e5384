"""Step ranks: every implementation over one rank per GPU, and how ranks fail."""

from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.faults import Fault, provoke
from benchmarks.gpu.items import Figures, Item, Session, Step, plain_table
from benchmarks.gpu.speed import SHAPES, TOY, Cell, Choices, available, toy

TOKENS_PER_RANK = 2**16
LATE = {"time_budget": 2.0}
FAULTS = {
    "kill -9 of a rank": Fault("rank-kills-itself", ("crashed",), LATE),
    "SIGSTOP of a rank": Fault("rank-stops", ("hang", "timeout"), LATE),
    "a rank waits for nobody": Fault("gpu-rank-waits", ("hang", "timeout"), LATE),
    "a rank is out of memory": Fault("gpu-rank-eats", ("oom",), LATE),
}


def list_items(session: Session) -> Sequence[Item]:
    """Return a sweep and an item per fault; with one GPU an item that says so."""
    catalogue = session.launcher.catalogue()
    count = 2 if session.dry_run else catalogue.devices["cuda"].count
    if count < 2:
        note: Figures = {"devices": count, "note": "several GPUs are needed"}
        return [Item("devices", lambda: note)]
    faults = list(FAULTS.items())[: 1 if session.dry_run else None]
    return [
        sweep_of(session, count).item(session),
        *(Item(text, partial(provoke, session, fault, count), tier=2) for text, fault in faults),
    ]


def sweep_of(session: Session, count: int) -> Cell:
    """Return the sweep of all implementations; those for one rank end `unsupported`."""
    if session.dry_run:
        workload = {**TOY, "batch": count}
        return toy("ranks", "sweep", [{"ring": {}}, {"ulysses": {}}], workload, world_size=[count])
    choices: Choices = [
        {name: {}} for name, entry in session.launcher.catalogue().implementations.items()
        if entry.source == "built-in"
    ]  # fmt: skip
    workload = {**SHAPES["8x64"], "dtype": "bfloat16", "causal": True, "batch": count}
    settings = {"memory_budget": "16GiB", "world_size": [count]}
    return Cell(
        "ranks", "sweep", str(count * TOKENS_PER_RANK), available(session, choices), workload,
        tier=2, seconds=120, settings=settings,
    )  # fmt: skip


STEP = Step("ranks", list_items, plain_table)
