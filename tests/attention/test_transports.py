"""Transports that other libraries bring: refused with the reason, before anything runs."""

import importlib.util

import pytest

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group


@pytest.mark.parametrize(
    ("transport", "library"), [("deepspeed", "DeepSpeed"), ("fairscale", "FairScale")]
)
def test_a_missing_library_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, transport: str, library: str
) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name == transport else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    make, w = IMPLEMENTATIONS.get("ring"), Workload(seq_len=64)
    message = rf"{library} is not installed; pip install 'longseq-bench\[transports\]'"
    with pytest.raises(UnsupportedError, match=message):
        make(w, Group(0, 2), transport=transport)
    # nothing travels on one rank
    make(w, Group.alone(), transport=transport)


def test_fairscale_refuses_half_precision() -> None:
    w = Workload(seq_len=64, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=r"float32 parameters .* not bfloat16"):
        IMPLEMENTATIONS.get("ring")(w, Group(0, 2), transport="fairscale")
