"""Step kernels: the Triton kernels with other tiles, beside dense attention."""

import json
from collections.abc import Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import Figures, Item, ItemFailed, Result, Session, Step, Table, or_dash
from benchmarks.gpu.processes import ProcessFailed, stream
from longseq_bench.core.units import format_share

KERNELS = ("forward", "dq", "dkv")
SHAPES = tuple(product((64, 128), (False, True)))
"""head_dim, and whether the mask is causal."""
HEADS = 8
ALLOWED = 2e-2
"""Largest difference from the chosen tile's result over its largest value, in bfloat16."""

PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}
"""Matrix products of each kernel; dq and dkv compute the scores again."""

TOGETHER = {"forward": ("forward_s", ("forward",)), "dkv": ("backward_s", ("dq", "dkv"))}
"""The time of dense attention that kernels together are compared with, by the last of them."""

LONG, SHORT, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
"""Tokens of a tile along the side that a program keeps, and along the one that it walks."""

Job = list[Any]
"""kernel, head_dim, causal, and the tile: queries, keys, warps, stages, registers or None."""


def list_items(session: Session) -> Sequence[Item]:
    """Return the one item, which keeps the result of each tile."""
    return [Item("tiles", partial(run_tiles, session), seconds=150)]


def list_jobs(session: Session) -> list[Job]:
    """Return dense attention and the tiles to try for each kernel, the chosen one first.

    They are in the order in which tiles.py runs them.
    """
    if session.dry_run:
        tiles: list[Job] = [[64, 64, 4, 3, None], [64, 64, 4, 2, None]]
        return [["dkv", 64, True, tile] for tile in tiles]
    import torch

    from longseq_bench.kernels.triton_tiles import select_shape

    jobs, major = list[Job](), session.capability // 10
    for head_dim, causal in SHAPES:
        jobs.append(["dense", head_dim, causal, None])
        for kernel in KERNELS:
            chosen = select_shape(kernel, 128, head_dim, torch.bfloat16, major, causal=causal)
            tiles = grid(kernel, list(astuple(chosen)))
            jobs += [[kernel, head_dim, causal, tile] for tile in tiles]
    return jobs


def grid(kernel: str, chosen: list[Any]) -> list[list[Any]]:
    """Return the tiles to try, the chosen one first, then it without a limit of registers."""
    tiles: list[list[Any]] = [chosen, [*chosen[:4], None]]
    for kept, walked, warps, stages in product(LONG, SHORT, WARPS, STAGES):
        sides = (walked, kept) if kernel == "dkv" else (kept, walked)
        # four warps have too few registers for a tile of this size
        if warps == 8 or kept * walked < 128 * 128:
            tiles.append([*sides, warps, stages, None])
    return [tile for i, tile in enumerate(tiles) if tile not in tiles[:i]]


def run_tiles(session: Session) -> Figures:
    """Compile all tiles at once, then time those without a result; a call that is cut keeps them.

    Writes tiles.csv: the fastest ones, as rows of longseq_bench/data/tiles.csv.
    """
    if find_spec("triton") is None:
        raise ItemFailed("triton is not installed: pip install triton")
    jobs, kept = list_jobs(session), Results(session.out / "kernels" / "tiles.jsonl")
    compiled = compile_all(session, [job for job in kept.left(jobs) if job[0] != "dense"])
    for result in (one for one in compiled if "does_not_fit" in one):
        kept.add(result)
    if session.dry_run:
        again = compile_all(session, jobs)
        if bad := [one for one in again if not one.get("cached")]:
            raise ItemFailed(f"not in Triton's cache after they were compiled: {bad}")
        return {"compiled": compiled}
    lost = 0
    while left := kept.left(jobs):
        lost = 0 if time_some(session, left, kept) else lost + 1
        if lost > 1:
            text = "two processes in a row timed no tile"
            raise ItemFailed(text, {"results": list(kept.done.values())})
    figures, problems = judge([kept.of(job) for job in jobs])
    write_rows(figures["rows"], session)
    if problems:
        raise ItemFailed("; ".join(problems), figures)
    return figures


def time_some(session: Session, jobs: list[Job], kept: "Results") -> bool:
    """Time tiles in one process; the first without a result is the one that ended it.

    Returns False if it timed none.
    """
    before, limit = len(kept.done), session.seconds_left()
    try:
        for result in stream("tiles", {"what": "time", "jobs": jobs}, limit):
            kept.add(result)
    except ProcessFailed as error:
        got, left = len(kept.done) > before, kept.left(jobs)
        if error.late:
            raise session.cut(f"{len(left)} tiles are left", limit, got) from None
        kept.add({"job": left[0], "error": str(error)})
        return got
    return len(kept.done) > before


def compile_all(session: Session, jobs: list[Job]) -> list[Figures]:
    """Compile tiles by one process per core; a tile that ends them is met again in its timing."""
    argument = {
        "what": "compile", "jobs": jobs, "capability": session.capability,
        "processes": 2 if session.dry_run else None,
    }  # fmt: skip
    results: list[Figures] = []
    try:
        results.extend(stream("tiles", argument, session.seconds_left()))
    except ProcessFailed as error:
        if error.late:
            text = f"{len(results)} of {len(jobs)} tiles are compiled"
            raise session.cut(text, 0) from None
        if session.dry_run:
            raise ItemFailed(str(error)) from None
    return results


