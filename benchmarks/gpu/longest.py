"""Step longest: `longseq maxlen` for every trial of configs/h200-maxlen.yaml.

The file is a sweep file, because that declares all other axes. Its tokens are not used.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.items import (
    ROOT,
    Figures,
    Item,
    ItemFailed,
    Result,
    Session,
    Step,
    Table,
    or_dash,
    slug,
)
from benchmarks.gpu.processes import run_with_records
from longseq_bench.analysis.labels import option_text
from longseq_bench.analysis.searches import search_rows
from longseq_bench.config.loader import load_config, parse_config
from longseq_bench.config.trials import make_sweep
from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.model import Trial
from longseq_bench.core.units import format_bytes, format_share

CONFIG = ROOT / "configs" / "h200-maxlen.yaml"
TOY = """\
device: cpu
memory_budget: 8MiB
time_budget: 5s
workload: {heads: 4, head_dim: 64, dtype: float32}
tokens: [1]
implementations:
  - sdpa
"""


def list_items(session: Session) -> Sequence[Item]:
    """Return an item per search."""
    catalogue = session.launcher.catalogue()
    config = parse_config(TOY, "toy sizes") if session.dry_run else load_config(CONFIG)
    trials = make_sweep(config, catalogue).trials
    searches = list(dict.fromkeys(trial.at(1).model_dump_json() for trial in trials))
    return [
        Item(name(trial, catalogue), partial(search, session, trial))
        for trial in map(Trial.model_validate_json, searches)
    ]


def name(trial: Trial, catalogue: Catalogue) -> str:
    """Return the name of a search: implementation, changed options, mode, head_dim, budget."""
    changed = changed_options(trial, catalogue)
    budget = format_bytes(trial.memory_budget or 0).replace(" ", "")
    mode, head_dim = trial.workload.mode, trial.workload.head_dim
    return " ".join([trial.implementation, *changed, mode, f"d{head_dim}", budget])


def changed_options(trial: Trial, catalogue: Catalogue) -> list[str]:
    """Return the options that differ from their defaults, NAME=VALUE."""
    defaults = catalogue.options(trial.implementation, {})
    return [
        f"{option}={option_text(value)}"
        for option, value in trial.options.items()
        if value != defaults[option]
    ]


def search(session: Session, trial: Trial) -> Figures:
    """Run one search; raises Unfinished at the deadline if at least one run has ended."""
    catalogue = session.launcher.catalogue()
    folder = f"longest/{slug(name(trial, catalogue))}"
    records, failed = run_with_records(session, arguments(trial, catalogue), folder, "runs")
    (row,) = search_rows(records)
    figures = {
        "max_tokens": row.max_tokens, "first_failure": row.first_failure,
        "predicted_tokens": row.predicted_tokens, "fraction_of_floor": row.fraction_of_floor,
        "limited_by": row.limited_by, "reason": row.failure_reason, "peak_bytes": row.peak_bytes,
        "runs": row.runs, "search_s": row.wall_s,
    }  # fmt: skip
    if failed or not row.max_tokens:
        raise ItemFailed(f"limited by {row.limited_by}: {row.failure_reason}", figures)
    return figures


def arguments(trial: Trial, catalogue: Catalogue) -> list[str]:
    """Return the command line that searches for the longest length of a trial."""
    w = trial.workload
    words = ["maxlen", "--impl", trial.implementation]
    for option in changed_options(trial, catalogue):
        words += ["-o", option]
    words += ["--device", trial.device, "--dtype", w.dtype, "--mode", w.mode]
    words += ["--heads", str(w.heads), "--kv-heads", str(w.kv_heads)]
    words += ["--head-dim", str(w.head_dim), "--batch", str(w.batch)]
    words += ["--keep", trial.keep, "--allocator", trial.allocator, "--seed", str(trial.seed)]
    if w.causal:
        words.append("--causal")
    if trial.memory_budget:
        words += ["--memory-budget", str(trial.memory_budget)]
    if trial.time_budget:
        words += ["--time-budget", f"{trial.time_budget}s"]
    return words


def make_table(results: Sequence[Result]) -> Table:
    """Return a row per search."""
    heading = ("search", "status", "longest", "predicted", "of floor", "limited by", "peak", "runs")
    rows: list[tuple[object, ...]] = [heading]
    for one in results:
        figures = one.figures
        rows.append((
            one.item, one.status, or_dash(figures.get("max_tokens"), "{:,}".format),
            or_dash(figures.get("predicted_tokens"), "{:,}".format),
            or_dash(figures.get("fraction_of_floor"), format_share),
            figures.get("limited_by") or "–", or_dash(figures.get("peak_bytes"), format_bytes),
            figures.get("runs", "–"),
        ))  # fmt: skip
    return rows


STEP = Step("longest", list_items, make_table)
