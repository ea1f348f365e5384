"""Triton kernels that replace what they have loaded: no warp stores before all have loaded.

Several warps may load what one of them stores. Triton's interpreter has one thread, so it can't
show a warp that loads what another has stored already. The compiled kernels show the barrier.
"""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.triton_static import Variant, arguments, kernel_of

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed"
)

ALIGNED = [["tt.divisibility", 16]]


def compile_ptx(
    function: Any, signature: Mapping[str, Any], fixed: Any, known: Any, options: Any
) -> str:
    import triton
    from triton.backends.compiler import GPUTarget

    source = triton.compiler.ASTSource(function, signature, fixed, known)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(made.asm["ptx"])


def assert_loads_before_stores(ptx: str) -> None:
    """Assert a barrier between the last load from global memory and the first store to it."""
    found = re.findall(r"ld\.global|st\.global|bar\.sync", ptx)
    first = found.index("st.global")
    assert "ld.global" in found[:first]
    assert "ld.global" not in found[first:]
    last_load = max(i for i, name in enumerate(found[:first]) if name == "ld.global")
    assert "bar.sync" in found[last_load:first]


@pytest.mark.parametrize("dim", [8, 64, 128])
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
    assert_loads_before_stores(compile_ptx(function, signature, fixed, known, {"num_warps": 4}))


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("kernel", ["spans forward", "spans backward"])
def test_spans_that_continue_earlier_results(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dim: int
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    variant = Variant(kernel, dim, causal=True, split=True)
    function, tile = kernel_of(variant, 90)
    ptx = compile_ptx(function, *arguments(function, variant, tile), tile.options)
    assert_loads_before_stores(ptx)
