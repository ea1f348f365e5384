"""The HTML page, as a file and in a browser: content, interaction, requests."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.reports import documents
from longseq_bench.reports.document import (
    Axis,
    Chart,
    Column,
    Document,
    Guide,
    KeyFigure,
    Mark,
    Point,
    Section,
    Spread,
    Table,
)
from longseq_bench.reports.render import csv as csv_format
from longseq_bench.reports.render import html as html_format
from longseq_bench.reports.render.column_encoding import pack
from longseq_bench.reports.render.html import page
from longseq_bench.store import load

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "<script>window.ran = 1</script>", "</script><script>window.ran = 1</script>",
    '"><img src=x onerror="window.ran = 1">', "a|b", "two\nlines", "it's \"said\" `so`",
    "{{ 7 * 7 }}", "</style></title><b>", "<!-- <script>", "' + (window.ran = 1) + '", "&lt;&amp;",
    "a\u2028b",
]  # fmt: skip


# ---- documents made by hand ----------------------------------------------------------------------


THREE = ("sdpa", "ring", "dense")


def chart(names: tuple[str, ...] = THREE, text: str = "Time by tokens.") -> Chart:
    points = tuple(
        Point(name, n, 1e-9 * n * n * (i + 1), 0.9e-9 * n * n * (i + 1), 1.1e-9 * n * n * (i + 1))
        for i, name in enumerate(names)
        for n in (1024, 2048, 4096)
    )
    return Chart(
        "time", text, text, Axis("Tokens", "tokens", True), Axis("Time", "seconds", True), points,
        (Mark(names[-1], 8192, "oom in forward"),),
        (Guide("ideal", (Point("", 1024, 1e-3), Point("", 4096, 16e-3))),),
    )  # fmt: skip


def bars(names: tuple[str, ...] = ("sdpa", "ring")) -> Chart:
    points = tuple(Point(name, 0, 1000.0 * (i + 1)) for i, name in enumerate(names))
    x, y = Axis("", "text"), Axis("Max tokens", "tokens")
    return Chart("maxima", "Longest", "The longest.", x, y, points, shape="bars")


COLUMNS = (Column("Implementation"), Column("Status"), Column("Time", "seconds"))
ROWS = (
    ("sdpa", "ok", Spread(0.5, 0.4, 0.6)),
    ("ring", "oom", None),
    ("dense", "ok", 12.0),
    ("hilbert 16", "wrong", 0.0009),
    ("hilbert 4", "timeout", 90.0),
    ("dilated", "ok", 2.0),
)
SORTED = ["hilbert 16", "sdpa", "dilated", "dense", "hilbert 4", "ring"]
"""Ordered by time; rows without a time are last."""


def small() -> Document:
    lines = ["longseq sweep x.yaml", "<longseq>"]
    return Document(
        "summary", "A report", ["Said first."],
        [
            Section("Summary", points=["One.", "Two."]),
            Section("Lengths", ["Words."], [], [Table("By time", COLUMNS, ROWS)], lines,
                    [chart(), bars()]),
        ],
    )  # fmt: skip


def long(n: int = 5000) -> Document:
    columns = (Column("Implementation"), Column("Tokens", "tokens"), Column("Time", "seconds"))
    times = [None if i % 100 == 3 else (i * 37 % n) / 10 for i in range(n)]
    rows = [(f"way {i % 7}", 1 + i, time) for i, time in enumerate(times)]
    rows[-1] = (HOSTILE[2], n, 0.5)
    return Document(
        "summary", "Long", [], [Section("All", tables=[Table("Rows", columns, tuple(rows))])]
    )


@cache
def small_page() -> str:
    return page(small())


@cache
def long_page() -> str:
    return page(long())


def hostile(text: str) -> Section:
    table = Table(text, (Column("Implementation"), Column(text)), ((text, text), ("b", None)))
    charts = [chart((text, "other"), text), bars((text,))]
    return Section(text, [text], [text], [table], [text], charts)


@cache
def hostile_page() -> str:
    return page(Document("x", HOSTILE[0], [HOSTILE[1]], [hostile(text) for text in HOSTILE]))


# ---- the file ------------------------------------------------------------------------------------


class Parts(HTMLParser):
    """Text by element, and the attributes of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open, data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def policy(self) -> dict[str, list[str]]:
        (meta,) = [a for a in self.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        parts = [part.split() for part in (meta["content"] or "").split(";")]
        return {name: values for name, *values in parts}


def test_the_policy_allows_only_scripts_with_the_listed_hashes() -> None:
    text = page(small())
    parts = Parts(text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    policy = parts.policy()
    assert policy["script-src"] == [f"'sha256-{one}'" for one in hashes]
    assert policy["default-src"] == ["'none'"]
    assert policy["connect-src"] == ["'none'"]


def test_data_can_not_end_its_element() -> None:
    written = hostile_page()
    datas = re.findall(r'<script type="application/json">(.*?)</script>', written, re.DOTALL)
    assert not re.search("[<>&\u2028\u2029]", "".join(datas))
    assert [json.loads(data)["series"] for data in datas[::3]] == [[t, "other"] for t in HOSTILE]
    assert len(re.findall(r"<script\b", written.split("<body>")[1])) == 4 * len(HOSTILE) + 1
    assert Parts(written).of("img") == []


def test_the_page_is_readable_without_scripts() -> None:
    parts = Parts(small_page())
    words = "".join(text for tag, text in parts.texts if tag not in ("script", "style"))
    for sentence in ("Said first.", "One.", "Words.", "By time", "hilbert 16", "500 ms ±20 %"):
        assert sentence in words
    assert "Time by tokens. The chart needs JavaScript" in words
    assert [a.get("class") for a in parts.of("td")][1::3] == [
        f"status is-{row[1]}" for row in ROWS
    ]  # fmt: skip


def test_a_chart_explains_its_marks_and_what_it_leaves_out() -> None:
    names = tuple(f"way {i}" for i in range(40))
    words = page(Document("x", "x", [], [Section("x", charts=[chart(names)])]))
    assert "× at the top: a length that failed; see Failures." in words
    assert "Dashed grey: computed, not measured." in words
    assert "Not drawn, to keep the chart readable: 8 of 40 series." in words


def test_a_heading_explains_itself_and_the_page_shows_that_it_does() -> None:
    table = Table("", (Column("a", help="A < b."), Column("c")), (("1", "2"),))
    written = page(Document("summary", "", [], [Section("Part", tables=[table])]))
    assert '<button type="button" title="A &lt; b.">a</button>' in written
    assert '<button type="button">c</button>' in written


def test_columns_of_first_screens_are_explained() -> None:
    (document,) = documents(load(ROOT / "results/xeon2/parallel").records, ["devices"])
    explained = {c.name for c in document.sections[0].tables[0].columns if c.help}
    assert explained >= {"At least", "Verdict", "Efficiency", "Peak on one", "Exposed"}


def test_values_sort_before_text_and_text_by_its_numbers() -> None:
    cells = ["b 10", 3.0, None, "b 9", Spread(2.0, 1.0, 3.0), "a", 3, float("nan"), "b 9", 12]
    packed = pack(cells, "count")
    assert packed.texts == ["2 ±50 %", "3", "12", "a", "b 9", "b 10", "not a number"]
    assert packed.codes == [5, 1, -1, 4, 0, 3, 1, 6, 4, 2]


def test_a_long_table_has_first_rows_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    written = page(long())
    assert written.count("<tr>") == 201
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', written)
    label, tokens, seconds = json.loads(data)
    assert label["dict"] == [HOSTILE[2], *(f"way {i}" for i in range(7))]
    assert tokens["codes"] == list(range(5000))
    assert seconds["codes"][3] == -1
    monkeypatch.setattr(html_format, "MAX_ROWS", 700)
    assert "Here are the first 700 of 5,000 rows; the report in CSV has all." in page(long())


def test_too_much_data_is_cut_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_format, "MAX_BYTES", 30_000)
    written = page(long())
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', written)
    row_count = len(json.loads(data)[0]["codes"])
    assert len(data) <= 30_000
    assert 1000 < row_count < 5000
    assert f"Here are the first {row_count:,} of 5,000 rows" in written
    monkeypatch.setattr(html_format, "MAX_BYTES", 500)
    assert "Here are the first 200 of 5,000 rows" in page(long())


def test_tables_beyond_the_data_of_a_page_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_format, "MAX_BYTES", 500)
    monkeypatch.setattr(html_format, "MIN_TABLES", 3)
    monkeypatch.setattr(html_format, "MAX_PLAIN_ROWS", 20)
    table = long(30).sections[0].tables[0]
    written = page(Document("x", "x", [], [Section("x", tables=[table] * 8)]))
    datas = re.findall(r'<script type="application/json">(.*?)</script>', written)
    assert [len(json.loads(data)[0]["codes"]) for data in datas] == [20, 10, 10]
    assert written.count("<tr>") == 3 + 20 + 10 + 10
    assert "Here are the first 10 of 30 rows" in written
    assert "There are 5 more tables; the report in CSV has them." in written


