// Saving: a chart as SVG, its numbers as CSV.
attnDiag.export = (() => {
  // RFC 4180. A text that a spreadsheet would take for a formula gets a quote before it; numbers stay numbers.
  const cell = (value) => {
    if (value == null) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = (rows) => rows.map((row) => row.map(cell).join(",") + "\r\n").join("");

  // A chart's numbers: one line for every x where all series share them, else a line for every point (and mark).
  const table = (chart) => {
    const name = (axis, i) => (axis.names.length ? (axis.names[i] ?? i) : i);
    if (chart.map) {
      const named = (chart.map.names ?? []).length > 0;
      const lines = chart.map.values.flatMap((row, i) => row.map((value, j) => [name(chart.y, i), name(chart.x, j), value, ...(named ? [chart.map.names[i][j]] : [])]));
      return [[chart.y.label || "row", chart.x.label || "column", chart.map.label, ...(named ? ["name"] : [])], ...lines];
    }
    const bands = chart.bands.flatMap((band) => [`${band.name}, low`, `${band.name}, high`]);
    const limits = chart.bands.flatMap((band) => [band.low, band.high]);
    const [first] = chart.series;
    const shared = first && chart.series.every((s) => s.x.length === first.x.length && s.x.every((x, i) => x === first.x[i]));
    const marks = chart.marks ?? [];
    if (shared && !chart.y.names.length && !marks.length) {
      const lines = first.x.map((x, i) => [name(chart.x, x), ...chart.series.map((s) => s.y[i]), ...limits]);
      return [[chart.x.label || "x", ...chart.series.map((s) => s.name), ...bands], ...lines];
    }
    const lines = chart.series.flatMap((s) => s.x.map((x, i) => [s.name, name(chart.x, x), name(chart.y, s.y[i]), ...limits]));
    const marked = marks.map((mark) => [`mark: ${mark.label}`, name(chart.x, mark.x), null, ...limits]);
    return [["series", chart.x.label || "x", chart.y.label || "y", ...bands], ...lines, ...marked];
  };

  const save = (text, file, type) => {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = attnDiag.el("a", { href: address, download: file });
    document.body.append(link);
    link.click();
    link.remove();
    // The browser needs the address until it has begun to save.
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };

  // A stem that every file system takes.
  const stem = (name) => name.replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, 80) || "figure";

  return {
    csv,
    table,
    saveCsv: (chart) => save(csv(table(chart)), `${stem(chart.name)}.csv`, "text/csv;charset=utf-8"),
    saveSvg: (name, drawn) => save(drawn.renderToSVGString(), `${stem(name)}.svg`, "image/svg+xml"),
  };
})();
