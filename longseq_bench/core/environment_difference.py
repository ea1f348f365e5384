"""The parts in which two environments differ, so that their figures are not comparable."""

from longseq_bench.core.model import STABLE_FIELDS, Environment

MAX_NAMES = 3


def name_differences(here: Environment, other: Environment) -> str:
    """Name the first differing parts of two fingerprints: "host, cores, OMP_NUM_THREADS"."""
    fields = [name for name in STABLE_FIELDS if getattr(here, name) != getattr(other, name)]
    names = [name.removesuffix("_bytes").removesuffix("_w").replace("_", " ") for name in fields]
    either = sorted({*here.variables, *other.variables})
    names += [name for name in either if here.variables.get(name) != other.variables.get(name)]
    return ", ".join(names[:MAX_NAMES] + (["…"] if len(names) > MAX_NAMES else []))
