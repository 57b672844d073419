// The tables of verdicts: one stop of the Tab key each, arrow keys within, and the cell under pointer or focus in words.
attnDiag.when = (() => {
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

  const begin = (table, words) => {
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1).map((cell) => cell.querySelector("a")));
    const usual = words.textContent;
    const tell = (link) => (words.textContent = link ? `${link.querySelector(".spoken").textContent}.` : usual);
    const move = (link, [down, right]) => {
      let r = rows.findIndex((row) => row.includes(link));
      let c = rows[r].indexOf(link);
      // Over empty cells, to the next one there is.
      while (rows[r += down]?.[c += right] === null);
      const next = rows[r]?.[c];
      if (!next) return;
      link.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    };
    table.addEventListener("keydown", (event) => {
      const link = event.target.closest("a");
      if (!link || !MOVES[event.key]) return;
      event.preventDefault();
      move(link, MOVES[event.key]);
    });
    table.addEventListener("focusin", (event) => tell(event.target.closest("a")));
    table.addEventListener("focusout", () => tell(null));
    table.addEventListener("mouseover", (event) => tell(event.target.closest("td")?.querySelector("a")));
    table.addEventListener("mouseleave", () => tell(null));
  };

  return { start: () => document.querySelectorAll("table.when").forEach((table) => begin(table, table.closest("section").querySelector(".when-words"))) };
})();
