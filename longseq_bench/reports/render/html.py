"""A document as one page of HTML, with interactive charts and tables, that needs no network.

Everything is in the file: style, our script, and Vega if there are charts. The browser runs only
scripts whose hash the page lists, so that no name in a record can become a script.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, get_args

from longseq_bench.core.model import Status
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import MISSING, Chart, Column, Document, Section, Table
from longseq_bench.reports.render.column_encoding import MISSING_CODE, Packed, pack
from longseq_bench.reports.render.csv import slug
from longseq_bench.reports.render.json import finite

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

PLAIN_ROWS = 200
"""Rows of a table that are written as HTML; the others are data, shown on request."""

MOST_PLAIN, FEW = 4_000, 5
"""Rows that a page writes as HTML for all tables, and per table after that number."""

MOST_TABLES = 200
"""Maximum number of workloads in a section."""

MOST_ROWS, MOST_BYTES = 120_000, 12_000_000
"""Maximum data of a page: rows of one table, and bytes of all tables."""

LONG = 30
"""Length of a text (letters) above which its column is wider, to avoid one word per line."""

STATUSES = frozenset(get_args(Status))
POLL_MS = 2000

_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@FORMATS.register("html")
def render(document: Document) -> Files:
    """`<stem>.html`."""
    return {f"{document.stem}.html": page(document)}


def page(document: Document, live: bool = False, running: str = "") -> str:
    """The whole page.

    live: the page is served, and requests `state` at its own address for {"version", "running",
    "said"}. If the version changes, it loads the new page and keeps the reader's settings.
    running: the first status of a live page.
    """
    from markupsafe import Markup

    drawn = live or any(section.charts for section in document.sections)
    scripts = [_asset("page.js"), *([drawing()] if drawn else [])]
    text = _template().render(
        document=document,
        sections=list(_sections(document)),
        labels=_labels(document),
        live=live,
        running=running,
        poll=POLL_MS,
        policy=_policy(scripts, live),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        missing=MISSING,
    )
    return text.rstrip() + "\n"


def prepare() -> None:
    """Start to build the scripts that every page needs, in the background."""
    Thread(target=drawing).start()


def drawing() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script (900 kB, takes a second to make)."""
    with _MAKING:
        return _bundle()


_MAKING = Lock()


