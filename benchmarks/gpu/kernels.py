"""Step kernels: the Triton kernels with other tiles, and dense attention for the share of ideal."""

import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import Figures, Item, ItemFailed, Result, Session, Step, Table
from benchmarks.gpu.processes import ProcessFailed, measure, stream

KERNELS = ("forward", "dq", "dkv")
HEAD_DIMS = (64, 128)
HEADS = 8
ALLOWED = 2e-2
"""Largest difference from the chosen tile's result over its largest value, in bfloat16."""

PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}
"""Matrix products of each kernel; dq and dkv compute the scores again."""

LONG, SHORT, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
"""Tokens of a tile along the side that a program keeps, and along the one that it walks."""

Tile = list[Any]


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per kernel, head_dim and mask, and those of dense attention."""
    if session.dry_run:
        return [
            Item("dense-d64-full", partial(measure, "dense", session, head_dim=64, causal=False)),
            Item("dkv-d64-causal", partial(run_tiles, session, "dkv", 64, True)),
        ]
    shapes = list(product(HEAD_DIMS, (False, True)))
    dense = [
        Item(f"dense-{label(d, c)}", partial(measure, "dense", session, head_dim=d, causal=c))
        for d, c in shapes
    ]
    tiles = [
        Item(f"{kernel}-{label(d, c)}", partial(run_tiles, session, kernel, d, c))
        for kernel, (d, c) in product(KERNELS, shapes)
    ]
    return dense + tiles


def label(head_dim: int, causal: bool) -> str:
    """Return the part of an item's name that gives head_dim and mask."""
    return f"d{head_dim}-{'causal' if causal else 'full'}"


def grid(kernel: str, chosen: Tile) -> list[Tile]:
    """Return the tiles to try, the chosen one first, then it without a limit of registers."""
    tiles: list[Tile] = [chosen, [*chosen[:4], None]]
    for kept, walked, warps, stages in product(LONG, SHORT, WARPS, STAGES):
        sides = (walked, kept) if kernel == "dkv" else (kept, walked)
        # four warps have too few registers for a tile of this size
        if warps == 8 or kept * walked < 128 * 128:
            tiles.append([*sides, warps, stages, None])
    return [tile for i, tile in enumerate(tiles) if tile not in tiles[:i]]


def run_tiles(session: Session, kernel: str, head_dim: int, causal: bool) -> Figures:
    """Run each tile that has no result yet; a call that is cut keeps its results."""
    if find_spec("triton") is None:
        raise ItemFailed("triton is not installed: pip install triton")
    from benchmarks.gpu.tiles import chosen_tile

    chosen = chosen_tile(kernel, head_dim, _capability(session))
    tiles = [chosen, [64, 64, 4, 2, None]] if session.dry_run else grid(kernel, chosen)
    kept = session.out / "kernels" / f"{kernel}-{label(head_dim, causal)}.tiles.jsonl"
    done = _read(kept)
    silent = 0
    while left := [tile for tile in tiles if json.dumps(tile) not in done]:
        before, limit = len(done), session.seconds_left()
        argument = {
            "kernel": kernel, "head_dim": head_dim, "causal": causal, "tiles": left,
            "compile_only": session.dry_run,
        }  # fmt: skip
        try:
            for result in stream("tiles", argument, limit):
                _keep(kept, done, result)
        except ProcessFailed as error:
            if error.late:
                text = f"{len(done)} of {len(tiles)} tiles are done"
                raise session.cut(text, limit, len(done) > before) from None
            silent = silent + 1 if len(done) == before else 0
            if silent > 1:
                raise ItemFailed(str(error), {"tiles": list(done.values())}) from None
            # the process ended at the first tile without a result
            culprit = next(tile for tile in left if json.dumps(tile) not in done)
            _keep(kept, done, {"tile": culprit, "error": str(error)})
    return judge([done[json.dumps(tile)] for tile in tiles])


