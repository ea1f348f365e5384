"""A document as one page of HTML, with interactive charts and tables, that needs no network.

The file has the style, the page's script, and Vega if there are charts. The browser runs only
scripts whose hash the page lists, so that a name in a record can't become a script.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from longseq_bench.core.errors import UserError, keep_lines
from longseq_bench.core.model import Status
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import (
    Cell,
    Chart,
    Column,
    Document,
    Section,
    Spread,
    Table,
    alternative_text,
    format_cell,
)
from longseq_bench.reports.render.csv import slug
from longseq_bench.reports.render.json import finite

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

MAX_ROWS, MAX_ALL_ROWS, MIN_ROWS = 500, 5_000, 10
"""Rows of a table on the page; of all tables together, after which each has the last number. The
report in CSV has every row."""

MAX_ENTRIES = 8
"""Maximum number of entries of the navigation."""

NAMES, CELL, AXIS = 170, 48, 48
"""Widths of the names of a heat map's rows and, at least, of a cell; height of an axis (px)."""

LONG = 30
"""Length of a text (letters) above which its column is wider, to avoid one word per line."""

STATUSES = frozenset(get_args(Status))

Shown = dict[str, Any]
"""Values for the template by name."""

_ESCAPED = re.compile("[<>&\u2028\u2029\x7f-\x9f]")


@FORMATS.register("html")
def render(document: Document) -> Files:
    """`<stem>.html`."""
    return {f"{document.stem}.html": page(document)}


def page(document: Document) -> str:
    """Return the whole page."""
    from markupsafe import Markup

    has_charts = any(section.charts for section in document.sections)
    in_order = sorted(document.sections, key=lambda section: section.technical)
    scripts = [_asset("page.js"), *([vega_script()] if has_charts else [])]
    text = _template().render(
        document=document,
        entries=_navigation(list(_sections(in_order))),
        labels=_labels(document),
        policy=_policy(scripts),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        slug=slug,
    )
    return text.rstrip() + "\n"


@cache
def prepare() -> Popen[str]:
    """Start to build the script of all charts, in a process of its own: it takes 100 MB."""
    return Popen(
        [sys.executable, "-P", "-c", _BUILD], stdout=PIPE, stderr=DEVNULL, encoding="utf-8",
        start_new_session=True,  # Ctrl-C ends a run, which then writes its page
    )  # fmt: skip


_BUILD = """
import sys, vl_convert
sys.stdout.reconfigure(encoding="utf-8")
sys.stdout.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
"""


@cache
def vega_script() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script (900 kB, built in about a second)."""
    script, _ = prepare().communicate()
    if not script:
        raise UserError("the script of charts can't be built: vl-convert-python does not work here")
    # the text must not end its element early, and must be parsed exactly as it was hashed
    return script.replace("</script", r"<\/script").replace("<!--", r"<\!--")


@cache
def _asset(name: str) -> str:
    return (
        files("longseq_bench").joinpath(f"reports/render/page/{name}").read_text(encoding="utf-8")
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=_without_control,
    )  # fmt: skip
    return environment.from_string(_asset("page.html.j2"))


def _without_control(value: Any) -> Any:
    """Return a text from outside without control characters; scripts and data stay as they are."""
    return keep_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _policy(scripts: Sequence[str]) -> str:
    """Return the page's content security policy: its own scripts and charts, no network."""
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _data(value: Any) -> Markup:
    """Return JSON that is safe in an element of a page."""
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = keep_lines(text)  # JSON escapes control characters, not the marks of direction
    return Markup(_ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _labels(document: Document) -> list[str]:
    """Return the implementations of all tables, then the chart series that they do not cover."""
    found: dict[str, None] = {}
    for section in document.sections:
        for table in section.tables:
            where = [i for i, column in enumerate(table.columns) if column.name == _LABEL]
            found |= dict.fromkeys(str(row[i]) for i in where[:1] for row in table.rows)
    labels: dict[str, None] = {}
    series = [s for section in document.sections for c in section.charts for s in c.series]
    for name in sorted([*found, *dict.fromkeys(series)], key=len):
        # "ring" covers "ring ×2" and "ring, 2k tokens", as in page.js
        starts = (re.split(r" ×\d|, ", name, maxsplit=1)[0], name.rpartition(" ×")[0])
        if not any(start in labels for start in starts):
            labels[name] = None
    order = [*found, *series]
    return sorted(labels, key=order.index)


_LABEL = "Implementation"


class Entry(NamedTuple):
    """An entry of the navigation, the anchor to which it leads, and the sections of the entry."""

    title: str
    anchor: str
    sections: Sequence[Shown]


def _navigation(sections: Sequence[Shown]) -> list[Entry]:
    """Return the entries of the navigation.

    The last result, which is the failures if there are any, and the first technical section, the
    commands, have entries of their own.
    """
    results = [one for one in sections if not one["section"].technical]
    again, measured = sections[len(results) :][:1], sections[len(results) :][1:]
    room = MAX_ENTRIES - bool(again) - bool(measured)
    own = len(results) if len(results) <= room else room - 2
    more, last = results[own:-1], results[own:][-1:]
    entries = [_entry(one) for one in results[:own]]
    # the anchor of the heading above its sections, so that a reader sees all of their titles
    entries += [Entry("More", f"more-{more[0]['name']}", more)] if more else []
    entries += [_entry(one) for one in (*last, *again)]
    if measured:
        entries.append(Entry("How it was measured", measured[0]["name"], measured))
    return entries


def _entry(section: Shown) -> Entry:
    return Entry(section["section"].title, section["name"], [section])


def _sections(sections: Sequence[Section]) -> Iterator[Shown]:
    """Yield the sections for the template.

    name: the anchor in the page.
    """
    names: dict[str, int] = {}
    colours: dict[str, str] = {}
    left = MAX_ALL_ROWS
    for section in sections:
        name = _unique(slug(section.title) or "section", names)
        figures = [
            _figure(_unique(f"{name}/{slug(c.title)}", names), c, colours) for c in section.charts
        ]
        grids = []
        for table in section.tables:
            key = _unique(f"{name}/{slug(table.title)}", names)
            grids.append(_grid(key, section, table, max(MIN_ROWS, min(MAX_ROWS, left))))
            left -= len(grids[-1]["rows"])
        yield {
            "name": name,
            "section": section,
            "figures": figures,
            "grids": grids,
            "code": "\n".join(section.code),
        }


def _unique(name: str, names: dict[str, int]) -> str:
    """Return the name, with a number if it is already used."""
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}-{names[name]}"


