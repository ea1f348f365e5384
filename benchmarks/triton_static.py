"""Properties of the compiled Triton kernels, without a GPU: registers, spills, loads in flight.

    python -m benchmarks.triton_static                    # sm_80, sm_90 and sm_100
    python -m benchmarks.triton_static --every            # also short blocks, splits, groups, ...
    python -m benchmarks.triton_static --capability 90 --kernel forward

Columns: registers of a thread; bytes of registers that spill to memory; shared memory of a program;
programs (CTAs) that fit a multiprocessor at once; groups of asynchronous loads that are still
in flight when the main loop waits for one; PTX instructions of the main loop; the instruction that
multiplies matrices. --every compiles the other variants as well, and prints only those that spill.
The exit code is 1 if a 16-bit variant spills more than 64 bytes, or if the forward of head_dim 64
has fewer than two programs on a multiprocessor or fewer than two loads in flight on sm_90.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)
HEAD_DIMS = (64, 128, 256)
CHOICE = {"select": 5, "transpose": 7}
"""Kernels that choose blocks, for any head_dim and mask, and how many `sizes` they have."""
KERNELS = ("forward", "dq", "dkv", "decode", *CHOICE)
WARP = 32

MULTIPROCESSOR = {
    80: (164 * 1024, 2048),
    90: (228 * 1024, 2048),
    100: (228 * 1024, 2048),
}
"""Shared memory and threads of a multiprocessor (CUDA C++ Programming Guide, table of technical
specifications per compute capability)."""
REGISTERS = 64 * 1024
ALLOWED_SPILL = 64
"""Bytes: on an H100 the fastest tile of dkv, causal, spills 16 (results/h100/tiles)."""
RESERVED = 1024
"""Bytes of shared memory that the driver takes from each program."""
PRODUCTS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")

KINDS = {
    "lse": "*fp32", "delta": "*fp32", "parts": "*fp32", "parts_lse": "*fp32", "dk_parts": "*fp32",
    "dv_parts": "*fp32", "places": "*i32", "bounds": "*i64", "indices": "*i32", "indptr": "*i64",
    "splits": "*i32", "columns": "*i32", "scores": "*fp32", "scale": "fp32", "seq_len": "i32",
    "rows": "i32", "heads": "i32", "items": "i32", "slots": "i32",
}  # fmt: skip
"""Types of the kernels' parameters; other pointers have the dtype of the tensors."""

