"""Random configs and command lines: sound ones, with nonsense here and there, and broken ones."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

HUGE = int("9" * 4000)
NUMBERS = (
    0, 1, 2, 3, 7, 8, 64, 1024, -1, 2**12 + 1, 2**16, 2**16 + 1, 2**31, 2**40, 2**40 + 1, 2**63,
    10**12 + 39, 10**30, HUGE, 0.5, 1.5, -0.5, 1e-300, 1e308, float("inf"), float("nan"),
)  # fmt: skip
WORDS = (
    "", " ", "~", "null", "none", "true", "false", "yes", "on", "4k", "1M", "1.5M", "12q", "2000G",
    "-3GiB", "64MiB", "1TiB", "9e99TiB", "1e400", "60s", "0s", "1e300h", "1_000", "0x10", "0o17",
    "1:30", "2001-01-01", "=1+1", "@SUM(A1)", "a,b", "1,2,4", "1,2000000", "²", "9" * 5000,
    "x" * 5000, "\x1b[31mred\x1b[0m", "a\rb", "nul\0", "bell\a", "tab\t", "line\nend", "ё×…±",
    "'", '"', "\udcff", "-", "--", "a/b", "cpu", "gpu", "cuda", "auto", "float32", "bf16",
    "float64",
    "forward", "train", "decode", "causal", "sliding-window:4k", "documents:1", "documents:chatqa2",
    "documents:chatqa2@" + "7" * 5000, "prefix:2000G", "llama-3.1-8b", "sdpa", "ring", "dense",
    "block-sparse", "ulysses", "sparsity=0.9", "chunk=0", "chunk=9e99", "=", "a=b=c", "tokens>=4k",
    "time<1us", "peak~1", "label~ring", "-time", "passes",
)  # fmt: skip
_SOUND: dict[str, Sequence[Any]] = {
    "tokens": (1024, "4k", [64, "1k"], "1M", ["2k", "8k", "32k"]),
    "implementations": (
        ["sdpa"], ["sdpa", "ring"], [{"ring": {"chunk": ["64", "1k"]}}],
        [{"block-sparse": {"sparsity": [0.5, 0.9], "pattern": "local-window"}}, "dense"],
    ),
    "device": ("cpu", "auto"), "world_size": (1, [1, 2]), "memory_budget": ("64MiB", "none"),
    "time_budget": ("20s", "none", 5), "repeats": (0, 1, 30), "rounds": (1, 3), "seed": (0, [1, 2]),
    "time_cap": ("500ms", 2), "threads": (1, "none"), "keep": ("all", "inputs", "nothing"),
    "allocator": ("default", "fresh"), "baseline": ("sdpa",), "dense_kernel": ("same", "sdpa"),
}  # fmt: skip
_SOUND_SHAPE: dict[str, Sequence[Any]] = {
    "batch": (1, [1, 2]), "heads": (8, [4, 8]), "kv_heads": (0, 4), "head_dim": (16, 64),
    "v_head_dim": (0, 32), "dtype": ("float32", "bf16"), "causal": (True, [False, True]),
    "mask": ("sliding-window:1k", "none", "documents:64"), "mode": ("forward", "train", "decode"),
    "new_tokens": (0, 1), "model": ("llama-3.1-8b", "gemma-2-9b"),
}  # fmt: skip


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that no key is sure to take."""
    kind = rng.randrange(10)
    if kind < 4 or depth > 2:
        return rng.choice(NUMBERS)
    if kind < 8:
        return rng.choice(WORDS)
    some = [nonsense(rng, depth + 1) for _ in range(rng.randrange(4))]
    return some if kind == 8 else {str(rng.choice(WORDS)): one for one in some}


def config_text(rng: random.Random) -> str:
    """Return a sweep file: about a third is sound."""
    share = rng.choice((0.0, 0.05, 0.3))
    data = _draw(rng, _SOUND, ("tokens", "implementations"), share)
    shape = _draw(rng, _SOUND_SHAPE, (), share)
    if shape:
        data["workload"] = shape
    items = list(data.items())
    rng.shuffle(items)
    text = _write(rng, dict(items))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        text = rng.choice(_MUTATIONS)(rng, text)
    return text


def _draw(
    rng: random.Random, sound: dict[str, Sequence[Any]], required: Sequence[str], share: float
) -> dict[str, Any]:
    """Return some keys with sound values, and a share of them with nonsense."""
    keys = [key for key in sound if key in required or rng.random() < 0.25]
    if rng.random() < share:
        keys.append(rng.choice((*sound, "tokns", "seq_len", "x" * 3000, "\x1b[2J", "", "<<")))
    return {key: nonsense(rng) if rng.random() < share else rng.choice(sound.get(key, (1,)))
            for key in keys}  # fmt: skip


