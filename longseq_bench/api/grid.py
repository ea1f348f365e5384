"""`longseq_bench.sweep`: run a grid, from a file or from keywords."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from longseq_bench.api import machine
from longseq_bench.api.implementations import Implementations, read_implementations
from longseq_bench.api.progress import Reporter, make_reporter
from longseq_bench.api.results import Results
from longseq_bench.api.running import run_and_report
from longseq_bench.core.bounds import MAX_SEED
from longseq_bench.core.errors import ConfigError, UserError
from longseq_bench.core.model import Allocator, DeviceChoice, Keep, Mode
from longseq_bench.core.plain_text import quote

if TYPE_CHECKING:
    from longseq_bench.config.trials import ParsedConfig, SweepConfig
    from longseq_bench.core.catalogue import Catalogue
    from longseq_bench.launchers.base import Launcher
    from longseq_bench.search.estimate import SweepEstimate

T = TypeVar("T")
Axis: TypeAlias = "T | Sequence[T] | None"
"""One value, several (an axis of the grid), or the default."""

EARLY_S = 0.1
"""How long the launcher waits for the parser of a sweep file before it starts anyway."""

CALL = "sweep()"
"""The name of keywords in messages, where a file would have its path."""


def sweep(
    config: str | Path | None = None,
    *,
    tokens: Axis[int | str] = None,
    implementations: Implementations | None = None,
    model: Axis[str] = None,
    batch: Axis[int] = None,
    heads: Axis[int] = None,
    kv_heads: Axis[int] = None,
    head_dim: Axis[int] = None,
    v_head_dim: Axis[int] = None,
    dtype: Axis[str] = None,
    causal: Axis[bool] = None,
    mask: Axis[str] = None,
    mode: Axis[Mode] = None,
    new_tokens: Axis[int] = None,
    device: Axis[DeviceChoice] = None,
    world_size: Axis[int] = None,
    memory_budget: Axis[str | int] = None,
    time_budget: Axis[str | float] = None,
    repeats: Axis[int] = None,
    time_cap: Axis[str | float] = None,
    threads: Axis[int] = None,
    seed: Axis[int] = None,
    keep: Axis[Keep] = None,
    allocator: Axis[Allocator] = None,
    dense_kernel: Axis[str] = None,
    baseline: str | None = None,
    rounds: int | None = None,
    out: str | Path | None = None,
    progress: bool | Reporter = True,
) -> Results:
    """Run every combination of a grid, interleaved.

    The keywords have the names and meanings of the keys of a sweep file (docs: Configuration); a
    list is an axis of the grid. The options of an implementation may be lists too.

    Args:
        config: A sweep file; then only rounds, out and progress may be given.
        tokens: Sequence lengths over all ranks: 4096 or "4k".
        implementations: A name, a function, a pair (either, {option: value or values}), or a list
            of these.
        model: Model that sets heads, kv_heads, head_dim and dtype.
        batch: Sequences per batch.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Elements per head.
        v_head_dim: Elements per head of v and the output.
        dtype: Element type.
        causal: Mask keys after the query's position.
        mask: Keys that a query sees.
        mode: forward, train for forward and backward, or decode against a KV cache.
        new_tokens: Tokens that a step of decoding adds.
        device: auto, cpu or cuda.
        world_size: Ranks.
        memory_budget: Bytes that a rank may allocate: 2**28 or "256MiB"; default: 80 % of the free
            memory.
        time_budget: Limit of one pass: seconds, or "2min".
        repeats: Timed passes at most.
        time_cap: Time after which no further timed pass starts.
        threads: CPU threads per rank.
        seed: Seed of the random inputs.
        keep: Tensors kept by a pass: all, inputs or nothing.
        allocator: default, expandable (CUDA) or fresh (CPU).
        dense_kernel: Kernel of the dense attention with which a sparse one is compared.
        baseline: Implementation or label whose speed is 1.
        rounds: Repetitions of the grid.
        out: Folder for records, report and config. Finished trials in it are not run again.
            Default: results are in memory only.
        progress: True prints a line per trial on stderr, False prints nothing.

    Raises:
        UserError: a value that can't be used; the sentence names it.
        LauncherError: processes can't be started.
    """
    given = dict(locals())
    from longseq_bench.search import strategy

    folder, reporter = Path(out) if out else None, make_reporter(progress)
    text = _as_text(given, folder)
    with _open(config, text, folder, rounds, reporter) as (launcher, catalogue, loaded):
        heading = prepare(loaded, launcher, catalogue, reporter)
        trials = loaded.trials
        predictor = machine.make_predictor(launcher, catalogue, trials[0].device, folder)
        watcher = reporter.watch_sweep(trials, loaded.rounds, heading)
        schedule = strategy.sweep(trials, loaded.rounds, predictor)
        return run_and_report(
            schedule, launcher, folder, watcher, reporter, loaded.baseline, loaded.text
        )


def plan_sweep(
    config: str | Path, rounds: int | None, out: Path | None, reporter: Reporter
) -> tuple[SweepConfig, str, SweepEstimate]:
    """Return the trials of a sweep file, a sentence on devices, and what a run would take."""
    from longseq_bench.search.estimate import estimate_sweep
    from longseq_bench.search.prediction import RateModel

    with _open(config, None, out, rounds, reporter) as (launcher, catalogue, loaded):
        heading = prepare(loaded, launcher, catalogue, reporter)
        past = machine.past_records(Path("results"))
        devices = dict.fromkeys(trial.device for trial in loaded.trials)
        rates: dict[str, RateModel] = {
            d: RateModel(machine.hardware_here(catalogue, d), past) for d in devices
        }
        with reporter.waiting("dry runs …"):
            estimate = estimate_sweep(loaded.trials, loaded.rounds, launcher.dry_run, rates)
    return loaded, heading, estimate


def prepare(
    loaded: SweepConfig, launcher: Launcher, catalogue: Catalogue, reporter: Reporter
) -> str:
    """Check the trials and the baseline before anything runs; return a sentence on devices."""
    reporter.say(model.describe() for model in loaded.models)
    launcher.check(loaded.trials)
    _check_baseline(loaded)
    return machine.describe_devices(catalogue, loaded.trials)


@contextmanager
def _open(
    config: str | Path | None, text: str | None, out: Path | None, rounds: int | None,
    reporter: Reporter,
) -> Iterator[tuple[Launcher, Catalogue, SweepConfig]]:  # fmt: skip
    """Start the launcher while the sweep file is parsed, and make the trials.

    A mistake in a file of usual length is known before processes are started.
    """
    from longseq_bench.config.trials import make_sweep

    pool = ThreadPoolExecutor(1)
    parsing = cache(partial(pool.submit, _parse, config, text))

    def raise_early_mistake() -> None:
        with suppress(TimeoutError):
            parsing().result(EARLY_S)
        pool.shutdown(wait=False)

    with machine.open_launcher(reporter, raise_early_mistake) as (launcher, catalogue):
        loaded = make_sweep(
            parsing().result(), catalogue, machine.default_ranks(),
            lambda device, ranks: machine.default_memory(device, out, ranks),
        )  # fmt: skip
        yield launcher, catalogue, replace(loaded, rounds=rounds or loaded.rounds)


def _parse(config: str | Path | None, text: str | None) -> ParsedConfig:
    from longseq_bench.config.trials import load_config, parse_config

    return load_config(config) if config is not None else parse_config(text or "", CALL, False)


# ---- keywords as a sweep file ------------------------------------------------------------------


def _as_text(given: Mapping[str, Any], folder: Path | None) -> str | None:
    """Return the keywords as the text of a sweep file; None if there is a file.

    Raises UserError if there is neither, or both.
    """
    import yaml

    from longseq_bench.config.schema import WorkloadSection

    own = ("config", "out", "progress")
    keys = {name: value for name, value in given.items() if name not in own and value is not None}
    if given["config"] is not None:
        if extra := keys.keys() - {"rounds"}:
            raise UserError(f"sweep() has a config and {', '.join(sorted(extra))}; leave one out")
        return None
    for name in ("tokens", "implementations"):
        if name not in keys:
            raise ConfigError(f"{CALL}: {name} is missing; give it, or the path of a sweep file")
    chosen = read_implementations(keys.pop("implementations"), folder)
    plain = {name: _plain(value, name) for name, value in keys.items()}
    shape = {name: plain.pop(name) for name in list(plain) if name in WorkloadSection.model_fields}
    items = [
        {name: {option: _option_values(v, option) for option, v in options.items()}}
        if options
        else name
        for name, options in chosen
    ]
    data = {"tokens": plain.pop("tokens"), "implementations": items, "workload": shape, **plain}
    return yaml.safe_dump({k: v for k, v in data.items() if v != {}}, sort_keys=False)


def _plain(value: Any, name: str) -> Any:
    """Return a value for YAML: a list for any sequence, Python's numbers for those of numpy."""
    if isinstance(value, int) and abs(value) > MAX_SEED:
        raise ConfigError(f"{CALL}: {name} is {quote(value)}, more than any key takes")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        return [_plain(one, name) for one in items] if isinstance(items, list) else items
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{CALL}: {name} is {value!r}, not a number, a word or a list") from None


def _option_values(value: Any, name: str) -> Any:
    """Return an option's values. A tuple is one value: numbers that belong together."""
    if isinstance(value, tuple):
        return ",".join(str(_plain(one, name)) for one in value)
    if isinstance(value, list):
        return [_option_values(one, name) for one in value]
    return _plain(value, name)


# ---- baseline ----------------------------------------------------------------------------------


def _check_baseline(config: SweepConfig) -> None:
    """Raise UserError for a baseline that matches no label or several, before anything runs."""
    from longseq_bench.analysis.labels import find_baseline_label
    from longseq_bench.analysis.short_labels import find_short_labels

    if config.baseline:
        find_baseline_label(config.trials, find_short_labels(config.trials), config.baseline)
