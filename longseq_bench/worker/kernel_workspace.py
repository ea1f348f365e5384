"""Memory that fused kernels allocate outside tensors, from data/workspaces.yaml."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

_FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


class KernelWorkspace:
    """Bytes of workspace that an operator of torch needs while it runs.

    unknown: fused kernels that were called and are not in the table.
    """

    def __init__(self, threads: int, table: dict[str, Any] | None = None) -> None:
        self._threads, self._given_table = threads, table
        self.unknown: set[str] = set()

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the workspace of an operator with these arguments, in bytes."""
        schema = getattr(op, "_schema", None)  # higher-order operators have none
        name = schema.name.removeprefix("aten::") if schema else ""
        if not name.startswith(_FUSED):
            return 0
        table = _load_table() if self._given_table is None else self._given_table
        arguments = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
        q, k = arguments["query"], arguments["key"]
        grad_out = arguments.get("grad_out")
        # torch's CPU kernel copies a gradient (B, Hq, N, D) unless its layout is (B, N, Hq, D)
        copied = 0
        if grad_out is not None and not grad_out.transpose(1, 2).is_contiguous():
            copied = grad_out.nbytes
        dtype = str(q.dtype).removeprefix("torch.")
        row = table.get(name, {}).get(dtype)
        if row is None:
            self.unknown.add(f"{name} {dtype}")
            return 0
        b, h, n, d = q.shape  # batch, heads, query tokens, head_dim
        m = k.shape[2]
        # torch's CPU kernel works on 256 rows at a time from 768 rows on, on fewer before
        thread = row["thread"] if n >= 768 else row["thread_short"]
        return int(
            self._threads * (thread + row["thread_dim"] * d)
            + b * h * d * (row["query"] * n + row["key"] * m)
            + row["kv"] * k.numel()
            + b * h * row["row"] * n
            + copied
        )


@cache
def _load_table() -> dict[str, Any]:
    text = files("longseq_bench").joinpath("data/workspaces.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text) or {}
    return table
