"""What fused kernels allocate inside themselves, where no tensor shows it: data/workspaces.yaml."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from torch import Tensor

_FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


class KernelWorkspace:
    """What a fused kernel holds inside itself while it runs, by a table; see workspaces.yaml.

    untabled: fused kernels that were met and are not in it.
    """

    def __init__(self, threads: int, table: dict[str, Any] | None = None) -> None:
        self._threads, self._table = threads, _table() if table is None else table
        self.untabled: set[str] = set()

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        schema = getattr(op, "_schema", None)  # higher-order operators have none
        name = schema.name.removeprefix("aten::") if schema else ""
        if not name.startswith(_FUSED):
            return 0
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
        q, k = given["query"], given["key"]
        copied = _copied(given["grad_out"]) if "grad_out" in given else 0
        row = self._table.get(name, {}).get(str(q.dtype).removeprefix("torch."))
        if row is None:
            self.untabled.add(f"{name} {str(q.dtype).removeprefix('torch.')}")
            return 0
        b, h, n, d = q.shape
        m = k.shape[2]
        # from 768 rows on torch's CPU kernel works on 256 at a time, before on fewer
        thread = row["thread"] if n >= 768 else row["thread_short"]
        return int(
            self._threads * (thread + row["thread_dim"] * d)
            + b * h * d * (row["query"] * n + row["key"] * m)
            + row["kv"] * k.numel()
            + b * h * row["row"] * n
            + copied
        )


def _copied(grad_out: Tensor) -> int:
    """torch's CPU kernel takes a gradient (B, Hq, N, D) that lies as (B, N, Hq, D); of another it
    makes a copy."""
    return 0 if grad_out.transpose(1, 2).is_contiguous() else grad_out.nbytes


@cache
def _table() -> dict[str, Any]:
    text = files("longseq_bench").joinpath("data/workspaces.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text) or {}
    return found
