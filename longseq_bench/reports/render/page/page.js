// Interaction with a report: draw charts, sort and filter tables, open linked sections.
// It fetches nothing.
"use strict";
(() => {
  const MISSING = "—";
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

  // Draw a chart at its first call.
  async function draw(figure) {
    if (figure.dataset.drawn) return;
    figure.dataset.drawn = "yes";
    const place = figure.querySelector(".chart");
    try {
      await window.vegaEmbed(place, JSON.parse(figure.querySelector("script").textContent), EMBED_OPTIONS);
    } catch (error) {
      place.textContent = `This chart can't be drawn here: ${error.message}`;
    }
  }

  // ---- tables -----------------------------------------------------------------------------------

  class Grid {
    constructor(node) {
      this.node = node;
      this.heads = all(node, "th");
      this.body = node.querySelector("tbody");
      this.rows = [...this.body.rows];
      this.words = [];
      const field = node.querySelector("input");
      field.hidden = this.rows.length < 6;
      field.addEventListener("input", () => {
        this.words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
        this.show();
      });
      this.heads.forEach((head, j) => {
        head.firstElementChild.addEventListener("click", () => this.sort(j));
      });
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

    show() {
      const rows = this.visibleRows();
      this.body.replaceChildren(...rows);
      const of = rows.length === this.rows.length ? "" : ` of ${this.rows.length}`;
      this.node.querySelector(".count").textContent = `${rows.length}${of} ${this.rows.length === 1 ? "row" : "rows"}`;
    }
  }

  // ---- the page ---------------------------------------------------------------------------------

  // Open the section that a link points to.
  function reveal(hash) {
    const node = document.getElementById(hash.slice(1));
    const fold = node?.closest("section")?.querySelector(".fold");
    if (fold) fold.open = true;
    node?.scrollIntoView();
  }

  document.documentElement.classList.add("js");
  addEventListener("beforeprint", () => {
    for (const fold of folds()) fold.open = true;
    all(document, "figure").forEach(draw);
  });
  addEventListener("click", ({ target }) => {
    if (target.matches("main a, nav a")) reveal(target.hash);
  });
  addEventListener("hashchange", () => reveal(location.hash));
  addEventListener("DOMContentLoaded", () => {
    for (const node of all(document, ".grid")) new Grid(node);
    for (const fold of folds()) {
      fold.addEventListener("toggle", () => fold.open && all(fold, "figure").forEach(draw));
      if (fold.open) all(fold, "figure").forEach(draw);
    }
    reveal(location.hash);
  });
})();