def judge(results: list[Figures]) -> Figures:
    """Return all results with the chosen and the fastest one.

    Raises ItemFailed if the chosen tile failed, or if a tile computes something else.
    """
    figures: Figures = {"chosen": results[0], "tiles": results}
    timed = [one for one in results if "seconds" in one and one["difference"] <= ALLOWED]
    if timed:
        figures["best"] = min(timed, key=lambda one: float(one["seconds"]))
    differ = [one["tile"] for one in results if one.get("difference", 0.0) > ALLOWED]
    if problem := results[0].get("error") or results[0].get("does_not_fit"):
        raise ItemFailed(f"the chosen tile {results[0]['tile']}: {problem}", figures)
    if differ:
        raise ItemFailed(f"tiles with another result than the chosen one: {differ}", figures)
    return figures


def _capability(session: Session) -> int:
    if session.dry_run:
        return 9
    import torch

    return torch.cuda.get_device_capability()[0]


def _read(path: Path) -> dict[str, Figures]:
    """Return the kept results by tile; a line that was cut is left out."""
    done: dict[str, Figures] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                result = json.loads(line)
            except ValueError:
                continue
            done[json.dumps(result["tile"])] = result
    return done


def _keep(path: Path, done: dict[str, Figures], result: Figures) -> None:
    done[json.dumps(result["tile"])] = result
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


# ---- the table ---------------------------------------------------------------------------------


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per kernel: the chosen and the best tile, FLOP/s, and share of ideal."""
    by_name = {one.item: one for one in results}
    rows: list[tuple[object, ...]] = [
        ("item", "status", "chosen tile", "time", "best tile", "time", "TFLOP/s", "share of ideal")
    ]
    for one in results:
        if one.item.startswith("dense-"):
            rows += _dense_rows(one)
        elif "best" not in one.figures:
            rows.append((one.item, one.status, _tile(one.figures.get("chosen")), *["–"] * 5))
        else:
            chosen, best = one.figures["chosen"], one.figures["best"]
            rows.append((
                one.item, one.status, _tile(chosen), _ms(chosen.get("seconds")), _tile(best),
                _ms(best["seconds"]), f"{_flops(one) / 1e12:.0f}", _share(one, by_name),
            ))  # fmt: skip
    return rows


def _dense_rows(one: Result) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for kernel, figures in one.figures.get("kernels", {}).items():
        for part in ("forward", "backward"):
            seconds = figures.get(f"{part}_s")
            rate = f"{figures[f'{part}_flops'] / 1e12:.3g}" if seconds else "–"
            name = f"{one.item} {kernel} {part}"
            rows.append((name, one.status, "", "", "", _ms(seconds), rate, ""))
    return rows or [(one.item, one.status, "", "", "", "", "", "")]


def _flops(one: Result) -> float:
    kernel, shape, _ = one.item.split("-")
    best = one.figures["best"]
    return float(2 * PRODUCTS[kernel] * best["pairs"] * int(shape[1:]) * HEADS / best["seconds"])


def _share(one: Result, by_name: dict[str, Result]) -> str:
    """Return dense time times density over the best time; dq and dkv together have one."""
    kernel, shape = one.item.split("-", 1)
    dense = by_name.get(f"dense-{shape}")
    part = "forward_s" if kernel == "forward" else "backward_s"
    kernels = dense.figures.get("kernels", {}).values() if dense else []
    fastest = min((k[part] for k in kernels if part in k), default=None)
    parts = ["forward"] if kernel == "forward" else ["dq", "dkv"]
    found = [by_name.get(f"{name}-{shape}") for name in parts]
    bests = [other.figures["best"] for other in found if other and "best" in other.figures]
    if kernel == "dq" or fastest is None or len(bests) < len(parts):
        return "with dkv" if kernel == "dq" else "–"
    seconds = sum(float(best["seconds"]) for best in bests)
    return f"{fastest * bests[0]['density'] / seconds:.2f}"


def _tile(one: Figures | None) -> str:
    if one is None:
        return "–"
    queries, keys, warps, stages, registers = one["tile"]
    return f"{queries}×{keys} {warps}w {stages}s" + (f" {registers}r" if registers else "")


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3f} ms"


STEP = Step("kernels", list_items, make_table)
