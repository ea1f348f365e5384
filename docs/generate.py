"""Fill in the generated parts of the documentation while MkDocs builds the site.

A page holds a line `<!-- generated: NAME -->`, and one for readers of the repository that says
where to look. The function of that name in GENERATORS returns the Markdown that replaces both.
Nothing that is generated is committed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"^<!-- generated: ([a-z-]+) -->\n\*.*\*$", re.MULTILINE)
ADDED_TO_HELP = re.compile(r"\s*\[([^\[\]]*)\]\s*$")
TYPE_NAMES = {"str": "TEXT", "list[str]": "TEXT", "int": "N", "int range": "N", "path": "PATH"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the markers of a page; called by MkDocs for each page."""
    if page.file.src_uri.startswith("published/"):
        page.meta["hide"] = ["toc"]  # its headings are as long as a line
    return MARKER.sub(lambda found: GENERATORS[found[1]](), markdown)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the published reports and their charts to the site, below `published/`."""
    from mkdocs.structure.files import File

    folder = ROOT / "results" / "xeon2" / "reports"
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = f"published/{path.relative_to(folder).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def format_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; `|` and line breaks inside cells are escaped."""
    lines = [heading, ["---"] * len(heading), *rows]
    escaped = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


# ---- commands ----------------------------------------------------------------------------------


def generate_commands() -> str:
    """Return one section per command: help text, usage, arguments and options."""
    import typer

    from longseq_bench.cli import app

    group = typer.main.get_command(app)
    parent = typer.Context(group, info_name="longseq")
    sections = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=name, parent=parent)
        usage = command.get_usage(context).removeprefix("Usage: ")
        arguments = [_parameter_row(p, context) for p in command.params if _is_argument(p)]
        options = [_parameter_row(p, context) for p in command.params if not _is_argument(p)]
        sections += [f"## longseq {name}", _format_help(command.help), f"```text\n{usage}\n```"]
        if arguments:
            sections.append(format_table(("argument", "meaning", "default"), arguments))
        sections.append(format_table(("option", "meaning", "default"), options))
    return "\n\n".join(sections)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _parameter_row(parameter: Any, context: Any) -> tuple[str, str, str]:
    """Return (name, meaning, default); typer writes defaults and limits behind the help text."""
    name, text = parameter.get_help_record(context)
    default = "required" if parameter.required else ""
    if added := ADDED_TO_HELP.search(text):
        text = text[: added.start()]
        limits = []
        for part in added[1].split("; "):
            if part.startswith("default: "):
                default = f"`{part.removeprefix('default: ')}`"
            elif part != "required":
                limits.append(part)
        text += f" ({', '.join(limits)})" if limits else ""
    if stated := re.search(r"\s*Default: ([^.]*(?:\.\d[^.]*)*)\.$", text):
        text, default = text[: stated.start()], default or stated[1]
    name = re.sub(r"<([^<>]*)>", lambda m: TYPE_NAMES.get(m[1], f"{m[1]}"), name)
    return f"`{name}`", text, default


def _format_help(text: str | None) -> str:
    """Return a help text as Markdown: a paragraph that starts with `#` is code."""
    paragraphs = (text or "").replace("\b\n", "").split("\n\n")
    return "\n\n".join(
        f"```yaml\n{paragraph}\n```" if paragraph.startswith("#") else paragraph
        for paragraph in paragraphs
    )


# ---- configuration -----------------------------------------------------------------------------


def generate_configuration() -> str:
    """Return tables of every key of a sweep file: values, unit, default, meaning."""
    from longseq_bench.config.schema import SweepFile
    from longseq_bench.core import units
    from longseq_bench.core.settings import TOKENS, TRIAL, WORKLOAD

    own = {
        "implementations": "name or mapping, *list*",
        "workload": "mapping",
        "baseline": "text",
        "rounds": f"whole number from 1 to {units.MAX_ROUNDS:,}",
    }
    described = [(f"`{k}`", v, SweepFile.model_fields[k].description) for k, v in own.items()]
    head = ("Key", "Value", "Description")
    keys = [*_setting_rows({"tokens": TOKENS}), *described, *_setting_rows(TRIAL)]
    return "\n\n".join(
        [
            "## Keys of the file",
            format_table(head, keys),
            "## Keys of `workload`",
            format_table(head, _setting_rows(WORKLOAD)),
            "A key with *list* takes one value or a list of values; a list is an axis of the grid. "
            "Every other key takes one value.",
        ]
    )