@cache
def _bundle() -> str:
    import vl_convert

    return _inline(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _inline(script: str) -> str:
    """Return a script that can't end its element early and is parsed exactly as it was hashed."""
    lines = script.replace("\r\n", "\n").replace("\r", "\n")
    return lines.replace("</script", r"<\/script").replace("<!--", r"<\!--")


@cache
def _asset(name: str) -> str:
    return (
        files("longseq_bench").joinpath(f"reports/render/page/{name}").read_text(encoding="utf-8")
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html.j2"))


def _policy(scripts: Sequence[str], live: bool) -> str:
    """Return the page's content security policy: its own scripts, charts, and its server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


@cache
def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _data(value: Any) -> Markup:
    """Return JSON that is safe in an element of a page."""
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_ESCAPED))


def _labels(document: Document) -> list[str]:
    """Return all implementations of the tables, then the series of charts without one."""
    found: dict[str, None] = {}
    for section in document.sections:
        for table in section.tables:
            where = [i for i, column in enumerate(table.columns) if column.name == _LABEL]
            found |= dict.fromkeys(str(row[i]) for i in where[:1] for row in table.rows)
    labels: dict[str, None] = {}
    series = [s for section in document.sections for c in section.charts for s in c.series]
    for name in sorted([*found, *dict.fromkeys(series)], key=len):
        # "ring" covers "ring on 2 ranks" and "ring, 2k tokens", as in page.js
        starts = (re.split(r" on \d|, ", name, maxsplit=1)[0], name.rpartition(" on ")[0])
        if not any(start in labels for start in starts):
            labels[name] = None
    order = [*found, *series]
    return sorted(labels, key=order.index)


_LABEL = "Implementation"


@dataclass(frozen=True)
class _Shown:
    """A section for the template.

    name: its anchor in the page.  more: number of tables that the page leaves out.
    """

    name: str
    section: Section
    figures: list[_Figure]
    grids: list[_Grid]
    more: int
    code: str


@dataclass(frozen=True)
class _Figure:
    """key: the same in the next page of a run, to keep the reader's settings."""

    key: str
    chart: Chart
    height: int
    legend: list[tuple[str, str, str]]
    logs: list[tuple[str, str, bool]]
    notes: list[str]
    data: Markup


@dataclass(frozen=True)
class _Grid:
    """rows: written as HTML, of cells (text, code, class).  data: all rows, if there are more."""

    key: str
    title: str
    named: bool
    columns: list[tuple[str, str]]
    label: int
    rows: list[list[tuple[str, int, str]]]
    count: int
    held: int
    data: Markup | None


def _sections(document: Document) -> Iterator[_Shown]:
    names: dict[str, int] = {}
    left, plain = MOST_BYTES, MOST_PLAIN
    for section in document.sections:
        name = _once(slug(section.title) or "section", names)
        figures = [_figure(_once(f"{name}/{slug(c.title)}", names), c) for c in section.charts]
        grids = []
        for table in section.tables[:MOST_TABLES]:
            key = _once(f"{name}/{slug(table.title)}", names)
            grid = _grid(key, section, table, left, min(PLAIN_ROWS, max(plain, FEW)))
            left -= len(grid.data or "")
            plain -= len(grid.rows)
            grids.append(grid)
        more = len(section.tables) - len(grids)
        yield _Shown(name, section, figures, grids, more, "\n".join(section.code))


def _once(name: str, names: dict[str, int]) -> str:
    """Return the name, with a number if it is already used."""
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}-{names[name]}"


# ---- charts ------------------------------------------------------------------------------------


def _figure(key: str, chart: Chart) -> _Figure:
    from longseq_bench.reports.render.charts import axes, colours, notes, spec

    drawn, looks, either = spec(chart, page=True), colours(chart), axes(chart)
    named = {"x": chart.x, "y": chart.y}
    logs = {name: either[name]["log"] == _axis_of(drawn, name) for name in either}
    return _Figure(
        key,
        chart,
        # the size that Vega adds for the axis and its title
        int(drawn["height"]) + 48,
        [(s, colour, " ".join(map(str, dash))) for s, (colour, dash) in looks.items()],
        [(name, named[name].name, on) for name, on in logs.items()],
        list(notes(chart)),
        _data(finite({"spec": drawn, "axes": either, "series": list(looks)})),
    )


def _axis_of(drawn: dict[str, Any], name: str) -> dict[str, Any]:
    encoding = drawn["layer"][0]["encoding"][name]
    return {part: encoding[part] for part in ("scale", "axis")}


# ---- tables ------------------------------------------------------------------------------------


def _grid(key: str, section: Section, table: Table, left: int, plain: int) -> _Grid:
    """left: bytes that the data of this table may take.  plain: rows that it may write out."""
    held = table.rows[:MOST_ROWS]
    columns = _packed(table, held)
    data = None
    if len(held) > plain:
        columns, data = _fitting(table, held, columns, left, plain)
    count = len(columns[0].codes) if columns else 0
    both = zip(table.columns, columns, strict=True)
    classes = [_class(column, packed.texts) for column, packed in both]
    return _Grid(
        key,
        table.title or section.title,
        bool(table.title),
        [(column.name, look) for column, look in zip(table.columns, classes, strict=True)],
        _label_column(table.columns),
        [list(_cells(columns, classes, i)) for i in range(min(count, plain))],
        len(table.rows),
        count,
        data,
    )


def _packed(table: Table, rows: Sequence[tuple[Any, ...]]) -> list[Packed]:
    by_column = zip(*rows, strict=True) if rows else [() for _ in table.columns]
    both = zip(by_column, table.columns, strict=True)
    return [pack(cells, column.kind) for cells, column in both]


def _fitting(
    table: Table, rows: Sequence[tuple[Any, ...]], columns: list[Packed], left: int, plain: int
) -> tuple[list[Packed], Markup | None]:
    """Return as data the first rows that fit; nothing if the page shows all rows."""
    while True:
        data = _data([{"dict": c.texts, "codes": c.codes} for c in columns])
        if len(data) <= left:
            return columns, data
        kept = int(len(rows) * 0.95 * left / len(data))
        rows = rows[: max(kept, plain)]
        columns = _packed(table, rows)
        if len(rows) == plain:
            return columns, None


def _class(column: Column, texts: Sequence[str]) -> str:
    if column.kind != "text":
        return "num"
    if column.name == "Status":
        return "status"
    return "long" if any(len(text) > LONG for text in texts) else ""


def _label_column(columns: Sequence[Column]) -> int:
    """Return the index of the column "Implementation", else of the first text column."""
    for i, column in enumerate(columns):
        if column.name == _LABEL:
            return i
    return 0 if columns and columns[0].kind == "text" else -1


def _cells(
    columns: Sequence[Packed], classes: Sequence[str], i: int
) -> Iterator[tuple[str, int, str]]:
    for column, look in zip(columns, classes, strict=True):
        code = column.codes[i]
        text = MISSING if code == MISSING_CODE else column.texts[code]
        word = text.partition(" ")[0]
        state = f" is-{word}" if look == "status" and word in STATUSES else ""
        yield text, code, look + state
