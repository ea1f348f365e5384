"""Step decode: steps of decoding with 262,144 cached tokens, beside the bandwidth of a copy."""

from collections.abc import Sequence
from itertools import product

from benchmarks.gpu.items import Item, Session, Step
from benchmarks.gpu.speed import SHAPES, TOY, Cell, Choices, available, make_table, toy

IMPLEMENTATIONS: Choices = [
    {"sdpa": {"backend": "cudnn"}},
    {"ring": {}},
    {"fused": {"kernel": "flash-attn-4"}},
    {"flashinfer-decode": {}},
    {"block-sparse": {"pattern": "sink-window", "sparsity": 0.9}},
]


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per batch and number of new tokens."""
    if session.dry_run:
        workload = {**TOY, "causal": True, "mode": "decode"}
        return [toy("decode", "toy", [{"ring": {}}], workload).item(session)]
    found = available(session, IMPLEMENTATIONS)
    same = {**SHAPES["32-8x128"], "dtype": "bfloat16", "causal": True, "mode": "decode"}
    return [
        Cell(
            "decode", f"batch {batch}, {new} new", "256k", found,
            {**same, "batch": batch, "new_tokens": new}, seconds=30,
        ).item(session)
        for batch, new in product((1, 8), (1, 8))
    ]  # fmt: skip


STEP = Step("decode", list_items, make_table)
