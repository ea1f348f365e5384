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


@pytest.mark.parametrize("mode", ["MERGE", "ADD"])
def test_rows_are_loaded_before_they_are_replaced(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    import triton
    from triton.backends.compiler import GPUTarget

    from longseq_bench.kernels import triton_merge

    function = triton_merge._move
    constants = {"WIDE": 8, "M": triton_merge.ROWS, "TAKE": False, "PUT": True}
    constants |= {name: name == mode for name in ("ADD", "MERGE")}
    tensors = ("*fp32", "*bf16")
    kinds: dict[str, Any] = {"targets": tensors, "sources": tensors, "index": "*i64"}
    kinds |= dict.fromkeys(("target_strides", "source_strides", "sizes"), ("i64",) * 6)
    kinds |= {"index_strides": ("i64",) * 3} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    fixed = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(function, signature, fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found = re.findall(r"tt\.load|tt\.store|barrier", made.asm["ttir"])
    # the index first
    assert found == ["tt.load", *["tt.load", "tt.load", "barrier", "tt.store"] * 2]
