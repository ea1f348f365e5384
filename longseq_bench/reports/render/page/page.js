// Interaction with a report: draw charts, hide series, sort, filter and copy tables, open sections.
// It fetches nothing.
"use strict";
(() => {
  const MISSING = "—";
  const FEW = 10; // rows of a table at first
  const PRINTED = 200; // rows on paper

  const all = (node, query) => [...node.querySelectorAll(query)];
  const folds = () => all(document, ".fold");
  const inOrder = new Intl.Collator("en", { numeric: true }).compare;

  // ---- charts -----------------------------------------------------------------------------------

  const EMBED_OPTIONS = {
    actions: false,
    ast: true, // interpret expressions: the page's policy forbids code made from text
    defaultStyle: false,
    logLevel: 1,
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  };

  // Draw a chart at its first call, with buttons that hide its series.
  async function draw(figure) {
    if (figure.dataset.drawn) return;
    figure.dataset.drawn = "yes";
    const { spec, series } = JSON.parse(figure.querySelector("script").textContent);
    const keys = all(figure, ".pick");
    spec.params = [{ name: "hidden", value: [] }];
    for (const layer of spec.layer) (layer.transform ??= []).push({ filter: "indexof(hidden, datum.s) < 0" });
    const place = figure.querySelector(".chart");
    try {
      const { view } = await window.vegaEmbed(place, spec, EMBED_OPTIONS);
      for (const key of keys) {
        key.addEventListener("click", () => {
          key.setAttribute("aria-pressed", key.getAttribute("aria-pressed") === "false");
          const hidden = series.filter((_, i) => keys[i].getAttribute("aria-pressed") === "false");
          view.signal("hidden", hidden).runAsync();
        });
      }
    } catch (error) {
      place.textContent = `This chart can't be drawn here: ${error.message}`;
    }
  }

  // ---- tables -----------------------------------------------------------------------------------

  const grids = new Map(); // by node

  class Grid {
    constructor(node) {
      this.node = node;
      this.heads = all(node, "th");
      this.body = node.querySelector("tbody");
      this.rows = [...this.body.rows];
      this.words = [];
      this.limit = FEW;
      const field = node.querySelector("input");
      field.hidden = this.rows.length < 6;
      field.addEventListener("input", () => {
        this.words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
        this.show();
      });
      this.heads.forEach((head, j) => {
        head.firstElementChild.addEventListener("click", () => this.sort(j));
      });
      this.more = node.querySelector(".more");
      this.more.firstElementChild.addEventListener("click", () => this.show(this.limit === FEW ? Infinity : FEW));
      this.show();
    }

    // Ascending, then descending, then in the order of the report.
    sort(j) {
      const isSame = this.column === j;
      this.heads[this.column]?.removeAttribute("aria-sort");
      this.column = isSame && this.direction === "descending" ? undefined : j;
      this.direction = isSame ? "descending" : "ascending";
      this.heads[this.column]?.setAttribute("aria-sort", this.direction);
      this.show();
    }

    // The rows that pass the filter, in their order; numbers before text, missing values last.
    visibleRows() {
      const rows = this.rows.filter((row) => {
        const text = [...row.cells].map((cell) => cell.textContent.toLowerCase()).join("\n");
        return this.words.every((word) => text.includes(word));
      });
      if (this.column === undefined) return rows;
      const sign = this.direction === "ascending" ? 1 : -1;
      const keys = new Map(rows.map((row) => [row, this.key(row.cells[this.column])]));
      return rows.sort((a, b) => {
        const [[group, value], [otherGroup, other]] = [keys.get(a), keys.get(b)];
        return group - otherGroup || sign * (group === 0 ? value - other : inOrder(value, other));
      });
    }

    key(cell) {
      if (cell.dataset.v !== undefined) return [0, Number(cell.dataset.v)];
      return [cell.textContent === MISSING ? 2 : 1, cell.textContent];
    }

    show(limit = this.limit) {
      this.limit = limit;
      const rows = this.visibleRows();
      const isLong = rows.length > FEW + 2; // a button for one or two rows is not worth it
      const shown = isLong ? rows.slice(0, limit) : rows;
      this.body.replaceChildren(...shown);
      this.node.querySelector(".scroll").classList.toggle("tall", shown.length > 30);
      this.more.hidden = !isLong;
      this.more.firstElementChild.textContent = limit === FEW ? `Show all ${rows.length} rows` : `Show the first ${FEW} rows`;
      const of = rows.length === this.rows.length ? "" : ` of ${this.rows.length}`;
      this.node.querySelector(".count").textContent = `${rows.length}${of} ${this.rows.length === 1 ? "row" : "rows"}`;
    }

    // The rows that pass the filter, in their order, as raw figures in SI units.
    csv() {
      const quote = (text) => {
        const safe = /^[=+\-@]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
        return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
      };
      const text = (cell) => cell.dataset.v ?? (cell.textContent === MISSING ? "" : cell.textContent);
      const rows = this.visibleRows().map((row) => [...row.cells].map(text));
      const names = this.heads.map((head) => head.textContent);
      return [names, ...rows].map((row) => `${row.map(quote).join(",")}\n`).join("");
    }
  }

  // ---- the page ---------------------------------------------------------------------------------

  async function copy(button) {
    const grid = grids.get(button.closest(".grid"));
    const label = (button.dataset.label ??= button.textContent);
    try {
      await navigator.clipboard.writeText(grid ? grid.csv() : button.previousElementSibling.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = label), 1500);
  }

  // Open the section that a link points to.
  function reveal(hash) {
    const node = document.getElementById(hash.slice(1));
    const fold = node?.closest("section")?.querySelector(".fold");
    if (fold) fold.open = true;
    node?.scrollIntoView();
  }

  function foldAll(button) {
    const on = folds().some((fold) => !fold.open);
    for (const fold of folds()) fold.open = on;
    button.textContent = on ? "Fold all" : "Open all";
  }

  document.documentElement.classList.add("js");
  addEventListener("beforeprint", () => {
    for (const fold of folds()) fold.open = true;
    for (const grid of grids.values()) grid.show(Math.max(grid.limit, PRINTED));
    all(document, "figure").forEach(draw);
  });
  addEventListener("click", ({ target }) => {
    if (target.matches("#folds")) foldAll(target);
    if (target.matches(".copy")) copy(target);
    if (target.matches("main a, nav a")) reveal(target.hash);
  });
  addEventListener("hashchange", () => reveal(location.hash));
  addEventListener("DOMContentLoaded", () => {
    for (const node of all(document, ".grid")) grids.set(node, new Grid(node));
    for (const fold of folds()) {
      fold.addEventListener("toggle", () => fold.open && all(fold, "figure").forEach(draw));
      if (fold.open) all(fold, "figure").forEach(draw);
    }
    reveal(location.hash);
  });
})();
