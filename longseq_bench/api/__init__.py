"""The Python API: what `longseq_bench` exports, and what the command line calls.

Names are imported at their first use, so that importing the package stays quick.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq_bench.api.grid import sweep as sweep
    from longseq_bench.api.length_search import maxlen as maxlen
    from longseq_bench.api.loading import load as load
    from longseq_bench.api.planning import Plan as Plan
    from longseq_bench.api.planning import plan as plan
    from longseq_bench.api.results import Results as Results

PLACES = {
    "load": "loading",
    "maxlen": "length_search",
    "plan": "planning",
    "Plan": "planning",
    "Results": "results",
    "sweep": "grid",
}
"""The module of each exported name."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
