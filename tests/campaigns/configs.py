"""Random configs and command lines, in this process: no traceback, no hang, one sentence.

    python -m tests.campaigns.configs --count 10000 --seed 1       # 10,000 configs, 5,000 commands

Every case has a number; `--seed S --only N` runs one again. Trials are not run: a launcher answers
by formulas. Exit code 1 where a case was found.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import typer
import yaml

from longseq_bench import cli
from longseq_bench.api import machine
from longseq_bench.config.trials import make_sweep
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError
from longseq_bench.launchers import engine, local
from tests import make
from tests.campaigns import limited
from tests.simulated import SimulatedLauncher

MAX_MESSAGE = 2_000


def make_launcher() -> SimulatedLauncher:
    """Return a launcher that answers by formulas, with the catalogue of this machine."""
    with local.LocalLauncher() as real:
        known, launcher = real.catalogue(), SimulatedLauncher()
    launcher.catalogue = lambda own=(): known  # type: ignore[method-assign]
    return launcher


@contextlib.contextmanager
def every_command_uses(launcher: SimulatedLauncher) -> Iterator[None]:
    """Let every command in the block use a launcher that runs nothing, in a folder of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        patch.object(machine, "make_launcher", lambda: launcher),
        patch.object(local, "LocalLauncher", lambda *_: launcher),
        patch.object(engine, "HostsLauncher", lambda *_: launcher),
    ):
        yield


def examine(case: Callable[[], str | None]) -> str | None:
    """Run a case; return what is wrong with it, or None."""
    try:
        with limited():
            return case()
    except BaseException:
        return f"traceback: {traceback.format_exc(limit=-4)}"


# ---- configs -----------------------------------------------------------------------------------


def try_config(text: str, known: Catalogue) -> str | None:
    """Load a config and list its trials; return what is wrong, or None."""
    from longseq_bench.config.loader import parse_config

    try:
        make_sweep(parse_config(text, "c.yaml"), known)
    except UserError as error:
        message = str(error)
        is_sentence = message.strip() and "\n" not in message and len(message) <= MAX_MESSAGE
        return None if is_sentence else f"message is not one readable sentence: {message[:200]!r}"
    Path("c.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    return try_command(["sweep", "c.yaml", "--dry-run"], "utf-8")


# ---- command lines -----------------------------------------------------------------------------


def try_command(line: list[str], encoding: str) -> str | None:
    """Run a command line with both streams in an encoding; return what is wrong, or None."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace") for _ in range(2)
    )
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        code = cli.run(line)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        sys.stdout, sys.stderr = before
    printed = (out.buffer.getvalue() + err.buffer.getvalue()).decode(encoding)
    if "Traceback" in printed:
        return f"traceback in the output: {printed[-500:]!r}"
    if control := {c for c in printed if ord(c) < 32} - {"\n", "\r", "\t"}:
        return f"control characters in the output: {control}"
    if code not in (0, 2, 3, 4, 5):
        return f"exit code {code}"
    return None


def parameters() -> dict[str, Any]:
    """Return click's parameters of every command that runs no process of its own."""
    group: Any = typer.main.get_command(cli.app)
    skipped = {"hosts", "help"}
    return {
        name: [p for p in command.params if p.name not in skipped]
        for name, command in group.commands.items()
    }


def random_command(rng: random.Random, known: dict[str, Any]) -> tuple[list[str], str]:
    """Return a command line, and the encoding of its output. A sweep only lists its trials."""
    line = command_line(rng, known, ("records", "sound.yaml", "missing", "broken.yaml"))
    if "sweep" in line:
        line.append("--dry-run")
    if line[:1] == ["launch"]:
        line += ["--", rng.choice(("maxlen", "scaling", "swep")), "--impl", "sdpa"]
    return line, rng.choice(("utf-8", "ascii", "latin-1"))


def write_files() -> None:
    """Write the files that command lines name: records, a sound config and a broken one."""
    make.write_records("records", [make.record(), make.step(4096), make.step(8192, "oom")])
    Path("sound.yaml").write_text("tokens: [1k, 2k]\nimplementations: [sdpa]\n")
    Path("broken.yaml").write_text("tokens: [1k\n")


# ---- random input --------------------------------------------------------------------------------

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


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    part = rng.choice((
        "!!python/object/apply:os.system ", "!secret ", "!!binary ", "!!set ", "!!int ", "!!null ",
        "&a ", "*a ", "[", "{", "}", ": ", "- ", "\t", "\n", "\r", "\x00", "\x1b", "\ufeff",
        "---\n",
        "%YAML 9.9\n", "? ", "| ", "> ", '"', "'", "#", "9" * 6000,
        str(rng.choice(WORDS)),
    ))  # fmt: skip
    return text[:at] + part + text[at:]


def _change(rng: random.Random, text: str) -> str:
    """Cut the text, or write another character, or one part twice."""
    first, last = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    middle = rng.choice(("", chr(rng.randrange(32, 0x3000)), text[first:last] * 2))
    return text[:first] + middle + text[rng.choice((first + 1, last)) :]


_MUTATIONS: tuple[Callable[[random.Random, str], str], ...] = (_insert, _change, _change)


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


def _argument(rng: random.Random, parameter: Any, files: Sequence[str], share: float) -> str:
    if rng.random() < share:
        value = rng.choice((*NUMBERS, *WORDS))
        return str(value).replace("\0", "")
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", str)  # typer 0.27
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


# ---- the campaign ------------------------------------------------------------------------------


def main() -> int:
    """Run `count` configs and half as many command lines; print each that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="configs; half as many commands")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--only", type=int, help="number of one case")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    faulthandler.enable()
    launcher, findings = make_launcher(), 0
    known = launcher.catalogue()
    with every_command_uses(launcher):
        write_files()
        options = parameters()
        every = range(given.count + given.count // 2)
        for number in every if given.only is None else [given.only]:
            rng = random.Random(f"{given.seed}/{number}")
            if number < given.count:
                shown = config_text(rng)
                wrong = examine(lambda text=shown: try_config(text, known))  # type: ignore[misc]
            else:
                line, encoding = random_command(rng, options)
                shown = f"{encoding}: {line}"
                wrong = examine(lambda a=line, e=encoding: try_command(a, e))  # type: ignore[misc]
            if wrong:
                findings += 1
                print(f"--- case {number}\n{shown[:600]}\n--> {wrong}", flush=True)
    print(f"{len(every):,} cases: {findings:,} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
