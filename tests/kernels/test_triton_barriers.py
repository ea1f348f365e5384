"""Triton kernels that replace what they have loaded: no warp stores before all have loaded.

Several warps may load what one of them stores. Triton's interpreter has one thread, so it can't
show a warp that loads what another has stored already. The compiled kernels show the barrier.
"""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed"
)

ALIGNED = [["tt.divisibility", 16]]


def compile_for_h100(
    function: Any, signature: Mapping[str, Any], fixed: Any, known: Any, options: Any
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    source = triton.compiler.ASTSource(function, signature, fixed, known)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def assert_loads_before_stores(made: Any) -> None:
    """Assert a barrier between the last load from global memory and the first store to it.

    In the kernel as it is written, and as it is compiled, where barriers of other kinds join it.
    """
    for text, load, store, barrier in (
        (made["ttir"], r"tt\.load", r"tt\.store", r"barrier"),
        (made["ptx"], r"ld\.global", r"st\.global", r"bar\.sync"),
    ):
        found = [
            next(name for name in (load, store, barrier) if re.fullmatch(name, one))
            for one in re.findall(f"{load}|{store}|{barrier}", text)
        ]
        first = found.index(store)
        assert load in found[:first]
        assert load not in found[first:]
        last_load = max(i for i, name in enumerate(found[:first]) if name == load)
        assert barrier in found[last_load:first]


@pytest.mark.parametrize("dim", [8, 128])
def test_a_merge_of_two_softmaxes(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from longseq_bench.kernels import triton_merge

    function = triton_merge._merge
    constants = {"DIM": dim, "WIDE": dim, "M": triton_merge.ROWS}
    kinds = {"out": "*fp32", "lse": "*fp32", "part": "*bf16", "part_lse": "*fp32"}
    signature: dict[str, Any] = {}
    fixed, known = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = kinds.get(name, "i32")
        if name in constants:
            signature[name], fixed[(i,)] = "constexpr", constants[name]
        elif name.endswith("strides"):
            signature[name] = ("i64",) * 3
            known |= {(i, at): ALIGNED for at in range(3)}
        elif name in kinds:
            known[(i,)] = ALIGNED
    made = compile_for_h100(function, signature, fixed, known, {"num_warps": 4})
    assert_loads_before_stores(made)
