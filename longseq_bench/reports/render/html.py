"""A document as one page of HTML, with interactive charts and tables, that needs no network.

The file has the style, the page's script, and Vega if there are charts. The browser runs only
scripts whose hash the page lists, so that a name in a record can't become a script.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from importlib.resources import files
from subprocess import DEVNULL, PIPE, run
from typing import TYPE_CHECKING, Any

from longseq_bench.analysis.frames import finite
from longseq_bench.core.errors import UserError, keep_lines
from longseq_bench.reports.base import FORMATS, Files
from longseq_bench.reports.document import (
    Cell,
    Chart,
    Document,
    Section,
    Spread,
    Table,
    format_cell,
)
from longseq_bench.reports.render.csv import slug

if TYPE_CHECKING:
    from jinja2 import Template

MAX_ROWS = 1_000
"""Rows of a table at most; the report in CSV has all."""

AXIS = 48
"""Height of an axis (px)."""

LONG = 30
"""Length of a text (letters) above which its column is wider, to avoid one word per line."""

Shown = dict[str, Any]
"""Values for the template by name."""


@FORMATS.register("html")
def render(document: Document) -> Files:
    """`<stem>.html`."""
    return {f"{document.stem}.html": page(document)}


def page(document: Document) -> str:
    """Return the whole page."""
    from markupsafe import Markup

    has_charts = any(section.charts for section in document.sections)
    in_order = sorted(document.sections, key=lambda section: section.technical)
    vega = [start_vega()] if has_charts else []
    sections = list(_sections(in_order))
    scripts = [_asset("page.js"), *(script.result() for script in vega)]
    text = _template().render(
        document=document,
        sections=sections,
        policy=_policy(scripts),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
    )
    return text.rstrip() + "\n"


@cache
def start_vega() -> Future[str]:
    """Start to build Vega, Vega-Lite and Vega-Embed as one script (900 kB, in about a second)."""
    return ThreadPoolExecutor(1).submit(_build_vega)


def _build_vega() -> str:
    """Return the script. A process of its own builds it: it takes 100 MB, and may end."""
    command = [sys.executable, "-P", "-c", _BUILD]
    script = run(command, stdout=PIPE, stderr=DEVNULL, encoding="utf-8", check=False).stdout
    if not script:
        raise UserError("the script of charts can't be built: vl-convert-python does not work here")
    # the text must not end its element early, and must be parsed exactly as it was hashed
    return script.replace("</script", r"<\/script").replace("<!--", r"<\!--")


_BUILD = """
import sys, vl_convert
sys.stdout.reconfigure(encoding="utf-8")
sys.stdout.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
"""


@cache
def _asset(name: str) -> str:
    path = files("longseq_bench").joinpath(f"reports/render/page/{name}")
    return path.read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_control,
    )
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


def _sections(sections: Sequence[Section]) -> Iterator[Shown]:
    """Yield the sections for the template; `name` is the anchor in the page."""
    names: dict[str, int] = {}
    colours: dict[str, str] = {}
    for section in sections:
        name = slug(section.title) or "section"
        names[name] = names.get(name, 0) + 1
        yield {
            "name": name if names[name] == 1 else f"{name}-{names[name]}",
            "section": section,
            "figures": [_figure(chart, colours) for chart in section.charts],
            "grids": [_grid(section, table) for table in section.tables],
            "code": "\n".join(section.code),
        }


def _figure(chart: Chart, known: dict[str, str]) -> Shown:
    """Return a chart for the template.  known: colours of earlier charts."""
    from jinja2.utils import htmlsafe_json_dumps

    from longseq_bench.reports.render import _draw

    spec = _draw.spec(chart, _draw.colours(chart, known))
    del spec["title"]  # the page has it above the chart
    compact: Shown = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return {
        "chart": chart,
        "alt": f"{chart.title}. {chart.description}",
        "height": spec["height"] + AXIS * (chart.shape != "bars"),
        "notes": list(_draw.notes(chart)),
        "data": htmlsafe_json_dumps(finite(spec), **compact),
    }


def _grid(section: Section, table: Table) -> Shown:
    """Return a table for the template, with its first rows; cells are (text, class, value)."""
    columns = list(zip(*table.rows[:MAX_ROWS], strict=True)) or [()] * len(table.columns)
    classes, shown = [], []
    for column, cells in zip(table.columns, columns, strict=True):
        texts = [format_cell(cell, column.kind) for cell in cells]
        is_long = any(len(text) > LONG for text in texts)
        classes.append("num" if column.kind != "text" else "long" if is_long else "")
        shown.append([(text, classes[-1], _value(c)) for text, c in zip(texts, cells, strict=True)])
    return {
        "title": table.title or section.title,
        "named": bool(table.title),
        "columns": list(zip(table.columns, classes, strict=True)),
        "rows": list(zip(*shown, strict=True)),
        "count": len(table.rows),
    }


def _value(cell: Cell) -> float | None:
    """Return the number by which the page sorts a cell; None for those sorted by their text."""
    if isinstance(cell, Spread):
        return cell.value
    return cell if isinstance(cell, int | float) and cell == cell else None
