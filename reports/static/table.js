// Tables sorted by a column: numbers by their value, the unknown last, texts by name.
attnDiag.table = (() => {
  const key = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.key ?? cell.textContent;
    return text === "" ? null : text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));

  // Of a long table not all rows are shown, as a browser takes seconds to lay thousands out: table -> all of them.
  const long = new Map();
  const STEP = 400;

  // ``all`` makes the rows of ``table`` in its order; ``button`` shows more of them.
  const lengthen = (table, all, button) => {
    const body = table.tBodies[0];
    let rows = null;
    const show = (count) => {
      body.replaceChildren(...rows.slice(0, count));
      button.hidden = count >= rows.length;
    };
    long.set(table, {
      rows: () => (rows ??= all()),
      order: (ordered) => {
        rows = ordered;
        show(STEP);
      },
    });
    button.hidden = false;
    button.addEventListener("click", () => {
      rows ??= all();
      show(body.rows.length + STEP);
    });
  };

  const sort = (table, column, descending) => {
    const body = table.tBodies[0];
    const rows = (long.get(table)?.rows() ?? [...body.rows]).map((row, i) => ({ row, i, key: key(row, column) }));
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.i - b.i;
      return (descending ? -1 : 1) * compare(a.key, b.key) || a.i - b.i;
    });
    const ordered = rows.map((item) => item.row);
    if (long.has(table)) long.get(table).order(ordered);
    else body.append(...ordered);
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  };

  const makeSortable = (table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const text = head.textContent;
      head.replaceChildren(attnDiag.el("button", {
        type: "button",
        // Numbers: the largest first, as that is what one looks for; a second press turns it round.
        onclick: () => sort(table, column, head.getAttribute("aria-sort") !== "descending"),
      }, text));
    });
  };

  return { lengthen, start: () => document.querySelectorAll("table.sortable").forEach(makeSortable) };
})();
