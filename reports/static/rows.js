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
  const row = (entry, sites) => {
    const labels = entry.head.verdict?.labels.join(", ") ?? "no verdict";
    const { source } = entry.capture;
    return el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#${entry.place}` }, name(entry))),
      el("td", { "data-key": labels }, labels.replaceAll("_", "-")), attnDiag.vocabulary.columns.map((column) => cell(entry, column)),
      sites ? el("td", { "data-key": sites[entry.place] === attnDiag.numbers.DASH ? "" : sites[entry.place] }, sites[entry.place]) : null,
      el("td", {}, el("bdi", {}, entry.observation.name)), el("td", { title: source }, el("bdi", {}, fileName(source))));
  };

  // ``rank``: where an entry stands in the table; ``sites``: its site by its place, null where there is no such column.
  const start = (entries, rank, sites) => {
    const table = document.getElementById("heads");
    const button = document.getElementById("more");
    if (!button) return;
    attnDiag.table.lengthen(table, () => {
      const known = [...table.tBodies[0].rows];
      const places = new Set(known.map((line) => line.querySelector("a").getAttribute("href").slice(1)));
      const others = entries.filter((entry) => !places.has(entry.place)).sort((a, b) => rank(a) - rank(b));
      return [...known, ...others.map((entry) => row(entry, sites))];
    }, button);
  };

  return { start };
})();
