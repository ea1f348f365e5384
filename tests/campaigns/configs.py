"""Random configs and command lines, in this process: no traceback, no hang, no nonsense accepted.

    python -m tests.campaigns.configs --count 10000 --seed 1       # 10,000 configs, 5,000 commands

Every case has a number; `--seed S --only N` runs one again. Trials are not run: a launcher answers
by formulas. Exit code 1 where a case was found.
"""

import argparse
import contextlib
import faulthandler
import io
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from typing_extensions import override

from longseq_bench import cli
from longseq_bench.api import machine
from longseq_bench.config.trials import SweepConfig, make_sweep
from longseq_bench.core import units
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Trial
from longseq_bench.launchers import base, engine, local
from longseq_bench.launchers.simulated import SimulatedLauncher
from tests import make
from tests.campaigns.random_input import command_line, config_text

LIMIT_S = 10
MAX_MESSAGE = 2_000
SHOWN = 20
NUMERIC = (
    "tokens", "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "new_tokens", "world_size",
    "repeats", "rounds", "seed", "threads", "time_budget", "memory_budget", "time_cap",
)  # fmt: skip


class Hang(BaseException):
    """A case used LIMIT_S of processor time."""


class FormulaLauncher(SimulatedLauncher):
    """A launcher that answers by formulas, with a given catalogue; one serves all commands."""

    def __init__(self, known: Catalogue) -> None:
        super().__init__()
        self.known = known

    @override
    def catalogue(self, own: Sequence[str] = ()) -> Catalogue:
        return self.known


def real_catalogue() -> Catalogue:
    """Return the implementations and devices of this machine."""
    with local.LocalLauncher() as launcher:
        return launcher.catalogue()


@contextlib.contextmanager
def every_command_uses(launcher: FormulaLauncher) -> Iterator[None]:
    """Let every command in the block use a launcher that runs nothing, in a folder of its own."""
    patched: list[tuple[Any, str, Any]] = [
        (machine, "make_launcher", lambda: launcher),
        (base, "create_launcher", lambda *_: launcher),
        (local, "LocalLauncher", lambda *_: launcher),
        (engine, "HostsLauncher", lambda *_: launcher),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in patched]
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for place, name, value in patched:
            setattr(place, name, value)
        try:
            yield
        finally:
            os.chdir(here)
            for place, name, value in before:
                setattr(place, name, value)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise Hang in a block that takes too long."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def examine(case: Callable[[], str | None]) -> str | None:
    """Run a case; return what is wrong with it, or None."""
    start = time.monotonic()
    try:
        with limited():
            found = case()
    except Hang:
        return f"hang: more than {LIMIT_S} s of processor time"
    except BaseException:
        return f"traceback: {traceback.format_exc(limit=-4)}"
    if time.monotonic() - start > LIMIT_S:
        return f"hang: {time.monotonic() - start:.0f} s"
    return found


# ---- configs -----------------------------------------------------------------------------------


def try_config(text: str, known: Catalogue) -> str | None:
    """Load a config and list its trials; return what is wrong, or None."""
    from longseq_bench.config.loader import parse_config

    try:
        found = make_sweep(parse_config(text, "c.yaml"), known)
    except UserError as error:
        return judge_message(str(error))
    return judge_accepted(found, text) or _dry_run(text)


def _dry_run(text: str) -> str | None:
    Path("c.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    return try_command(["sweep", "c.yaml", "--dry-run"], "utf-8")


def judge_message(message: str) -> str | None:
    """Return what is wrong with the text of an error: it must be one readable sentence."""
    if "\n" in message or not message.strip():
        return f"message is not one line: {message!r}"
    if len(message) > MAX_MESSAGE:
        return f"message of {len(message):,} characters: {message[:200]!r}"
    return None


def judge_accepted(found: SweepConfig, text: str) -> str | None:
    """Return what should have been refused in an accepted config; None if all bounds hold."""
    if not 1 <= found.rounds <= units.MAX_ROUNDS:
        return f"accepted rounds {found.rounds}"
    if broken := next((one for t in found.trials[:500] if (one := _broken_bound(t))), None):
        return f"accepted {broken}"
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, KeyError, TypeError) as error:
        return f"accepted what is no plain YAML: {error}"
    except ValueError:  # a date that is none, a number of too many digits
        return None
    for part in (data, data.get("workload") or {}):
        for key in NUMERIC:
            values = part.get(key)
            if any(isinstance(v, bool) for v in (values if isinstance(values, list) else [values])):
                return f"accepted {key}: {values}"
    return None


def _broken_bound(trial: Trial) -> str | None:
    w = trial.workload
    limits = {
        "tokens": (w.seq_len, 1, units.MAX_TOKENS), "batch": (w.batch, 1, units.MAX_BATCH),
        "heads": (w.heads, 1, units.MAX_HEADS), "kv_heads": (w.kv_heads, 1, w.heads),
        "head_dim": (w.head_dim, 1, units.MAX_HEAD_DIM), "seed": (trial.seed, 0, units.MAX_SEED),
        "v_head_dim": (w.v_head_dim, 1, units.MAX_HEAD_DIM),
        "new_tokens": (w.new_tokens, 0, min(w.seq_len, units.MAX_NEW_TOKENS)),
        "world_size": (trial.world_size, 1, units.MAX_RANKS),
        "threads": (trial.threads or 1, 1, units.MAX_THREADS),
        "repeats": (trial.repeats, 0, units.MAX_REPEATS),
        "memory_budget": (trial.memory_budget or 1, 1, units.MAX_BYTES),
        "time_budget": (trial.time_budget or 1.0, 1e-323, units.MAX_SECONDS),
        "time_cap": (trial.time_cap, 1e-323, units.MAX_SECONDS),
    }  # fmt: skip
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            return f"{name} {value}"
    for name, option in trial.options.items():
        parts = option if isinstance(option, tuple) else (option,)
        for part in parts:
            if isinstance(part, int | float) and not (math.isfinite(part) and 0 <= part <= 2**40):
                return f"option {name}={part}"
    return None if w.heads % w.kv_heads == 0 else f"kv_heads {w.kv_heads} of {w.heads}"


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
    skipped = {"hosts", "nnodes", "help"}
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


# ---- the campaign ------------------------------------------------------------------------------


def run_campaign(
    count: int, seed: int, launcher: FormulaLauncher, only: int | None = None
) -> list[tuple[int, str, str]]:
    """Run `count` configs and half as many command lines; return (number, case, what is wrong)."""
    findings, known = [], launcher.known
    with every_command_uses(launcher):
        write_files()
        options = parameters()
        for number in range(count + count // 2) if only is None else [only]:
            rng = random.Random(f"{seed}/{number}")
            if number < count:
                text = config_text(rng)
                shown, wrong = text, examine(lambda t=text: try_config(t, known))  # type: ignore[misc]
            else:
                line, encoding = random_command(rng, options)
                shown = f"{encoding}: {line}"
                wrong = examine(lambda a=line, e=encoding: try_command(a, e))  # type: ignore[misc]
            if wrong:
                findings.append((number, shown, wrong))
    return findings


def main() -> int:
    """Run the campaign that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="configs; half as many commands")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--only", type=int, help="number of one case")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    faulthandler.enable()
    launcher = FormulaLauncher(real_catalogue())
    findings = run_campaign(arguments.count, arguments.seed, launcher, arguments.only)
    for number, shown, wrong in findings[:SHOWN]:
        print(f"--- case {number}\n{shown[:600]}\n--> {wrong}")
    print(
        f"{arguments.count:,} configs, {arguments.count // 2:,} command lines: "
        f"{len(findings):,} findings"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