class Results:
    """Results by job in a file; a line that was cut is left out."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, dict[str, Figures]()
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                result = json.loads(line)
            except ValueError:
                continue
            self.done[json.dumps(result["job"])] = result

    def left(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs without a result."""
        return [job for job in jobs if json.dumps(job) not in self.done]

    def of(self, job: Job) -> Figures:
        """Return the result of a job."""
        return self.done[json.dumps(job)]

    def add(self, result: Figures) -> None:
        """Keep a result."""
        self.done[json.dumps(result["job"])] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(result))


def judge(results: list[Figures]) -> tuple[Figures, list[str]]:
    """Return all results with the fastest tile of each kernel, head_dim and mask, and problems.

    share, share_of_call: dense time times density over the kernel's time, and over that of a whole
    call. dq and dkv have one share, that of dkv, which was timed beside the fastest dq.
    Problems: chosen tiles that failed, and tiles that compute something else.
    """
    rows, problems = list[Figures](), list[str]()
    for shape in SHAPES:
        dense = _fastest_dense([one for one in results if one["job"][:3] == ["dense", *shape]])
        best_s: dict[str, float] = {}
        for kernel in KERNELS:
            own = [one for one in results if one["job"][:3] == [kernel, *shape]]
            if problem := own[0].get("error") or own[0].get("does_not_fit"):
                problems.append(f"the chosen tile {own[0]['job']}: {problem}")
            timed = [one for one in own if "seconds" in one]
            wrong = [one["job"] for one in timed if one["difference"] > ALLOWED]
            problems += [f"another result than the chosen tile's: {job}" for job in wrong]
            right = [one for one in timed if one["job"] not in wrong]
            if not right:
                continue
            best = min(right, key=lambda one: float(one["seconds"]))
            row = {"chosen": own[0], "best": best}
            best_s[kernel] = best["seconds"]
            part, together = TOGETHER.get(kernel, ("", ()))
            if part in dense and best_s.keys() >= set(together):
                ideal = dense[part] * best["density"]
                row["share"] = ideal / sum(best_s[name] for name in together)
                row["share_of_call"] = ideal / best["call_s"]
            rows.append(row)
    return {"rows": rows, "results": results}, problems


def _fastest_dense(results: list[Figures]) -> dict[str, float]:
    """Return the seconds of the fastest kernel of dense attention by pass."""
    kernels = [figures for one in results for figures in one.get("kernels", {}).values()]
    return {
        part: min(figures[part] for figures in kernels)
        for part in ("forward_s", "backward_s") if kernels
    }  # fmt: skip


def write_rows(rows: list[Figures], session: Session) -> None:
    """Write the fastest tiles as rows of longseq_bench/data/tiles.csv."""
    lines = []
    for row in rows:
        (kernel, head_dim, causal, tile), seconds = row["best"]["job"], row["best"]["seconds"]
        sizes = ["" if size is None else size for size in tile]
        cells = [
            kernel, 2, head_dim, session.capability // 10, "no", "causal" if causal else "full",
            *sizes, f"{1e3 * seconds:.3f}", session.hardware, datetime.now(UTC).date(),
        ]  # fmt: skip
        lines.append(",".join(map(str, cells)))
    text = "\n".join([*lines, ""])
    (session.out / "kernels" / "tiles.csv").write_text(text, encoding="utf-8")


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per kernel: chosen and best tile, times, FLOP/s, and shares of ideal."""
    table: list[tuple[object, ...]] = [
        ("kernel", "chosen tile", "time", "best tile", "time", "call", "TFLOP/s", "of ideal",
         "by call"),
    ]  # fmt: skip
    for row in (row for one in results for row in one.figures.get("rows", ())):
        chosen, best = row["chosen"], row["best"]
        kernel, head_dim, causal, tile = best["job"]
        flops = 2 * PRODUCTS[kernel] * best["pairs"] * head_dim * HEADS / best["seconds"]
        table.append((
            f"{kernel} d{head_dim} {'causal' if causal else 'full'}", _tile(chosen["job"][3]),
            or_dash(chosen.get("seconds"), _ms), _tile(tile), _ms(best["seconds"]),
            _ms(best["call_s"]), f"{flops / 1e12:.0f}", or_dash(row.get("share"), format_share),
            or_dash(row.get("share_of_call"), format_share),
        ))  # fmt: skip
    compiled = [len(one.figures["compiled"]) for one in results if "compiled" in one.figures]
    return table + [(f"{count} compiled", *[""] * 8) for count in compiled]


def _tile(tile: list[Any]) -> str:
    queries, keys, warps, stages, registers = tile
    return f"{queries}×{keys} {warps}w {stages}s" + (f" {registers}r" if registers else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


STEP = Step("kernels", list_items, make_table)
