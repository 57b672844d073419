// Tables sorted by a column: numbers by their value, the unknown last, texts by name.
attnDiag.table = (() => {
  const key = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.key ?? cell.textContent;
    return text === "" ? null : text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));

  const sort = (table, column, descending) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row, i) => ({ row, i, key: key(row, column) }));
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.i - b.i;
      return (descending ? -1 : 1) * compare(a.key, b.key) || a.i - b.i;
    });
    body.append(...rows.map((item) => item.row));
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

  return { start: () => document.querySelectorAll("table.sortable").forEach(makeSortable) };
})();