# ---- charts ------------------------------------------------------------------------------------


def _figure(key: str, chart: Chart, known: dict[str, str]) -> Shown:
    """Return a chart for the template.

    key: equal in later pages of a run, to keep settings.  known: colours of earlier charts.
    """
    from longseq_bench.reports.render import _draw
    from longseq_bench.reports.render._theme import colours

    styles = colours(chart, known)
    vega_spec = _draw.spec(chart, styles)
    del vega_spec["title"]  # the page has it above the chart
    axes = {
        name: vega_spec["encoding"][name] for name in vega_spec.get("usermeta", {}).get("ticks", ())
    }
    columns = {p.x for p in chart.points} | {m.x for m in chart.failures}
    return {
        "key": key,
        "chart": chart,
        "alt": alternative_text(chart),
        "height": vega_spec["height"] + AXIS,
        # the texts of a heat map's cells do not overlap
        "width": NAMES + CELL * len(columns) if chart.shape == "heat" else 0,
        "legend": [] if chart.has_rows else list(styles.items()),
        "logs": [
            (name, axis["axis"]["title"], axis["scale"]["type"] == "log")
            for name, axis in axes.items()
        ],
        "notes": list(_draw.notes(chart)),
        "data": _data(finite({"spec": vega_spec, "series": _draw.printable(list(styles))})),
    }


# ---- tables ------------------------------------------------------------------------------------


def _grid(key: str, section: Section, table: Table, max_rows: int) -> Shown:
    """Return a table for the template.

    "rows": the first rows, of cells (text, class, number by which it sorts or "").
    "label": index of the column with names of implementations; -1: none.
    """
    kept = table.rows[:max_rows]
    classes = [_class(column, [row[i] for row in kept]) for i, column in enumerate(table.columns)]
    headings = [column.name for column in table.columns]
    first_text = 0 if table.columns and table.columns[0].kind == "text" else -1
    pairs = list(zip(table.columns, classes, strict=True))
    return {
        "key": key,
        "title": table.title or section.title,
        "named": bool(table.title),
        "columns": pairs,
        "label": headings.index(_LABEL) if _LABEL in headings else first_text,
        "rows": [[_cell(*both) for both in zip(row, pairs, strict=True)] for row in kept],
        "count": len(table.rows),
    }


def _class(column: Column, cells: Sequence[Cell]) -> str:
    if column.kind != "text":
        return "num"
    if column.name == "Status":
        return "status"
    return "long" if any(len(str(cell)) > LONG for cell in cells) else ""


def _cell(cell: Cell, column: tuple[Column, str]) -> tuple[str, str, float | str]:
    text, css_class = format_cell(cell, column[0].kind), column[1]
    value = cell.value if isinstance(cell, Spread) else cell
    number = value if isinstance(value, int | float) and value == value else ""
    word = text.partition(" ")[0]
    is_status = css_class == "status" and word in STATUSES
    return text, f"status is-{word}" if is_status else css_class, number