# ---- the browser ---------------------------------------------------------------------------------

FLAGS = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
    "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests; CI requires it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    browser, control = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not control:
        missing = "chromium or chromedriver is not installed: the page was not opened"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(control))
    yield started
    started.quit()


class Reader:
    """A reader of a page: `js` runs JavaScript, clicks are real mouse events."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        driver.get("about:blank")
        driver.get_log("performance"), driver.get_log("browser")
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.set_scheme("light")

    def open(self, text: str, link: str = "", unfold: bool = True) -> Reader:
        """Load a page, with a link into it, and open all its sections."""
        path = self.folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.driver.get("about:blank")  # else a link alone would not load the page
        self.driver.get(path.as_uri() + link)
        return self.unfold() if unfold else self

    def unfold(self) -> Reader:
        self.run("document.querySelectorAll('.fold').forEach((fold) => (fold.open = true))")
        return self

    def opened(self) -> list[str]:
        """Anchors of the sections that are open."""
        sections = "[...document.querySelectorAll('section:has(> .fold[open])')]"
        return list(self.js(f"{sections}.map((section) => section.id)"))

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def js(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def click(self, query: str, at: int = 0) -> None:
        self.run("document.querySelectorAll(arguments[0])[arguments[1]].click()", query, at)

    def mouse(self, event: str, query: str, **given: Any) -> None:
        """A real mouse event at the centre of the first element that matches the query."""
        there = "const there = document.querySelector(arguments[0]);"
        self.run(f"{there} there.scrollIntoView({{block: 'center', behavior: 'instant'}})", query)
        middle = "return [b.x + b.width / 2, b.y + b.height / 2]"
        x, y = self.run(f"{there} const b = there.getBoundingClientRect(); {middle}", query)
        values = {"type": event, "x": x, "y": y, **given}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", values)

    def type(self, text: str, at: int = 0) -> None:
        from selenium.webdriver.common.by import By

        field = self.driver.find_elements(By.CSS_SELECTOR, ".tools input")[at]
        field.clear()
        field.send_keys(text)

    def wait_for(self, expression: str) -> None:
        self.until(lambda: self.js(expression), expression)

    def until(self, true: Callable[[], Any], what: str) -> None:
        for _ in range(500):
            if true():
                return
            time.sleep(0.02)
        raise AssertionError(f"never came: {what}")

    def drawn(self, charts: int = 1) -> Reader:
        """Scroll to every chart and wait until it is drawn."""
        for i in range(charts):
            self.run("document.querySelectorAll('figure')[arguments[0]].scrollIntoView()", i)
            self.wait_for(f"!!document.querySelectorAll('figure')[{i}].querySelector('svg.marks')")
        return self

    def set_scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def column(self, j: int = 0, grid: int = 0) -> list[str]:
        rows = f"[...document.querySelectorAll('.grid')[{grid}].querySelectorAll('tbody tr')]"
        return list(self.js(f"{rows}.map((row) => row.cells[{j}].textContent)"))

    def count(self, grid: int = 0) -> str:
        return str(self.js(f"document.querySelectorAll('.grid .count')[{grid}].textContent"))

    def marks(self, kind: str = "line mark", figure: int = 0) -> int:
        """The series drawn in a chart, without guides."""
        query = f"path[aria-roledescription='{kind}']:not([stroke='#888888'])"
        return int(
            self.js(
                f"document.querySelectorAll('figure')[{figure}].querySelectorAll(\"{query}\").length"
            )
        )

    def requested(self) -> set[str]:
        """Schemes and hosts of all addresses requested since the last call."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return {re.sub(r"^([a-z]+:(//[^/]*)?).*", r"\1", one["request"]["url"]) for one in sent}

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def reader(driver: Any, tmp_path: Path) -> Reader:
    return Reader(driver, tmp_path)


@cache
def quickstart() -> str:
    folder = ROOT / "results" / "xeon2" / "quickstart"
    (document,) = documents(load(folder).records)
    return page(document)


def test_a_real_report_needs_no_network_and_has_no_errors(reader: Reader) -> None:
    reader.open(quickstart())
    assert reader.js("document.querySelectorAll('.grid').length") >= 5
    assert "sdpa" in reader.column()
    assert reader.requested() == {"file://"}
    assert reader.errors() == []


def test_long_names_of_bars_are_complete_and_failures_have_crosses(reader: Reader) -> None:
    long = "ring order=zigzag queries=partitioned transport=p2p wire_dtype=null"
    names = f"{long} on 2 ranks", f"{long} on 4 ranks"
    drawn = replace(bars(names), failures=(Mark("slow", 0, "no length passed"),))
    reader.open(page(Document("x", "x", [], [Section("x", charts=[drawn])]))).drawn()
    texts = "[...document.querySelectorAll('.role-axis-label text')].map((t) => {})"
    lines = "[...t.querySelectorAll('tspan')].map((s) => s.textContent).join(' ')"
    values = reader.js(texts.format(f"t.querySelector('tspan') ? {lines} : t.textContent"))
    assert values[-3:] == [*names, "slow"]
    assert reader.marks("bar") == 2
    assert reader.js("document.querySelectorAll('path[aria-roledescription=point]').length") == 1
    assert reader.errors() == []


def test_a_chart_is_drawn_when_it_scrolls_near(reader: Reader) -> None:
    far = Document("x", "x", ["Words. " * 9000], [Section("x", charts=[chart()])])
    reader.open(page(far))
    assert reader.marks() == 0
    reader.run("dispatchEvent(new Event('beforeprint'))")
    reader.wait_for("!!document.querySelector('svg.marks')")
    assert reader.marks() == 3


def test_the_legend_hides_and_shows_a_series(reader: Reader) -> None:
    reader.open(small_page()).drawn()
    pressed = "document.querySelector('.legend .pick').getAttribute('aria-pressed')"
    for left, state in ((2, "false"), (3, "true")):
        reader.click(".legend .pick")
        reader.until(lambda n=left: reader.marks() == n, f"{left} lines")  # type: ignore[misc]
        assert reader.js(pressed) == state


def test_hiding_an_implementation_affects_every_chart_and_table(reader: Reader) -> None:
    reader.open(small_page()).drawn(2)
    reader.click(".chooser .pick")
    reader.until(lambda: reader.marks() == 2, "two lines")
    reader.until(lambda: reader.marks("bar", 1) == 1, "one bar")
    assert reader.column() == [row[0] for row in ROWS if row[0] != "sdpa"]
    assert reader.count() == "5 of 6 rows"
    reader.click(".chooser [name=none]")
    assert reader.column() == []
    reader.click(".chooser [name=all]")
    assert len(reader.column()) == 6


def test_the_reader_can_make_an_axis_logarithmic(reader: Reader) -> None:
    reader.open(small_page()).drawn()
    y = "document.querySelectorAll('.role-axis-label')[1].textContent"
    before = reader.js(y)
    reader.click(".settings input", 1)
    reader.wait_for(f"{y} !== {json.dumps(before)}")
    assert reader.marks() == 3
    reader.click(".settings input", 1)
    reader.wait_for(f"{y} === {json.dumps(before)}")
    assert reader.js("document.querySelectorAll('.settings').length") == 1  # bars have none


def test_a_table_sorts_by_value_and_back(reader: Reader) -> None:
    reader.open(small_page())
    as_made = [row[0] for row in ROWS]
    orders = [SORTED, [*SORTED[-2::-1], SORTED[-1]], as_made]
    for order, aria in zip(orders, ("ascending", "descending", None), strict=True):
        reader.click("th button", 2)
        assert reader.column() == order
        assert reader.js("document.querySelectorAll('th')[2].getAttribute('aria-sort')") == aria


def test_a_filter_requires_every_word_and_counts_rows(reader: Reader) -> None:
    reader.open(small_page())
    assert reader.count() == "6 rows"
    reader.type("HILB  time")
    assert reader.column() == ["hilbert 4"]
    assert reader.count() == "1 of 6 rows"
    reader.click("th button", 2)
    assert reader.column() == ["hilbert 4"]
    reader.type("nothing such")
    assert reader.count() == "0 of 6 rows"


def test_a_long_table_sorts_and_filters_all_its_rows(reader: Reader) -> None:
    reader.open(long_page())
    assert len(reader.column()) == 10
    assert reader.count() == "5,000 rows, the first 10 here"
    assert reader.js(MORE) == "Show 1,000 of 5,000 rows"
    reader.click(".more button")
    assert reader.column(1)[-1] == "1,000"
    reader.click("th button", 2)
    reader.click("th button", 2)
    assert reader.column(2)[:2] == ["8 min 20 s", "8 min 20 s"]
    assert len(reader.column()) == 1000
    reader.click("th button", 2)
    reader.type("way 4,99")
    assert reader.column(1) == [f"{n:,}" for n in range(4990, 5000)]
    assert reader.count() == "10 of 5,000 rows"
    reader.type("onerror")
    assert reader.column() == [HOSTILE[2]]
    assert reader.js("document.images.length") == 0


MORE = "document.querySelector('.more button').textContent"


@pytest.mark.parametrize(("count", "first"), [(12, 12), (13, 10)])
def test_a_table_shows_ten_rows_until_the_reader_wants_all(
    reader: Reader, count: int, first: int
) -> None:
    reader.open(page(long(count)))
    assert reader.column(1) == [str(1 + i) for i in range(first)]
    is_hidden = "document.querySelector('.more').hidden"
    assert reader.js(is_hidden) == (first == count)
    if first < count:
        assert reader.js(MORE) == "Show all 13 rows"
        reader.click(".more button")
        assert len(reader.column()) == 13
        reader.click(".more button")
        assert len(reader.column()) == 10


COPIES = "navigator.clipboard.writeText = async (text) => { window.copied = text; }"


def test_a_copy_has_the_raw_figures_of_the_rows_that_pass_the_filter(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = csv_format.render(small())["report-tables/01-lengths-by-time.csv"].splitlines(True)
    assert lines[:2] == ["Implementation,Status,Time,Time low,Time high\n", "sdpa,ok,0.5,0.4,0.6\n"]
    reader.open(small_page()).run(COPIES)
    reader.click(".grid .copy")
    assert reader.js("window.copied") == "".join(lines)
    reader.type("hilbert")
    reader.click("th button", 2)
    reader.click(".grid .copy")
    assert reader.js("window.copied") == "".join(lines[i] for i in (0, 4, 5))
    # without raw figures in the page: the text, of all rows
    monkeypatch.setattr(html_format, "MAX_CSV_BYTES", 500)
    reader.open(page(long(300))).run(COPIES)
    reader.click(".grid .copy")
    copied = str(reader.js("window.copied")).splitlines()
    assert copied[:3] == ["Implementation,Tokens,Time", "way 0,1,0 s", "way 1,2,3.7 s"]
    assert copied[4] == "way 3,4,"
    assert copied[300] == '"""><img src=x onerror=""window.ran = 1"">",300,500 ms'


# ---- sections and links --------------------------------------------------------------------------


def many_sections(count: int, technical: int = 2) -> Document:
    folded = [Section(f"Part {i}", [f"Words {i}."]) for i in range(count)]
    last = [Section(f"Config {i}", code=["x: 1"], technical=True) for i in range(technical)]
    return Document("summary", "Many", [], [*last, *folded])


@pytest.mark.parametrize(
    ("count", "technical", "titles"),
    [
        (2, 0, ["Part 0", "Part 1"]),
        (6, 2, [*(f"Part {i}" for i in range(6)), "Config 0", "How it was measured"]),
        (8, 0, [f"Part {i}" for i in range(8)]),
        (
            9,
            3,
            [*(f"Part {i}" for i in range(4)), "More", "Part 8", "Config 0", "How it was measured"],
        ),
        (30, 0, [*(f"Part {i}" for i in range(6)), "More", "Part 29"]),
    ],
)
def test_the_navigation_has_at_most_eight_entries(
    count: int, technical: int, titles: list[str]
) -> None:
    written = page(many_sections(count, technical))
    links = re.findall(r'<li><a href="#([^"]*)">([^<]*)</a></li>', written)
    assert [title for _, title in links] == titles
    sections = re.findall(r'<section id="([^"]*)"[^>]* data-entry="([^"]*)"', written)
    assert len(sections) == count + technical
    assert [name for name, _ in sections][count:] == [f"config-{i}" for i in range(technical)]
    assert list(dict.fromkeys(entry for _, entry in sections)) == [name for name, _ in links]


def test_sections_are_folded_except_the_first_and_links_open_them(reader: Reader) -> None:
    reader.open(page(many_sections(9)), unfold=False)
    assert reader.opened() == ["part-0"]
    reader.click("nav a", 3)
    reader.until(lambda: reader.opened() == ["part-0", "part-3"], "the linked section")
    reader.run("document.querySelector('#part-3 .fold').open = false")
    reader.click("nav a", 3)
    reader.until(lambda: reader.opened() == ["part-0", "part-3"], "the same link again")
    reader.click("nav a", 6)
    reader.until(lambda: "config-0" in reader.opened(), "the commands")
    reader.click("#folds")
    assert len(reader.opened()) == 11
    reader.click("#folds")
    assert reader.opened() == []
    assert reader.errors() == []


def test_a_link_to_a_row_opens_its_section_and_marks_it(reader: Reader) -> None:
    first = Section("First", ["Words."])
    document = replace(long(), sections=[first, *long().sections])
    marked = "[...document.querySelectorAll('.marked')].map((row) => row.cells[1].textContent)"
    reader.open(page(document), "#all/rows/4", unfold=False)
    assert reader.opened() == ["first", "all"]
    assert reader.js(marked) == ["4"]
    assert reader.column(1) == [str(1 + i) for i in range(10)]
    reader.run("location.hash = '#all/rows/4321'")
    reader.until(lambda: reader.js(marked) == ["4,321"], "the other row")
    assert reader.column(1) == ["4,321", *(str(1 + i) for i in range(10))]
    box = "document.querySelector('.marked').getBoundingClientRect()"
    reader.wait_for(f"{box}.top > 0 && {box}.bottom < innerHeight")
    reader.type("way 1")
    assert reader.js(marked) == []
    third = reader.column(1)[2]
    reader.click("tbody .anchor", 2)
    reader.until(lambda: reader.js(marked) == [third], "the row")
    assert reader.js("location.hash") == f"#all/rows/{third}"
    assert reader.errors() == []


def both() -> Document:
    return replace(small(), sections=[*small().sections, *long(300).sections])


def test_paper_has_every_section_and_more_rows(reader: Reader) -> None:
    reader.open(page(both()), unfold=False)
    reader.run("dispatchEvent(new Event('beforeprint'))")
    assert reader.opened() == ["summary", "lengths", "all"]
    assert len(reader.column(grid=1)) == 200
    reader.wait_for("document.querySelectorAll('svg.marks').length === 2")
    reader.run("dispatchEvent(new Event('afterprint'))")
    assert reader.opened() == ["summary"]
    assert len(reader.column(grid=1)) == 10


def test_a_search_of_the_browser_reaches_folded_text_and_rows(reader: Reader) -> None:
    reader.open(page(both()), unfold=False)
    reader.run("dispatchEvent(new KeyboardEvent('keydown', { key: 'f', ctrlKey: true }))")
    assert len(reader.column(grid=1)) == 200
    # found by the browser as a search finds it: the section opens
    reader.driver.get(reader.driver.current_url + "#:~:text=By%20time")
    reader.until(lambda: "lengths" in reader.opened(), "the section of the text")


def test_key_figures_are_cards(reader: Reader) -> None:
    figures = [KeyFigure("Longest", "2.06M tokens", "memory limit"), KeyFigure("<b>", "1×")]
    reader.open(page(replace(small(), figures=figures)))
    cards = "[...document.querySelectorAll('.key > div')]"
    texts = reader.js(f"{cards}.map((card) => card.innerText.split(/\\n+/))")
    assert texts == [["Longest", "2.06M tokens", "memory limit"], ["<b>", "1×"]]
    assert "<dl" not in small_page().partition("<main")[2].partition("</main>")[0]


def test_the_first_chart_begins_on_the_first_screen(reader: Reader) -> None:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    figures = [KeyFigure("Longest", "2.06M tokens", "memory limit, 10 min a pass")] * 5
    table = Table("By time", COLUMNS, ROWS)
    section = Section("Answer", points=["word " * 20] * 5, tables=[table], charts=[chart()])
    reader.open(page(Document("x", "x", ["Machine."] * 3, [section], figures=figures)))
    assert reader.js("document.querySelector('figure').getBoundingClientRect().top") < 900


PUBLISHED = {"extreme": "extreme", "scaling": "ranks", "implementations": "quickstart"}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_report_has_its_chart_on_the_first_screen(reader: Reader, kind: str) -> None:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    loaded = load(ROOT / "results" / "xeon2" / PUBLISHED[kind])
    (document,) = documents(loaded.records, [kind])
    reader.open(page(document), unfold=False)
    figure = "document.querySelector('section figure').getBoundingClientRect()"
    assert 0 < reader.js(f"{figure}.top") < 900
    assert reader.js(f"{figure}.width") > 500


def test_sorting_works_with_the_keyboard(reader: Reader) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    reader.open(small_page())
    sorts = "document.activeElement.matches('th:nth-child(3) button')"
    for _ in range(60):
        ActionChains(reader.driver).send_keys(Keys.TAB).perform()
        if reader.js(sorts):
            break
    assert reader.js(sorts)
    assert reader.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    ActionChains(reader.driver).send_keys(Keys.ENTER).perform()
    assert reader.column() == SORTED


def test_bars_leave_room_for_their_values() -> None:
    wide = replace(bars(("a",)), points=(Point("a", 0, 2059610.0),))
    written = page(Document("x", "x", [], [Section("x", charts=[wide])]))
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', written)
    width = json.loads(data)["spec"]["layer"][0]["encoding"]["x"]["scale"]["range"][1]["expr"]
    assert int(width.removeprefix("width - ")) > 6 * len("2,059,610")


def test_values_of_bars_and_pale_lines_suit_dark_paper(reader: Reader) -> None:
    many = chart(tuple(f"way {i}" for i in range(12)))
    wide = bars(("a", "b"))
    reader.set_scheme("dark")
    reader.open(page(Document("x", "x", [], [Section("x", charts=[many, wide])]))).drawn(2)
    style = "getComputedStyle(document.querySelector({}))"
    ink = reader.js("getComputedStyle(document.body).color")
    value = "document.querySelectorAll('figure')[1].querySelector('.mark-text.role-mark text')"
    assert reader.js(f"getComputedStyle({value}).fill") == ink
    pale = style.format(json.dumps('figure path[stroke="#bbbbbb"]'))
    assert reader.js(f"{pale}.stroke") == "rgb(70, 75, 82)"


PAPER = "getComputedStyle(document.body).backgroundColor"
LABEL = "getComputedStyle(document.querySelector('.role-axis-label text')).fill"


def test_colours_follow_the_system_until_the_reader_chooses(reader: Reader) -> None:
    reader.open(small_page()).drawn()
    light = [reader.js(PAPER), reader.js(LABEL)]
    button = "document.querySelector('#theme').textContent"
    assert reader.js(button) == "Use dark colours"
    reader.set_scheme("dark")
    reader.wait_for(f"{button} === 'Use light colours'")  # the browser tells the page in a frame
    dark = [reader.js(PAPER), reader.js(LABEL)]
    assert light[0] == "rgb(255, 255, 255)"
    assert not set(light) & set(dark)
    reader.click("#theme")
    assert [reader.js(PAPER), reader.js(LABEL), reader.js(button)] == [*light, "Use dark colours"]
    reader.driver.refresh()
    reader.run("localStorage.clear()")
    assert reader.js(PAPER) == light[0]


def test_a_narrow_screen_needs_no_horizontal_scrolling(reader: Reader) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    long_title = Section("Config: results/machine/ring_transports_of_many_ranks/config.yaml")
    for text in (small_page(), quickstart(), page(Document("x", "x", [], [long_title]))):
        reader.open(text)
        assert reader.js("document.documentElement.clientWidth") == 390
        assert reader.js("document.documentElement.scrollWidth") <= 390
    reader.open(small_page()).drawn(2)
    assert reader.js("document.documentElement.scrollWidth") <= 390


def test_a_narrow_screen_shows_names_of_lines_and_readable_cells(reader: Reader) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    names = ("sdpa", "ring with a name that has no room", "dense")
    points = tuple(Point(name, i / 10, i * 1000.0) for name in names for i in range(1, 9))
    heat = replace(bars(), x=Axis("Sparsity", "share"), points=points, shape="heat")
    section = Section("x", charts=[chart(names), heat])
    reader.open(page(Document("x", "x", [], [section]))).drawn(2)
    found = "[...document.querySelectorAll('.is-lines svg text')].map({})"
    texts = reader.js(found.format("text => text.textContent"))
    assert "sdpa" in texts
    assert any(text.startswith("ring with") and text.endswith("…") for text in texts)
    assert max(reader.js(found.format("text => text.getBoundingClientRect().right"))) <= 390
    scroll = "document.querySelector('.is-heat').parentNode"
    assert reader.js(f"{scroll}.scrollWidth - {scroll}.clientWidth") > 100


def test_hostile_names_are_shown_and_never_run(reader: Reader) -> None:
    shown = "document.querySelector({}).textContent"
    reader.open(hostile_page())
    reader.run("dispatchEvent(new Event('beforeprint'))")
    reader.wait_for(f"document.querySelectorAll('svg.marks').length === {2 * len(HOSTILE)}")
    assert reader.js("window.ran") is None
    assert reader.js("document.images.length") == 0
    assert reader.js(shown.format("'h1'")) == HOSTILE[0]
    for i, text in enumerate(HOSTILE):
        assert reader.column(1, i) == [text, "—"]
        keys = f"document.querySelectorAll('.legend')[{i}].querySelector('span').textContent"
        assert reader.js(keys) == text
        code = f"document.querySelectorAll('pre code')[{i}].textContent"
        assert reader.js(code) == text
        assert reader.marks("line mark", 2 * i) == 2
    reader.mouse("mouseMoved", "path[aria-roledescription=point]")
    tip = "document.querySelector('#vg-tooltip-element')"
    reader.wait_for(f"!!{tip} && {tip}.textContent.includes({json.dumps(HOSTILE[0])})")
    reader.click(".legend .pick")
    reader.until(lambda: reader.marks() == 1, "one line")
    assert reader.js("window.ran") is None
    assert reader.errors() == []
