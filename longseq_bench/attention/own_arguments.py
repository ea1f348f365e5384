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
    value: what is passed, from the workload, the rank and the number of ranks. The child puts the
    tensor, function or process group in the place of None.
    need: what needs the parameter, in words; "" if nothing does.
    is_needed: True if a function without it can't compute the workload on that number of ranks.
    """

    names: tuple[str, ...]
    value: Callable[[Workload, int, int], Any] = lambda workload, rank, ranks: None
    need: str = ""
    is_needed: Callable[[Workload, int], bool] = lambda workload, ranks: False

    def reason(self, function: str) -> str:
        """Return why a function without the parameter can't compute a workload."""
        return f"{function} takes no argument `{self.names[0]}`, needed for {self.need}"


def _needs_causal(workload: Workload) -> bool:
    """Return False for one new token, which sees the whole cache, and where a mask is passed."""
    return workload.causal and workload.mask is None and workload.new_tokens != 1


ARGUMENTS = (
    WorkloadArgument(
        ("causal", "is_causal"),
        lambda workload, rank, ranks: _needs_causal(workload),
        "a causal mask",
        lambda workload, ranks: _needs_causal(workload),
    ),
    WorkloadArgument(
        MASKS,
        need="a mask that is neither full nor causal",
        is_needed=lambda workload, ranks: workload.mask is not None,
    ),
    WorkloadArgument(
        ("new_tokens",),
        lambda workload, rank, ranks: workload.new_tokens,
        "decoding with more than one new token",
        lambda workload, ranks: workload.new_tokens > 1,
    ),
    WorkloadArgument(
        ("enable_gqa", "grouped_heads"),
        lambda workload, rank, ranks: workload.kv_heads != workload.heads,
        "fewer kv_heads than heads",
        lambda workload, ranks: workload.kv_heads != workload.heads,
    ),
    WorkloadArgument((GROUP,), need="several ranks", is_needed=lambda workload, ranks: ranks > 1),
    WorkloadArgument(("scale",), lambda workload, rank, ranks: workload.head_dim**-0.5),
    WorkloadArgument(("rank",), lambda workload, rank, ranks: rank),
    WorkloadArgument(("world_size",), lambda workload, rank, ranks: ranks),
)

NAMES = tuple(name for argument in ARGUMENTS for name in argument.names)
"""All parameters that longseq passes itself; any other one is an option."""


def missing_reasons(
    function: str, taken: Collection[str], workload: Workload | None = None, ranks: int = 1
) -> list[str]:
    """Return why a function that takes some of the parameters can't compute a workload.

    workload: None: any workload, on any number of ranks.
    """
    return [
        argument.reason(function)
        for argument in ARGUMENTS
        if not {*argument.names} & {*taken}
        and (argument.is_needed(workload, ranks) if workload else argument.need)
    ]


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
