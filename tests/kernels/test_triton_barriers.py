"""A Triton kernel that replaces what it has loaded: no warp stores before all have loaded.

Several warps may load what one of them stores. Triton's interpreter has one thread, so it can't
show a warp that loads what another has stored already. The compiled kernel shows the barrier.
"""

import importlib.util
import re
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed"
)


def test_a_merge_of_two_softmaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    import triton
    from triton.backends.compiler import GPUTarget

    from longseq_bench.kernels import triton_merge

    function = triton_merge._merge
    constants = {"DIM": 8, "WIDE": 8, "M": triton_merge.ROWS, "INDEXED": True}
    kinds: dict[str, Any] = {"out": "*fp32", "lse": "*fp32", "part": "*bf16", "part_lse": "*fp32"}
    kinds |= {"index": "*i64"} | dict.fromkeys(constants, "constexpr")
    kinds |= {name: ("i64",) * 3 for name in function.arg_names if name.endswith("strides")}
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    fixed = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(function, signature, fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found = re.findall(r"tt\.load|tt\.store|barrier", made.asm["ttir"])
    first_store = found.index("tt.store")
    assert "tt.load" in found[:first_store]
    assert "tt.load" not in found[first_store:]
    assert found[first_store - 1] == "barrier"
