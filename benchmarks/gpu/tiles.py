"""Tiles of one Triton kernel, in a process of their own: `stream` in processes.py runs it.

The argument is JSON: kernel, head_dim, causal, and a list of tiles [queries, keys, warps, stages,
maximum of registers or null]. Each tile's result is printed as JSON when it is known, so that a
tile that ends the process loses no other result. With `compile_only` (no GPU) each tile is compiled
for compute capability 9.0 instead.
"""

import json
import sys
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.gpu.items import Figures
from benchmarks.triton_static import Variant, compile_variant
from longseq_bench.kernels.triton_blocks import TritonBlocks
from longseq_bench.kernels.triton_tiles import Shape, capability_of, select_shape
from longseq_bench.patterns.blocks import make_layout

TOKENS, HEADS, BLOCK, SPARSITY = 2**16, 8, 128, 0.95
REPEATS = 8


class TimedBlocks(TritonBlocks):
    """TritonBlocks that measures the device time of one of its kernels.

    kernel: forward, dq or dkv.  seconds: of each launch.
    """

    def __init__(self, layout: Any, kernel: str) -> None:
        super().__init__([layout])
        self.kernel, self.seconds = kernel, list[float]()

    def use(self, tile: Shape, head_dim: int) -> None:
        """Run the kernel with this tile from now on."""
        self._shapes[self.kernel, head_dim, torch.bfloat16] = tile
        self._launches.clear()
        self.seconds = []

    def used(self, head_dim: int) -> Shape:
        """Return the tile that fitted the device: the given one, or a smaller one."""
        return self._shapes[self.kernel, head_dim, torch.bfloat16]

    @override
    def _launch(self, name: str, *arguments: Any, **constants: Any) -> None:
        if name != self.kernel:
            super()._launch(name, *arguments, **constants)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        super()._launch(name, *arguments, **constants)
        end.record()
        end.synchronize()
        self.seconds.append(start.elapsed_time(end) / 1e3)


def main() -> None:
    given = json.loads(sys.argv[1])
    run = compile_tiles if given.pop("compile_only") else time_tiles
    run(**given)


def compile_tiles(kernel: str, head_dim: int, causal: bool, tiles: list[list[Any]]) -> None:
    """Print what each tile compiles to."""
    for tile in tiles:
        made = compile_variant(Variant(kernel, head_dim, causal, tile=tuple(tile)), 90)
        emit(tile, registers=made.registers, spilled=made.spilled, programs=made.programs)


def time_tiles(kernel: str, head_dim: int, causal: bool, tiles: list[list[Any]]) -> None:
    """Print the time of each tile, and how far its result is from that of the chosen tile."""
    layout = make_layout("local-window", TOKENS, BLOCK, SPARSITY, causal)
    blocks = TimedBlocks(layout, kernel)
    shape = (1, HEADS, TOKENS, head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    out, lse = blocks.forward(q, k, v, True)
    assert lse is not None
    queries = (grad_out, q, out, lse)

    def run() -> tuple[Tensor, ...]:
        if kernel == "forward":
            return (blocks.forward(q, k, v, True)[0],)
        dq, dk, dv = blocks.backward(queries, (k, v))
        return (dq,) if kernel == "dq" else (dk, dv)

    chosen = select_shape(kernel, BLOCK, head_dim, torch.bfloat16, capability_of(q), False)
    blocks.use(chosen, head_dim)
    expected = run()
    for tile in tiles:
        wanted = Shape(*tile)
        blocks.use(wanted, head_dim)
        try:
            got = run()
            if blocks.used(head_dim) != wanted:
                emit(tile, does_not_fit="more shared memory or registers than the device has")
                continue
            blocks.seconds = []
            for _ in range(REPEATS):
                run()
        except Exception as error:
            if is_device_lost():
                raise
            emit(tile, error=f"{type(error).__name__}: {error}"[:500])
            continue
        seconds = sorted(blocks.seconds)
        emit(
            tile, seconds=seconds[len(seconds) // 2], fastest_s=seconds[0],
            difference=max(map(difference, got, expected)), chosen=wanted == chosen,
            density=layout.density, pairs=layout.visible_pairs,
        )  # fmt: skip


def difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    return float((got - expected).abs().max() / expected.abs().max())


def is_device_lost() -> bool:
    """Return True if the device can't be used any more, as after an illegal access."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def chosen_tile(kernel: str, head_dim: int, capability: int = 9) -> list[Any]:
    """Return the tile that the package chooses."""
    return list(astuple(select_shape(kernel, BLOCK, head_dim, torch.bfloat16, capability, False)))


def emit(tile: list[Any], **figures: Any) -> None:
    """Print the result of a tile."""
    result: Figures = {"tile": tile, **figures}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
