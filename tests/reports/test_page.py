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
from longseq_bench.reports.kinds import documents
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
        figures=[KeyFigure("Longest", "45k tokens", "30 s limit")],
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


def test_the_policy_allows_only_scripts_with_the_listed_hashes() -> None:
    text = small_page()
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    (meta,) = [
        a for a in Parts(text).of("meta") if a.get("http-equiv") == "Content-Security-Policy"
    ]
    each = [part.split() for part in (meta["content"] or "").split(";")]
    policy = {name: values for name, *values in each}
    assert policy["script-src"] == [f"'sha256-{one}'" for one in hashes]
    assert policy["default-src"] == ["'none'"]
    assert policy["connect-src"] == ["'none'"]


def test_data_can_not_end_its_element() -> None:
    written = hostile_page()
    datas = re.findall(r'<script type="application/json">(.*?)</script>', written, re.DOTALL)
    assert not re.search("[<>&\u2028\u2029]", "".join(datas))
    drawn = [text.replace("\u2028", " ") for text in HOSTILE]
    layers = [json.loads(data)["layer"] for data in datas[::2]]
    names = [layer[0]["encoding"]["color"]["scale"]["domain"] for layer in layers]
    assert names == [[text, "other"] for text in drawn]
    assert len(re.findall(r"<script\b", written.split("<body>")[1])) == 2 * len(HOSTILE) + 1
    assert Parts(written).of("img") == []


def test_the_page_is_readable_without_scripts() -> None:
    parts = Parts(small_page())
    words = "".join(text for tag, text in parts.texts if tag not in ("script", "style"))
    for sentence in (
        "Said first.",
        "45k tokens",
        "One.",
        "Words.",
        "By time",
        "hilbert 16",
        "500 ms ±20 %",
    ):
        assert sentence in words
    assert "Time by tokens. The chart needs JavaScript" in words


def test_a_cell_has_the_number_by_which_it_sorts() -> None:
    cells = ("b 10", 3, None, Spread(2.0, 1.0, 3.0), float("nan"))
    table = Table("T", (Column("n", "count"),), tuple((cell,) for cell in cells))
    cells_of = Parts(page(Document("x", "x", [], [Section("S", tables=[table])]))).of("td")
    assert [a.get("data-v") for a in cells_of] == [None, "3", None, "2.0", None]


def test_a_long_table_has_first_rows_and_says_so() -> None:
    written = page(long())
    assert written.count("<tr>") == 1001
    assert "Here are the first 1,000 of 5,000 rows; the report in CSV has all." in written


# ---- the browser ---------------------------------------------------------------------------------

FLAGS = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
    "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests; CI requires it."""
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    give_up = pytest.fail if os.environ.get("CI") else pytest.skip
    browser, control = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not control:
        give_up("chromium or chromedriver is not installed: the page was not opened")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    try:
        started = webdriver.Chrome(options=options, service=Service(control))
    except WebDriverException as error:
        give_up(f"chromium does not start: {str(error).splitlines()[0]}")
    yield started
    started.quit()