def _write(rng: random.Random, data: dict[str, Any]) -> str:
    if rng.random() < 0.3:
        return json.dumps(data)
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=rng.random() < 0.5))


def _drop_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    del lines[rng.randrange(len(lines)) : rng.randrange(len(lines)) + 1]
    return "".join(lines)


def _repeat_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "".join(lines)


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    part = rng.choice((
        "!!python/object/apply:os.system ", "!secret ", "!!binary ", "!!set ", "!!int ", "!!null ",
        "&a ", "*a ", "[", "{", "}", ": ", "- ", "\t", "\n", "\r", "\x00", "\x1b", "\ufeff",
        "---\n",
        "%YAML 9.9\n", "? ", "| ", "> ", '"', "'", "#", "[" * 3000, "- " * 3000, "9" * 6000,
        str(rng.choice(WORDS)),
    ))  # fmt: skip
    return text[:at] + part + text[at:]


def _replace(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return (
        text[:at]
        + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x3000))))
        + text[at + 1 :]
    )


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _tag_value(rng: random.Random, text: str) -> str:
    tags = "!!python/name:os.system", "!x", "!!float", "!!bool", "!!null", "!!seq", "!!map"
    return text.replace(": ", f": {rng.choice(tags)} ", 1)


def _bomb(rng: random.Random, text: str) -> str:
    """Add aliases that repeat each other."""
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8]\n"]
    count = rng.choice((2, 8, 20))
    lines += (f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, count))
    return "".join(lines) + text


_MUTATIONS: tuple[Callable[[random.Random, str], str], ...] = (
    _drop_line, _repeat_line, _insert, _insert, _replace, _replace, _cut, _tag_value, _bomb,
)  # fmt: skip


def command_line(
    rng: random.Random, commands: dict[str, Sequence[Any]], files: Sequence[str]
) -> list[str]:
    """Return a command with some of its options. commands: Typer's parameters of each command."""
    name = rng.choice(list(commands))
    share = rng.choice((0.05, 0.3, 0.8))
    line = [name]
    for parameter in commands[name]:
        is_argument = parameter.param_type_name == "argument"
        if not is_argument and rng.random() > (0.8 if parameter.required else 0.25):
            continue
        if not is_argument:
            line.append(rng.choice(parameter.opts))
            if getattr(parameter, "is_flag", False):
                continue
        line.append(_argument(rng, parameter, files, share))
    if rng.random() < 0.05:
        line.insert(rng.randrange(len(line) + 1), str(rng.choice(WORDS)))
    return line


def _kind(parameter: Any) -> Any:
    """Return the type of a parameter; typer 0.27 has one of click instead."""
    if described := getattr(parameter, "type_descriptor", None):
        return described.annotation
    if choices := getattr(parameter.type, "choices", None):
        return Literal[tuple(choices)]
    of_click = {"integer": int, "integer range": int, "float": float, "path": Path}
    return of_click.get(parameter.type.name, str)


def _argument(rng: random.Random, parameter: Any, files: Sequence[str], share: float) -> str:
    if rng.random() < share:
        value = rng.choice((*NUMBERS, *WORDS))
        return str(value).replace("\0", "")
    kind = _kind(parameter)
    if get_origin(kind) is Literal:
        return str(rng.choice(get_args(kind)))
    if kind in (Path, list[Path]):
        return rng.choice(files)
    if kind in (int, float):
        return str(rng.choice((1, 2, 4, 8, 64)))
    values = {
        "impl": ("sdpa", "ring", "block-sparse", "dense"), "memory_budget": ("64MiB",),
        "memory": ("80GiB",), "time_budget": ("1s",), "ceiling": ("4k",), "target": ("64k",),
        "gpu": ("cpu", "h100"), "option": ("chunk=64", "sparsity=0.9"), "where": ("tokens>=4k",),
        "sort": ("time", "-tokens"), "columns": ("tokens,time",), "kind": ("summary", "all"),
        "formats": ("md,csv", "json", "terminal"), "model": ("llama-3.1-8b",),
        "world_sizes": ("1,2",), "mask": ("causal",), "baseline": ("sdpa",),
    }  # fmt: skip
    return str(rng.choice(values.get(parameter.name, ("sdpa", "1", "4k"))))