DECODE_KINDS = {
    "out": "*fp32", "ranges": "*i64", "first": "*i64", "stop": "*i64", "k_scale": "*fp32",
    "v_scale": "*fp32", "splits": "i32", "kv_heads": "i32", "queries": "i32", "scales": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel compiled for a head_dim, with or without a causal mask."""

    kernel: str
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    block: int = 128
    tile: tuple[int, ...] | None = None
    unit: int = 0
    """Queries, keys, warps and stages; None: the tile that the package chooses."""
    tail: bool = False
    """The last block is short."""
    split: bool = False
    """Some items write to slots."""
    group: int = 1
    """Query heads per KV head; in decode, those times new tokens."""
    shared: bool = True
    """One layout for all heads."""
    cap: float = 0.0
    """Soft cap of q·k; 0: none."""


@dataclass(frozen=True)
class Compiled:
    """Properties of a compiled variant."""

    tile: Any
    registers: int
    spilled: int
    shared: int
    programs: int
    in_flight: int | None
    instructions: int
    product: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    tile_help = "queries, keys, warps, stages and, if wanted, the maximum of registers"
    parser.add_argument("--tile", type=int, nargs="+", metavar="N", help=tile_help)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--every", action="store_true", help="also compile every other variant")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    tile = tuple(args.tile) if args.tile else None
    variants = [
        Variant(kernel, dim, causal, tile=tile)
        for kernel in args.kernel for dim in args.head_dim
        for causal in ((False,) if kernel in ("decode", *CHOICE) else (False, True))
        if kernel not in CHOICE or dim == args.head_dim[0]
    ]  # fmt: skip
    jobs = [(variant, capability) for capability in args.capability for variant in variants]
    print(aligned(COLUMNS))
    failed = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for variant, capability, made in compile_all(pool, jobs):
            print(row(variant, capability, made), flush=True)
            failed += faults(variant, capability, made)
        if args.every:
            more = [
                (other, capability) for variant, capability in jobs for other in others(variant)
            ]
            made_more = list(compile_all(pool, more))
            failed += [fault for one in made_more for fault in faults(*one)]
            print(f"\n{len(made_more)} other variants compiled")
    print("\n".join(["", *failed] if failed else ["", "no large spills; every goal is met"]))
    sys.exit(bool(failed))


def others(variant: Variant) -> Iterator[Variant]:
    """Yield the variants that need more registers: masks, slots, groups, layouts per head."""
    if variant.kernel in CHOICE:
        return
    if variant.kernel == "decode":
        yield from (
            replace(variant, dtype=dtype, group=rows)
            for dtype, rows in (("bf16", 64), ("fp16", 64), ("fp32", 1), ("fp32", 16))
        )
        yield from (replace(variant, unit=unit) for unit in (1, 256))
        return
    for tail in (False, True):
        for split in (False, True):
            for group, shared in ((1, True), (4, True), (4, False)):
                other = replace(variant, tail=tail, split=split, group=group, shared=shared)
                if other != variant:
                    yield other
    yield replace(variant, dtype="fp16")
    if variant.head_dim == 128:
        yield replace(variant, head_dim=80)


def compile_all(
    pool: ProcessPoolExecutor, jobs: list[tuple[Variant, int]]
) -> Iterator[tuple[Variant, int, Compiled]]:
    for (variant, capability), made in zip(
        jobs, pool.map(compile_variant, *zip(*jobs, strict=True)), strict=True
    ):
        yield variant, capability, made


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile a kernel for a compute capability; needs Triton, and no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    function, tile = kernel_of(variant, capability)
    signature, constants, known = arguments(function, variant, tile)
    source = triton.compiler.ASTSource(function, signature, constants, known)
    target = GPUTarget("cuda", capability, WARP)
    binary = triton.compile(source, target=target, options=tile.options)
    ptx, shared = binary.asm["ptx"], binary.metadata.shared
    registers, spilled = assemble(ptx, capability)
    return Compiled(
        tile, registers, spilled, shared, programs_of(capability, registers, shared, tile.warps),
        loads_in_flight(binary.asm["ttgir"]), max(map(len, loops(ptx)), default=0),
        next((name for name in PRODUCTS if name in ptx), "none"),
    )  # fmt: skip


def kernel_of(variant: Variant, capability: int) -> tuple[Any, Any]:
    """Return the kernel's function, and its tile."""
    import torch

    from longseq_bench.kernels import triton_decode, triton_topk
    from longseq_bench.kernels.triton_blocks import _KERNELS
    from longseq_bench.kernels.triton_tiles import Shape, select_shape

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[variant.dtype]
    if variant.kernel in CHOICE:
        return getattr(triton_topk, variant.kernel), Shape(1, triton_topk.MAX_TILE, 4, 3)
    if variant.kernel == "decode":
        return triton_decode._split, triton_decode.tile_of(variant.group, variant.head_dim, dtype)
    flags = {"tail": variant.tail, "causal": variant.causal}
    major, dim = capability // 10, variant.head_dim
    shape = select_shape(variant.kernel, variant.block, dim, dtype, major, **flags)
    return _KERNELS[variant.kernel], Shape(*variant.tile) if variant.tile else shape


def arguments(
    function: Any, variant: Variant, tile: Any
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Return signature, constants and known divisors of a kernel's parameters."""
    wide = 1 << (variant.head_dim - 1).bit_length()
    constants = {
        "GROUP": variant.group, "SHARED": variant.shared, "SPLIT": variant.split,
        "BLOCK": variant.block, "DIM": variant.head_dim,
        "WIDE": wide, "V_DIM": variant.head_dim, "V_WIDE": wide, "CAUSAL": variant.causal,
        "TAIL": variant.tail, "M": tile.queries, "N": tile.keys, "KEEP_LSE": True,
        "CAP": variant.cap,
        "UNIT": variant.unit,
    }  # fmt: skip
    # wider values are those of a latent, 512+64
    constants |= {"REST": 64, "REST_WIDE": 64} if wide > 256 else {"REST": 0, "REST_WIDE": 16}
    signature: dict[str, Any] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    kinds = KINDS | DECODE_KINDS if variant.kernel == "decode" else KINDS
    kinds = kinds | ({"k": "*i8", "v": "*i8"} if variant.unit else {})
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], fixed[(i,)] = "constexpr", constants[name]
        elif name == "sizes":
            signature[name] = ("i32",) * CHOICE[variant.kernel]
        elif name.endswith("strides"):
            signature[name] = ("i64", "i64", "i32")
            known |= {(i, at): [["tt.divisibility", 16]] for at in range(3)}
        else:
            signature[name] = kinds.get(name, f"*{variant.dtype}")
            if signature[name].startswith("*"):
                known[(i,)] = [["tt.divisibility", 16]]
    return signature, fixed, known


def assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers of a thread and bytes of spills, as NVIDIA's assembler reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        tool, out = get_ptxas(capability).path, path.with_suffix("")
        command = [tool, "-v", f"--gpu-name={architecture}", path, "-o", out]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert registers, said
    return int(registers[1]), sum(map(int, spills))


def programs_of(capability: int, registers: int, shared: int, warps: int) -> int:
    """Return how many programs a multiprocessor holds at once."""
    shared_room, threads = MULTIPROCESSOR[capability]
    rounded = -(-registers // 8) * 8
    return min(
        REGISTERS // (rounded * warps * WARP),
        shared_room // (shared + RESERVED),
        threads // (warps * WARP),
    )


def loads_in_flight(ttgir: str) -> int | None:
    """Return the groups of asynchronous loads that the waits in loops leave in flight, at least.

    None: the kernel has no asynchronous loads in a loop.
    """
    waits = [
        int(found[1])
        for loop in innermost_loops(ttgir)
        for found in re.finditer(r"ttg\.async_wait .*?num = (\d+)", loop)
    ]
    return min(waits) if waits else None


def innermost_loops(ttgir: str) -> Iterator[str]:
    """Yield the text of each `scf.for` that contains no other."""
    lines = ttgir.splitlines()
    for start, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        indent = len(line) - len(line.lstrip())
        end = start + 1
        while len(lines[end]) - len(lines[end].lstrip()) > indent:
            end += 1
        if not any("scf.for" in line for line in lines[start + 1 : end]):
            yield "\n".join(lines[start:end])


def loops(ptx: str) -> Iterator[list[str]]:
    """Yield the instructions of each innermost loop: from a label to a branch back to it."""
    body: dict[str, list[str]] = {}
    for line in ptx.splitlines():
        text = line.strip()
        if label := re.match(r"(\$\w+):", text):
            body[label[1]] = []
            continue
        if not text or text.startswith(("//", ".", "{", "}")):
            continue
        for own in body.values():
            own.append(text)
        if (branch := re.search(r"bra(?:\.uni)?\s+(\$\w+)", text)) and branch[1] in body:
            yield body[branch[1]]
            body.clear()


def faults(variant: Variant, capability: int, made: Compiled) -> list[str]:
    """Return what of the goals a variant does not reach."""
    name = f"sm_{capability} {variant}"
    found = [f"{name}: {made.spilled} bytes spill"] if made.spilled > ALLOWED_SPILL else []
    is_plain = variant == Variant(variant.kernel, variant.head_dim, variant.causal)
    if is_plain and (capability, variant.kernel, variant.head_dim) == (90, "forward", 64):
        if made.programs < 2:
            found.append(f"{name}: {made.programs} program per multiprocessor")
        if made.in_flight is None or made.in_flight < 2:
            found.append(f"{name}: {made.in_flight} loads in flight")
    return found


COLUMNS = ("sm", "kernel", "head_dim", "mask", "tile", "registers", "spilled B", "shared KiB",
           "CTAs/SM", "in flight", "loop", "product")  # fmt: skip
WIDTHS = (4, 14, 8, 6, 13, 9, 9, 10, 7, 9, 5, 15)


def aligned(cells: Sequence[object]) -> str:
    return " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def row(variant: Variant, capability: int, made: Compiled) -> str:
    tile = made.tile
    cells = (
        capability, variant.kernel, variant.head_dim, "causal" if variant.causal else "full",
        f"{tile.queries}×{tile.keys} {tile.warps}w {tile.stages}s", made.registers, made.spilled,
        f"{made.shared / 1024:.0f}", made.programs,
        "–" if made.in_flight is None else made.in_flight, made.instructions, made.product,
    )  # fmt: skip
    return aligned(cells)


if __name__ == "__main__":
    main()