class Reader:
    """A reader of a page: `js` runs JavaScript, clicks are real mouse events."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        driver.get("about:blank")
        driver.get_log("performance"), driver.get_log("browser")
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def open(self, text: str, link: str = "", unfold: bool = True) -> Reader:
        """Load a page, with a link into it, and open all its sections."""
        path = self.folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.driver.get("about:blank")  # else a link alone would not load the page
        self.driver.get(path.as_uri() + link)
        if unfold:
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

    def column(self, j: int = 0, grid: int = 0) -> list[str]:
        rows = f"[...document.querySelectorAll('.grid')[{grid}].querySelectorAll('tbody tr')]"
        return list(self.js(f"{rows}.map((row) => row.cells[{j}].textContent)"))

    def count(self, grid: int = 0) -> str:
        return str(self.js(f"document.querySelectorAll('.grid .count')[{grid}].textContent"))

    def lines(self, figure: int = 0) -> int:
        """The series drawn in a chart, without guides."""
        query = "path[aria-roledescription='line mark']:not([stroke='#888888'])"
        chart = f"document.querySelectorAll('figure')[{figure}]"
        return int(self.js(f'{chart}.querySelectorAll("{query}").length'))

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


def test_a_real_report_begins_with_its_chart_and_needs_no_network(reader: Reader) -> None:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    reader.open(quickstart(), unfold=False)
    first_chart = "document.querySelector('section figure').getBoundingClientRect()"
    assert 0 < reader.js(f"{first_chart}.top") < 900
    reader.drawn()
    assert reader.js("document.querySelectorAll('.grid').length") >= 5
    assert "sdpa" in reader.column()
    assert reader.requested() == {"file://"}
    assert reader.errors() == []


def test_a_click_in_the_legend_singles_out_a_series(reader: Reader) -> None:
    from selenium.webdriver import ActionChains

    reader.open(small_page()).drawn(2)
    faded = "document.querySelectorAll(\"path[aria-roledescription='line mark'][opacity='0.12']\")"
    assert reader.js(f"{faded}.length") == 0
    label = reader.js("document.querySelector('.role-legend-label text')")
    reader.run("arguments[0].scrollIntoView({block: 'center'})", label)
    ActionChains(reader.driver).move_to_element(label).click().perform()
    reader.until(lambda: reader.js(f"{faded}.length") == 2, "two pale lines")


def test_a_table_sorts_by_value_and_back(reader: Reader) -> None:
    reader.open(small_page())
    as_made = [row[0] for row in ROWS]
    orders = [SORTED, [*SORTED[-2::-1], SORTED[-1]], as_made]
    for order, aria in zip(orders, ("ascending", "descending", None), strict=True):
        reader.click("th button", 2)
        assert reader.column() == order
        assert reader.js("document.querySelectorAll('th')[2].getAttribute('aria-sort')") == aria


def test_a_long_table_sorts_and_filters_all_its_rows(reader: Reader) -> None:
    reader.open(page(long(300)))
    assert len(reader.column()) == 300
    assert reader.count() == "300 rows"
    reader.click("th button", 2)
    reader.click("th button", 2)
    assert reader.column(2)[0] == "29.9 s"
    reader.click("th button", 2)
    made = list(zip(reader.column(0), reader.column(1), reader.column(2), strict=True))
    reader.type("way 29")
    expected = [row[1] for row in made if "29" in " ".join(row) and "way" in row[0]]
    assert 9 <= len(expected) < 60
    assert reader.column(1) == expected
    assert reader.count() == f"{len(reader.column(1))} of 300 rows"
    reader.type("onerror")
    assert reader.column() == [HOSTILE[2]]
    assert reader.js("document.images.length") == 0


# ---- sections and links --------------------------------------------------------------------------


def test_sections_are_folded_except_the_first_and_links_open_them(reader: Reader) -> None:
    folded = [Section(f"Part {i}", [f"Words {i}."]) for i in range(9)]
    config = Section("Config", code=["x: 1"], technical=True)
    reader.open(page(Document("summary", "Many", [], [config, *folded])), "#part-2", unfold=False)
    assert reader.opened() == ["part-0", "part-2"]
    reader.click("nav a", 3)
    reader.until(lambda: reader.opened() == ["part-0", "part-2", "part-3"], "the linked section")
    assert reader.errors() == []


def test_paper_has_every_section_and_chart(reader: Reader) -> None:
    both = replace(small(), sections=[*small().sections, *long(300).sections])
    reader.open(page(both), unfold=False)
    assert reader.lines() == 0
    reader.run("dispatchEvent(new Event('beforeprint'))")
    assert reader.opened() == ["summary", "lengths", "all"]
    assert len(reader.column(grid=1)) == 300
    reader.wait_for("document.querySelectorAll('svg.marks').length === 2")


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
        code = f"document.querySelectorAll('pre code')[{i}].textContent"
        assert reader.js(code) == text
        assert reader.lines(2 * i) == 2
    assert reader.js("window.ran") is None
    assert reader.errors() == []
