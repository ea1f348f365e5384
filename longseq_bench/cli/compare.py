"""`longseq compare A B`: what became slower, larger, shorter or broken."""

from __future__ import annotations

from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longseq_bench.comparison.compare import Comparison
    from longseq_bench.core.model import Record

RESULTS = Path("results")
MOST_NAMED = 8
"""Commits in a sentence."""


def compare(
    a: Annotated[str, typer.Argument(help="Results folder or file; PATH@COMMIT; @COMMIT.")],
    b: Annotated[str, typer.Argument(help="The same, compared with A.")],
    formats: Annotated[
        str | None, typer.Option("--format", help="Write files too, with commas: md,json,html.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of these files. Default: this one.")
    ] = None,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit code 4 where anything is worse by so much: 5%.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="Chance of any false alarm in the whole comparison.")
    ] = "5%",
    least: Annotated[str, typer.Option(help="The least difference in time that is told.")] = "1%",
    across: Annotated[bool, typer.Option("--across", help="Compare unlike machines too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Compare two sets of results, trial by trial: times, memory, longest lengths.

    A trial is slower or faster only where its processes differ by more than their noise, tested
    for all trials together; three rounds a side are the least that shows much.

    Trials that both have, but on unlike machines, are named and not compared; where there are such,
    --fail-on is refused (exit code 2). --across compares them.

    PATH@COMMIT takes the records of one commit below a folder, @COMMIT those below results/.
    """
    from longseq_bench.cli import REGRESSED
    from longseq_bench.cli.stdout import ends
    from longseq_bench.comparison.compare import check_gate, regressions
    from longseq_bench.comparison.compare import compare as beside
    from longseq_bench.core.errors import UserError
    from longseq_bench.core.units import parse_share

    wanted = [name.strip() for name in (formats or "").split(",") if name.strip()]
    if out is not None and not wanted:
        raise UserError("--out: name what to write there; --format md,json,html")
    sure, told = parse_share(level, "--level"), parse_share(least, "--least")
    gate = parse_share(fail_on, "--fail-on") if fail_on is not None else None
    (ours, notes), (theirs, others) = _read(a), _read(b)
    found = beside(ours, theirs, (a, b), sure, told, across)
    notes = notes + others
    if gate is not None:
        check_gate(found)
    code = REGRESSED if gate is not None and regressions(found, gate) else 0
    with ends(code):
        _show(found, gate, as_json, notes, wanted, out or Path())
    return code


def _show(
    found: Comparison, gate: float | None, as_json: bool, notes: list[str], wanted: list[str],
    out: Path,
) -> None:  # fmt: skip
    from longseq_bench.cli.compared import comparison_json, comparison_tables
    from longseq_bench.cli.session import console, print_json
    from longseq_bench.cli.tables import plain
    from longseq_bench.comparison.document import comparison
    from longseq_bench.reports import write_documents

    screen = console(stderr=True)
    for note in notes:
        screen.print(plain(note, "yellow"))
    paths = write_documents([comparison(found, gate)], out, wanted) if wanted else []
    if as_json:
        print_json(comparison_json(found, gate))
    else:
        console().print(comparison_tables(found, gate))
    for path in paths:
        screen.print(plain(f"wrote {path}"))


def _read(text: str) -> tuple[list[Record], list[str]]:
    """Records that an argument means, with notes. A path that is there is meant before an @ in it.

    Raises StoreError where there are none, UserError where a commit is none of theirs, or several.
    """
    from longseq_bench.cli.session import read_results

    path, at, commit = text.rpartition("@")
    if not at or Path(text).exists():
        return read_results([Path(text)])
    records, notes = read_results([Path(path) if path else RESULTS])
    return of_commit(records, commit, path or str(RESULTS)), notes


def of_commit(records: list[Record], commit: str, place: str) -> list[Record]:
    """Those measured at a commit: its whole name, or a part that begins it and no other.

    Raises UserError that names the commits there are.
    """
    from longseq_bench.core.errors import UserError

    there = list(dict.fromkeys(c for r in records if (c := r.environment.commit)))
    whole = [c for c in there if c == commit]
    meant = whole or [c for c in there if commit and (c.startswith(commit) or _longer(commit, c))]
    named = ", ".join(there[:MOST_NAMED]) + (", …" if len(there) > MOST_NAMED else "")
    if not meant:
        known = f"there: {named}" if there else "none of its records has one"
        raise UserError(f"{place} has no record of commit {commit!r}; {known}")
    if len(meant) > 1:
        raise UserError(f"commit {commit!r} in {place} may be {' or '.join(meant)}; write it out")
    return [r for r in records if r.environment.commit == meant[0]]


def _longer(given: str, kept: str) -> bool:
    """A commit's whole name, of which records keep the first digits."""
    return len(given) > len(kept) and given.startswith(kept) and set(given) <= set(hexdigits)
