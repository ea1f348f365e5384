// Interaction with a report: open sections, sort, filter and copy tables, hide series, change axes.
// It fetches nothing.
"use strict";
(() => {
  const root = document.documentElement;
  const MISSING = "—";
  const FEW = 10; // rows of a table at first
  const PRINTED = 200; // rows on paper, and for a search in the page

  // ---- light and dark: the system's setting, until the reader chooses ---------------------------

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("longseq-theme", value);
      return localStorage.getItem("longseq-theme");
    } catch {
      return value; // no storage is available: the choice lasts as long as the page
    }
  };

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  function applyTheme(theme) {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = isDark() ? "Use light colours" : "Use dark colours";
  }

  function switchTheme() {
    applyTheme(isDark() ? "light" : "dark");
    remembered(root.dataset.theme);
  }

  // ---- helpers ----------------------------------------------------------------------------------

  const all = (node, query) => [...node.querySelectorAll(query)];
  const data = (node) => JSON.parse(node.querySelector("script").textContent);
  const folds = () => all(document, ".fold");
  const press = (button, on) => button.setAttribute("aria-pressed", String(on));

  function write(node, text) {
    if (node.textContent !== text) node.textContent = text; // an unchanged text must not be read out again
  }

  const covers = (label, text) =>
    text === label || text.startsWith(`${label} ×`) || text.startsWith(`${label}, `);

  // ---- which implementations are shown, in all charts and tables --------------------------------

  class Chooser {
    constructor(node) {
      this.node = node;
      this.picks = all(node, ".pick");
      for (const pick of this.picks) {
        pick.addEventListener("click", () => this.set([pick], this.hidden.has(pick.value)));
      }
      node.querySelector("[name=all]").addEventListener("click", () => this.set(this.picks, true));
      node.querySelector("[name=none]").addEventListener("click", () => this.set(this.picks, false));
      this.hidden = new Set();
      this.updateCount();
    }

    set(picks, on) {
      const labels = picks.map((pick) => pick.value);
      for (const label of labels) on ? this.hidden.delete(label) : this.hidden.add(label);
      this.updateCount();
      for (const widget of widgets.values()) widget.choose?.(labels, on);
    }

    updateCount() {
      for (const pick of this.picks) press(pick, !this.hidden.has(pick.value));
      const n = this.picks.length;
      const shown = this.picks.filter((pick) => !this.hidden.has(pick.value)).length;
      write(this.node.querySelector(".count"), shown === n ? `all ${n} shown` : `${shown} of ${n} shown`);
    }
  }

  // ---- charts -----------------------------------------------------------------------------------

  const EMBED_OPTIONS = {
    actions: false,
    ast: true, // interpret expressions: the page's policy forbids code made from text
    defaultStyle: false,
    logLevel: 1,
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  };
  const ZOOM = {
    name: "zoom",
    bind: "scales",
    select: { type: "interval", zoom: "wheel![event.ctrlKey || event.metaKey]" },
  };
  const coarse = matchMedia("(pointer: coarse)");

  class Figure {
    constructor(node) {
      this.node = node;
      this.place = node.querySelector(".chart");
      this.hidden = new Set();
      this.logs = all(node, ".settings input");
      this.keys = all(node, ".legend .pick");
      ({ spec: this.plain, series: this.series } = data(node));
      this.keys.forEach((key, i) => {
        key.addEventListener("click", () => this.toggle(this.series[i]));
      });
      for (const box of this.logs) box.addEventListener("change", () => this.draw());
    }

    choose(labels, on) {
      // the series of a label too: "ring ×2", "ring, 2k tokens"
      for (const series of this.series) {
        if (labels.some((label) => covers(label, series))) on ? this.hidden.delete(series) : this.hidden.add(series);
      }
      this.press();
    }

    toggle(series) {
      this.hidden.has(series) ? this.hidden.delete(series) : this.hidden.add(series);
      this.press();
    }

    press() {
      this.keys.forEach((key, i) => press(key, !this.hidden.has(this.series[i])));
      this.view?.signal("hidden", this.hiddenSeries()).runAsync();
    }

    hiddenSeries() {
      return this.series.filter((series) => this.hidden.has(series));
    }

    // The chart with the reader's settings, without hidden series, and with zoom.
    spec() {
      const spec = structuredClone(this.plain);
      for (const { name, checked } of this.logs) {
        const { scale, axis } = spec.encoding[name];
        scale.type = checked ? "log" : "linear";
        axis.values = spec.usermeta.ticks[name][scale.type] ?? undefined;
      }
      spec.params = [{ name: "hidden", value: this.hiddenSeries() }];
      for (const layer of spec.layer) (layer.transform ??= []).push({ filter: "indexof(hidden, datum.s) < 0" });
      const isPlot = spec.encoding.y.type === "quantitative";
      if (isPlot && !coarse.matches) spec.layer[0].params = [ZOOM]; // a finger scrolls the page
      return spec;
    }

    async draw() {
      const turn = (this.turn = (this.turn ?? 0) + 1);
      try {
        const embedded = await window.vegaEmbed(this.place, this.spec(), EMBED_OPTIONS);
        if (turn !== this.turn) return embedded.finalize();
        this.embedded?.finalize();
        this.embedded = embedded;
        this.view = embedded.view;
      } catch (error) {
        this.place.textContent = `This chart can't be drawn here: ${error.message}`;
      }
    }
  }

  const near = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) drawOnce(widgets.get(target.dataset.key));
      }
    },
    { rootMargin: "400px" },
  );

  function drawOnce(widget) {
    if (!(widget instanceof Figure) || widget.turn || !window.vegaEmbed) return;
    near.unobserve(widget.node);
    widget.draw();
  }

  // ---- tables -----------------------------------------------------------------------------------

  const inOrder = new Intl.Collator("en", { numeric: true }); // "chunk 9" before "chunk 10"

  class Grid {
    constructor(node) {
      this.node = node;
      this.heads = all(node, "th");
      this.body = node.querySelector("tbody");
      this.rows = [...this.body.rows];
      this.hidden = new Set();
      this.words = [];
      this.limit = FEW;
      this.field = node.querySelector("input");
      this.field.hidden = this.rows.length < 6;
      this.field.addEventListener("input", () => {
        this.words = this.field.value.toLowerCase().split(/\s+/).filter(Boolean);
        this.show();
      });
      this.heads.forEach((head, j) => head.firstElementChild.addEventListener("click", () => this.sort(j)));
      this.more = node.querySelector(".more");
      this.more.firstElementChild.addEventListener("click", () => this.show(this.limit === FEW ? Infinity : FEW));
      this.show();
    }

    choose(labels, on) {
      for (const label of labels) on ? this.hidden.delete(label) : this.hidden.add(label);
      this.show();
    }

    sort(j) {
      const isSame = this.column === j;
      const back = isSame && this.direction === "descending";
      this.heads[this.column]?.removeAttribute("aria-sort");
      [this.column, this.direction] = back ? [] : [j, isSame ? "descending" : "ascending"];
      this.heads[this.column]?.setAttribute("aria-sort", this.direction);
      this.show();
    }

    // The rows that pass the filters, in their order: numbers before texts, missing values last.
    visibleRows() {
      const label = Number(this.node.dataset.label);
      const isHidden = (row) => [...this.hidden].some((one) => covers(one, row.cells[label]?.textContent ?? ""));
      const has = (row) => this.words.every((word) => row.textContent.toLowerCase().includes(word));
      const rows = this.rows.filter((row) => has(row) && !isHidden(row));
      if (this.column === undefined) return rows;
      const sign = this.direction === "ascending" ? 1 : -1;
      return rows.sort((a, b) => {
        const [one, other] = [a, b].map((row) => row.cells[this.column]);
        const [isMissing, isOther] = [one, other].map((cell) => cell.textContent === MISSING);
        if (isMissing || isOther) return isMissing - isOther;
        const [x, y] = [one, other].map((cell) => Number(cell.dataset.number ?? NaN));
        const [isText, isOtherText] = [isNaN(x), isNaN(y)];
        if (isText && isOtherText) return sign * inOrder.compare(one.textContent, other.textContent);
        return sign * (isText - isOtherText || x - y);
      });
    }

    show(limit = this.limit) {
      this.limit = limit;
      const rows = this.visibleRows();
      const isShort = rows.length <= FEW + 2; // a button for one or two rows is not worth it
      const shown = isShort ? rows : rows.slice(0, limit);
      this.body.replaceChildren(...shown);
      this.node.querySelector(".scroll").classList.toggle("tall", shown.length > 30);
      this.more.hidden = isShort;
      const n = this.rows.length;
      write(this.more.firstElementChild, limit === FEW ? `Show all ${rows.length} rows` : `Show the first ${FEW} rows`);
      const few = rows.length === n ? "" : `${rows.length} of `;
      const cut = shown.length < rows.length ? `, the first ${limit} here` : "";
      write(this.node.querySelector(".count"), `${few}${n} row${n === 1 ? "" : "s"}${cut}`);
    }

    // The rows that pass the filters, with numbers in SI units; a formula begins with an apostrophe.
    csv() {
      const quote = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
      const plain = (text) => (text === MISSING ? "" : /^[=+@\t\r-]/.test(text) ? `'${text}` : text);
      const cells = this.visibleRows().map((row) => [...row.cells].map((c) => c.dataset.number ?? plain(c.textContent)));
      const names = this.heads.map((head) => plain(head.textContent));
      return [names, ...cells].map((line) => `${line.map(quote).join(",")}\n`).join("");
    }
  }

  // ---- the page ---------------------------------------------------------------------------------

  const widgets = new Map(); // by data-key

  const kindOf = (node) => (node.matches("figure") ? Figure : node.matches("details") ? Chooser : Grid);

  // Attach the behaviour to the page.
  function start() {
    for (const node of all(document, "[data-key]")) {
      const widget = new (kindOf(node))(node);
      widgets.set(node.dataset.key, widget);
      if (widget instanceof Figure) near.observe(node);
    }
    follow();
  }

  async function copy(button) {
    const grid = widgets.get(button.closest(".grid")?.dataset.key);
    const label = (button.dataset.label ??= button.textContent);
    try {
      await navigator.clipboard.writeText(grid ? grid.csv() : button.previousElementSibling.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = label), 1500);
  }

  // Open and show what a link points to: "#section" or "#section/table".
  function reveal(hash) {
    const name = hash.slice(1);
    const node = document.getElementById(name) ?? widgets.get(name)?.node;
    const fold = node?.closest("section")?.querySelector(".fold");
    if (fold) fold.open = true;
    node?.scrollIntoView();
  }

  function foldAll(button) {
    const on = folds().some((fold) => !fold.open);
    for (const fold of folds()) fold.open = on;
    button.textContent = on ? "Fold all" : "Open all";
  }

  // A search by the browser finds text in folded sections, but not in rows that are not shown.
  function showRows() {
    const short = [...widgets.values()].filter((widget) => widget instanceof Grid && widget.limit < PRINTED);
    for (const grid of short) grid.show(PRINTED);
    if (!("onbeforematch" in window)) for (const fold of folds()) fold.open = true;
    return short;
  }

  // On paper everything is open; afterwards the page is as before.
  let undoPrint = () => {};
  function unfold() {
    const closed = folds().filter((fold) => !fold.open);
    for (const fold of closed) fold.open = true;
    const short = showRows();
    for (const widget of widgets.values()) drawOnce(widget);
    undoPrint = () => {
      for (const fold of closed) fold.open = false;
      for (const grid of short) grid.show(FEW);
    };
  }

  // Mark the current section in the table of contents.
  function follow() {
    const reading = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          if (!isIntersecting) continue;
          for (const link of all(document, "nav a")) {
            const isCurrent = link.hash === `#${target.dataset.entry}`;
            isCurrent ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
            if (isCurrent) link.closest("nav").scrollLeft = link.offsetLeft - 60;
          }
        }
      },
      { rootMargin: "-15% 0px -80% 0px" },
    );
    for (const section of all(document, "section")) reading.observe(section);
  }

  // ---- start ------------------------------------------------------------------------------------

  root.classList.add("js");
  applyTheme(remembered());
  addEventListener("beforeprint", unfold);
  addEventListener("afterprint", () => undoPrint());
  addEventListener("hashchange", () => reveal(location.hash));
  addEventListener("keydown", ({ key, ctrlKey, metaKey }) => {
    if (key === "F3" || (key === "f" && (ctrlKey || metaKey))) showRows();
  });
  addEventListener("click", ({ target }) => {
    if (target.matches("#theme")) switchTheme();
    if (target.matches("#folds")) foldAll(target);
    if (target.matches(".copy")) copy(target);
    const link = target.closest("main a, nav a");
    if (link && link.hash === location.hash) reveal(link.hash); // no change, so no hashchange
  });
  dark.addEventListener("change", () => applyTheme());
  addEventListener("DOMContentLoaded", () => {
    applyTheme();
    start();
    reveal(location.hash);
  });
})();
