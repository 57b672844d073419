// The rows of the table of heads that the page was written without, made of the diagnosis.
attnDiag.rows = (() => {
  const { el } = attnDiag;
  const { number, percent, times } = attnDiag.numbers;
  const { name, at, judged, strongest, factor, fileName } = attnDiag.entries;

  const derived = { factor, smallest_p: (entry) => strongest(entry)?.estimate.p_adjusted };
  const shown = (value, column) => (column.factor ? times(value) : column.fraction ? percent(value) : number(value, column.digits));
  const cell = (entry, column) => {
    const read = derived[column.key] ?? (({ head }) => at(head, column.path));
    const value = (judged(entry) ? read(entry) : null) ?? null;
    return el("td", { "data-key": value ?? "" }, shown(value, column));
  };
  const row = (entry) => {
    const labels = entry.head.verdict?.labels.join(", ") ?? "no verdict";
    const { source } = entry.capture;
    return el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#${entry.place}` }, name(entry))),
      el("td", { "data-key": labels }, labels.replaceAll("_", "-")), attnDiag.vocabulary.columns.map((column) => cell(entry, column)),
      el("td", {}, el("bdi", {}, entry.observation.name)), el("td", { title: source }, el("bdi", {}, fileName(source))));
  };

  // A button and the first click on a heading (a sort of all) add them.
  const start = (entries) => {
    const button = document.getElementById("rest");
    if (!button) return;
    const table = document.getElementById("heads");
    const add = () => {
      if (button.hidden) return;
      const known = new Set([...table.querySelectorAll("tbody a")].map((link) => link.getAttribute("href").slice(1)));
      table.tBodies[0].append(...entries.filter((entry) => !known.has(entry.place)).map(row));
      button.hidden = true;
    };
    button.hidden = false;
    button.addEventListener("click", add);
    table.tHead.addEventListener("click", add, { capture: true });
  };

  return { start };
})();
