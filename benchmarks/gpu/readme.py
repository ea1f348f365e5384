"""The tables for the README, from the records of the step speed."""

from collections.abc import Callable

from benchmarks.gpu.items import Session
from benchmarks.gpu.processes import records_in
from benchmarks.gpu.speed import SPARSITY, describe_pass
from longseq_bench.analysis.sweep_row import SweepRow
from longseq_bench.analysis.sweeps import sweep_rows
from longseq_bench.core.units import format_seconds, format_tokens

USUAL = {"sparsity": SPARSITY, "kernel": "triton", "pattern": "local-window"}
"""Options of the block-sparse attention that the table shows."""

Key = tuple[int, str, str]
"""Tokens, pass, shape."""
Cells = dict[Key, SweepRow]


def readme_tables(session: Session) -> str:
    """Return Markdown: the fastest exact attention, and block-sparse beside it; "" without rows."""
    exact, sparse = Cells(), Cells()
    for path in sorted(session.out.glob("speed/*/records.jsonl")):
        for row in sweep_rows(records_in(path.parent)):
            if row.time_s is None or row.status != "ok":
                continue
            if not row.is_sparse:
                _keep_fastest(exact, row)
            elif row.implementation == "block-sparse" and (
                session.dry_run or row.options.items() >= USUAL.items()
            ):
                _keep_fastest(sparse, row)

    def write_exact(key: Key) -> str:
        return f"{format_seconds(exact[key].time_s or 0)} {exact[key].implementation}"

    def write_sparse(key: Key) -> str:
        seconds = sparse[key].time_s or 0
        times = f", {(exact[key].time_s or 0) / seconds:.3g}×" if key in exact else ""
        return f"{format_seconds(seconds)}{times}"

    tables = (
        _table("fastest exact", exact, write_exact),
        _table(f"block-sparse {SPARSITY:.0%}", sparse, write_sparse),
    )
    return "\n\n".join(filter(None, tables))


def _keep_fastest(cells: Cells, row: SweepRow) -> None:
    heads = str(row.heads) if row.kv_heads == row.heads else f"{row.heads}/{row.kv_heads}"
    key = (row.tokens, describe_pass(row.mode, row.causal), f"{heads}×{row.head_dim}")
    known = cells.setdefault(key, row)
    if (row.time_s or 0) < (known.time_s or 0):
        cells[key] = row


def _table(title: str, cells: Cells, write: Callable[[Key], str]) -> str:
    """Return a row per length and pass, a column per shape; "" without cells."""
    if not cells:
        return ""
    shapes = list(dict.fromkeys(shape for *_, shape in cells))
    lines = [f"| tokens | {title} | {' | '.join(shapes)} |", f"|---:|---|{'---:|' * len(shapes)}"]
    for tokens, name in sorted({key[:2] for key in cells}):
        keys = [(tokens, name, shape) for shape in shapes]
        words = [write(key) if key in cells else "–" for key in keys]
        lines.append(f"| {format_tokens(tokens)} | {name} | {' | '.join(words)} |")
    return "\n".join(lines)
