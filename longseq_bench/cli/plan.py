"""`longseq plan`: predict lengths and times, also for hardware of other machines."""

from __future__ import annotations

from typing import Any

from longseq_bench.api.arguments import PLAN
from longseq_bench.cli import options
from longseq_bench.core.settings import SHAPE


@options.declare(PLAN | SHAPE)
def plan(
    impl: options.Implementations,
    option: options.ImplementationOptions = None,
    *,
    as_json: options.AsJson = False,
    **given: Any,
) -> int:
    """Predict the longest sequence, its memory, time and communication. No trial is run.

    Memory comes from a dry run of the implementation without data, for one rank of the world. Time
    comes from records of this machine if there are any, else from a profile of the hardware.
    """
    from longseq_bench.api import planning
    from longseq_bench.cli import session
    from longseq_bench.core.options import parse_assignments

    assignments, reporter = parse_assignments(option or []), session.make_reporter()
    found = planning.plan(impl, options=assignments, progress=reporter, **given)
    session.print_answer(as_json, found.as_json, found.table, "--json has it")
    found.check_target(may_grow=given.get("world_size") is None)
    return 0