def _setting_rows(settings: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(f"`{n}`", f"{_describe_values(s)}, *list*", s.text) for n, s in settings.items()]


def _describe_values(setting: Any) -> str:
    """Describe the values that a setting accepts."""
    from longseq_bench.config.schema import UNITS

    if setting.unit:
        _, example, maximum = UNITS[setting.unit]
        values = f"number up to {maximum:,}, text such as `{example}`"
    elif setting.high:
        values = f"whole number from {setting.low} to {setting.high:,}"
    elif setting.type in (bool, str):
        return "`true`, `false`" if setting.type is bool else "text"
    else:
        return ", ".join(f"`{word}`" for word in get_args(setting.type))
    return values if setting.default is not None or setting.is_required else f"{values}, `none`"


# ---- fields ------------------------------------------------------------------------------------

UNITS = {
    "text": "text",
    "tokens": "tokens",
    "bytes": "B",
    "seconds": "s",
    "flop_rate": "FLOP/s",
    "byte_rate": "B/s",
    "share": "0 to 1",
    "count": "number",
    "ratio": "ratio",
    "error": "relative error",
    "flag": "true, false",
    "list": "list",
    "options": "mapping",
}


def generate_fields() -> str:
    """Return tables of the fields of every kind of row, from their declarations."""
    from longseq_bench.analysis.row import Row, fields_of
    from longseq_bench.analysis.searches import SearchRow
    from longseq_bench.analysis.sweep_row import SweepRow

    common = fields_of(Row)
    sections = []
    for title, kind in (
        ("Every row", Row),
        ("Rows of a sweep", SweepRow),
        ("Rows of a search for the longest length", SearchRow),
    ):
        fields = [f for name, f in fields_of(kind).items() if kind is Row or name not in common]
        rows = [(f"`{f.name}`", f.heading, UNITS[f.kind], f.help, f.merge) for f in fields]
        table = format_table(("field", "heading", "unit", "meaning", "merged"), rows)
        sections += [f"## {title}", table]
    return "\n\n".join(sections)


# ---- implementations ---------------------------------------------------------------------------


def generate_implementations() -> str:
    """Return one section per implementation: what it computes and its options."""
    listed = subprocess.run(
        [sys.executable, "-m", "longseq_bench", "list", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    sections = []
    for name, entry in json.loads(listed.stdout)["implementations"].items():
        if entry["source"] != "built-in":
            continue
        sections += [f"### {name}", entry["summary"][:1].upper() + entry["summary"][1:] + "."]
        if entry["options"]:
            rows = [_option_row(option) for option in entry["options"]]
            sections.append(format_table(("option", "meaning", "values", "default"), rows))
    return "\n\n".join(sections)


def _option_row(option: dict[str, Any]) -> tuple[str, str, str, str]:
    kinds = {
        "int": f"a whole number from {option['least']} up",
        "float": "a number from 0 up",
        "bool": "true or false",
        "ints": "whole numbers with commas",
        "str": "a word",
    }
    values = ", ".join(f"`{c}`" for c in option["choices"]) or kinds[option["kind"]]
    if option["optional"]:
        values += ", or `none`"
    default = option["default"]
    if isinstance(default, list):
        default = ",".join(map(str, default))
    elif default is None or isinstance(default, bool):
        default = {None: "none", True: "true", False: "false"}[default]
    return f"`{option['name']}`", option["help"], values, f"`{default}`"


# ---- published results -------------------------------------------------------------------------


def generate_published() -> str:
    """Return folder, machine and question of published records, from results/README.md."""
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    table = text.partition("\n## Published\n")[2]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("|")]
    return format_table(rows[0], rows[2:])


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": generate_commands,
    "configuration": generate_configuration,
    "fields": generate_fields,
    "implementations": generate_implementations,
    "published": generate_published,
}
