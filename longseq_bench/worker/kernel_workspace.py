"""Memory that fused kernels allocate outside tensors, from data/workspaces.yaml.

Letters: B batch, Hq query heads, Hk KV heads, N query tokens, M key tokens, D head_dim, E bytes per
element, P multiprocessors.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any

import yaml
from torch import Tensor

_FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
USUAL_MULTIPROCESSORS = 132
"""Of an H100 or H200. FlashAttention splits the keys of a call with too few blocks of queries."""

Row = Mapping[str, Any]


class KernelWorkspace:
    """Bytes of workspace that an operator of torch needs while it runs.

    threads: of a CPU.  multiprocessors: of a GPU; None: as many as usual.
    unknown: fused kernels that were called and are not in the table.
    """

    def __init__(
        self, threads: int, table: dict[str, Any] | None = None, multiprocessors: int | None = None
    ) -> None:
        self._threads, self._table = threads, table
        self._multiprocessors = multiprocessors or USUAL_MULTIPROCESSORS
        self.unknown: set[str] = set()

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the workspace of an operator with these arguments, in bytes."""
        schema = getattr(op, "_schema", None)  # higher-order operators have none
        name = schema.name.removeprefix("aten::") if schema else ""
        if not name.startswith(_FUSED):
            return 0
        table = _load_table() if self._table is None else self._table
        arguments = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
        entry = table.get(name, {})
        if "buffers" in entry:
            return self._sum_buffers(entry["buffers"], arguments)
        dtype = str(arguments["query"].dtype).removeprefix("torch.")
        if dtype not in entry:
            self.unknown.add(f"{name} {dtype}")
            return 0
        return self._fitted(entry[dtype], arguments)

    def _fitted(self, row: Row, arguments: Mapping[str, Any]) -> int:
        """Return the workspace of a CPU kernel by the fitted coefficients of its row."""
        q, k, grad_out = arguments["query"], arguments["key"], arguments.get("grad_out")
        # torch's CPU kernel copies a gradient (B, Hq, N, D) unless its layout is (B, N, Hq, D)
        copied = 0 if grad_out is None else _copied_bytes(grad_out)
        (b, h, n, d), m = q.shape, k.shape[2]
        # torch's CPU kernel works on 256 rows at a time from 768 rows on, on fewer before
        thread = row["thread"] if n >= 768 else row["thread_short"]
        return int(
            self._threads * (thread + row["thread_dim"] * d)
            + b * h * d * (row["query"] * n + row["key"] * m)
            + row["kv"] * k.numel()
            + b * h * row["row"] * n
            + copied
        )

    def _sum_buffers(self, buffers: Mapping[str, Row], arguments: Mapping[str, Any]) -> int:
        """Return the bytes of a CUDA kernel's buffers; all of them exist at the same time."""
        q, k = arguments["query"], arguments["key"]
        b, h, n, d = q.shape
        wider = max(d, arguments["value"].shape[3])
        sizes: dict[str, int] = {
            "B": b,
            "Hq": h,
            "Hk": k.shape[1],
            "N": n,
            "M": k.shape[2],
            "D": wider,
        }
        sizes |= {"P": self._multiprocessors, "E": q.itemsize}
        conditions = {
            "grouped": h != k.shape[1],
            "half": q.itemsize == 2,
            "narrow": d <= 128,
            "wide": d > 128,
            "few_rows": b * h * -(-n // 64) < 0.8 * 2 * self._multiprocessors,
        }

        def size(factor: Any) -> int:
            """Return a factor: a number, a letter, or {letter: multiple} rounded up."""
            if isinstance(factor, dict):
                ((letter, multiple),) = factor.items()
                return -(-sizes[letter] // int(multiple)) * int(multiple)
            return sizes[factor] if isinstance(factor, str) else int(factor)

        total = 0
        for buffer in buffers.values():
            if not all(conditions[name] for name in buffer.get("when", ())):
                continue
            if "copy_of" in buffer:
                total += _copied_bytes(arguments[buffer["copy_of"]])
            else:
                total += prod(map(size, buffer["bytes"]))
        return total


def _copied_bytes(tensor: Tensor) -> int:
    """Return the bytes of the copy of a tensor (B, H, N, D) that is not laid out (B, N, H, D)."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes


@cache
def _load_table() -> dict[str, Any]:
    text = files("longseq_bench").joinpath("data/workspaces.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text) or {}
    return table
