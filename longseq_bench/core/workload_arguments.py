"""Arguments that an own function is given if it names them, and what it can't do without them.

One table says which parameter serves which property of a workload. A function without the
parameter is `unsupported` for such workloads, before anything runs.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from longseq_bench.core.model import Workload

GROUP = "group"
"""The parameter for torch's process group of all ranks; None on one rank."""


MASKS = ATTN_MASK, MASK_MOD = "attn_mask", "mask_mod"
"""The parameters for a mask: booleans (queries, keys) as in torch's scaled_dot_product_attention,
or a function of batch, head, query and key as in FlexAttention; None for a full or causal one."""


@dataclass(frozen=True)
class WorkloadArgument:
    """A property of a workload or of its ranks, and the parameters that take it.

    names: any of these parameters serves; the first one is named in reasons.
    value: what is passed, from the workload, the rank and the number of ranks.
    is_needed: True if a function without the parameter can't compute the workload on that number
    of ranks.  need: what needs the parameter, in words; "" if nothing does.
    """

    names: tuple[str, ...]
    value: Callable[[Workload, int, int], Any]
    is_needed: Callable[[Workload, int], bool] = lambda workload, ranks: False
    need: str = ""


def _needs_causal(workload: Workload) -> bool:
    return workload.causal and workload.mask is None and workload.new_tokens != 1


ARGUMENTS = (
    WorkloadArgument(
        ("causal", "is_causal"),
        # one new token sees the whole cache; a function that gets another mask has it there, and
        # must not apply both
        value=lambda workload, rank, ranks: _needs_causal(workload),
        is_needed=lambda workload, ranks: _needs_causal(workload),
        need="a causal mask",
    ),
    WorkloadArgument(
        MASKS,
        # the child puts a tensor or a function in its place
        value=lambda workload, rank, ranks: None,
        is_needed=lambda workload, ranks: workload.mask is not None,
        need="a mask that is neither full nor causal",
    ),
    WorkloadArgument(
        ("new_tokens",),
        value=lambda workload, rank, ranks: workload.new_tokens,
        is_needed=lambda workload, ranks: workload.new_tokens > 1,
        need="decoding with more than one new token",
    ),
    WorkloadArgument(
        ("enable_gqa", "grouped_heads"),
        value=lambda workload, rank, ranks: workload.kv_heads != workload.heads,
        is_needed=lambda workload, ranks: workload.kv_heads != workload.heads,
        need="fewer kv_heads than heads",
    ),
    WorkloadArgument(
        (GROUP,),
        # the child puts the process group in its place, once it is connected
        value=lambda workload, rank, ranks: None,
        is_needed=lambda workload, ranks: ranks > 1,
        need="several ranks",
    ),
    WorkloadArgument(("scale",), value=lambda workload, rank, ranks: workload.head_dim**-0.5),
    WorkloadArgument(("rank",), value=lambda workload, rank, ranks: rank),
    WorkloadArgument(("world_size",), value=lambda workload, rank, ranks: ranks),
)

NAMES = tuple(name for argument in ARGUMENTS for name in argument.names)
"""All parameters that longseq passes itself; any other one is an option."""


def missing_reasons(
    function: str, taken: Collection[str], workload: Workload, ranks: int
) -> list[str]:
    """Return why a function that takes some of the parameters can't compute a workload."""
    return [
        _reason(function, argument)
        for argument in ARGUMENTS
        if argument.is_needed(workload, ranks) and not {*argument.names} & {*taken}
    ]


def all_missing_reasons(function: str, taken: Collection[str]) -> tuple[str, ...]:
    """Return what a function that takes some of the parameters can never compute."""
    return tuple(
        _reason(function, argument)
        for argument in ARGUMENTS
        if argument.need and not {*argument.names} & {*taken}
    )


def passed_values(
    taken: Collection[str], workload: Workload, rank: int, ranks: int
) -> dict[str, Any]:
    """Return the values of the parameters that a function takes, by name."""
    return {
        name: argument.value(workload, rank, ranks)
        for argument in ARGUMENTS
        for name in argument.names
        if name in taken
    }


def _reason(function: str, argument: WorkloadArgument) -> str:
    return f"{function} takes no argument `{argument.names[0]}`, needed for {argument.need}"
