// The chosen head: its numbers, figures, microscope, tests, and where they come from.
attnDiag.head = (() => {
  const { el } = attnDiag;
  const { DASH, number, percent, signed, times } = attnDiag.numbers;
  const { name, judged, kinds, fileName, quantity } = attnDiag.entries;
  const vocabulary = attnDiag.vocabulary;

  const UNITS = "In units: ulp is the spacing of O's format, a floor what one correct rounding of O gives delta. n_eff: how many rows or clusters carry the test in effect. Detectable: the mean that would be found with 80 % power. Reference ±: what the float64 reference's own error can have added.";

  const part = (title, ...content) => el("section", { class: "part" }, el("h2", {}, title), content);
  const chip = (kind) => el("span", { class: `chip ${kind}`, "data-letter": vocabulary.labels[kind][0] }, vocabulary.labels[kind][1]);
  const chips = (entry) => (kinds(entry).length ? kinds(entry).map(chip) : el("span", { class: "chip none" }, "no verdict"));

  const keys = (entry) => {
    const known = Object.keys(vocabulary.quantities).map(quantity).map((q) => [q.title, q.show(q.raw(entry))]);
    const values = [...known, ["Rows", number(entry.head.rows_all, 6)]];
    return el("dl", { class: "keys" }, values.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))));
  };

  // Each captured quantity beside a well-rounded kernel's.
  const captured = ({ head }) => {
    const { headings, words } = vocabulary.captured;
    const line = (q) => {
      const [low, high] = q.factor_ci95 ?? [];
      const figures = [percent(q.relative_error), percent(q.relative_error_well_rounded), times(q.factor), low == null ? DASH : `${times(low)} to ${times(high)}`];
      return el("tr", {}, el("th", { scope: "row" }, vocabulary.symbols[q.quantity] ?? q.quantity), el("td", { class: "answer" }, vocabulary.labels[q.answer] ? chip(q.answer) : q.answer), figures.map((text) => el("td", {}, text)));
    };
    return el("section", { class: "part" }, el("h2", {}, "Is it as good as a well-rounded kernel?"),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Each captured quantity" }, el("table", { class: "captured" },
        el("thead", {}, el("tr", {}, headings.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, head.quantities.map(line)))),
      el("p", { class: "faint" }, words));
  };

  const tests = ({ head }) => {
    const shown = {
      signed: (value) => signed(value, 3),
      units: (value, { unit }) => `${signed(value, 3)} ${unit === "floor" ? "floors" : unit}`,
      number: (value, test, { digits }) => number(value, digits),
    };
    const cell = (test, figure) => {
      const value = head.bias[test.key]?.[figure.attribute];
      return el("td", {}, value == null ? DASH : shown[figure.form](value, test, figure));
    };
    const rows = Object.values(vocabulary.tests).map((test) =>
      el("tr", {}, el("th", { scope: "row" }, test.title), vocabulary.testFigures.map((figure) => cell(test, figure))));
    const names = ["mean error of", ...vocabulary.testFigures.map((figure) => figure.title)];
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tests of bias" }, el("table", { class: "tests" },
      el("thead", {}, el("tr", {}, names.map((n) => el("th", { scope: "col" }, n)))), el("tbody", {}, rows)));
  };

  const checked = ({ head }) => {
    const c = head.certificate;
    const held = c?.held ? "every error of the float64 reference is within its bound" : "THE BOUND IS VIOLATED";
    const rows = head.top_rows.map((r) => `${r.row} (${percent(r.share)})`).join(", ");
    const facts = [
      rows && `Rows that carry most of delta's squared error, with their share: ${rows}.`,
      head.rows_unknown && `${head.rows_unknown} rows are left out: float64 cannot say what is true there.`,
      c?.rows && `${c.rows} rows recomputed in mpmath (${c.bits} bits): ${held}.`,
    ];
    return el("ul", { class: "reasons" }, facts.filter(Boolean).map((fact) => el("li", {}, fact)));
  };

  const gradients = ({ head }) => {
    const known = Object.entries(vocabulary.gradients).filter(([key]) => head.propagation[key]?.relative_error != null);
    const items = known.map(([key, title]) => {
      const e = head.propagation[key];
      const shares = Object.entries(e.shares ?? {}).filter(([, s]) => s != null).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
      const coherence = e.coherence == null ? "" : `; coherence ${number(e.coherence)} (random signs: up to ${number(e.coherence_null95)})`;
      return el("li", {}, `${title} is ${percent(e.relative_error)} off: ${shares.map(([s, x]) => `${vocabulary.shares[s] ?? s} ${percent(x)}`).join(", ") || "–"}; unexplained ${percent(e.unexplained_fraction)} by delta alone, ${percent(e.unexplained_with_casts)} with LSE and casts${coherence}.`);
    });
    return el("ul", { class: "reasons" }, items, (head.propagation.notes ?? []).map((note) => el("li", { dir: "auto" }, note)));
  };

  const provenance = ({ capture, observation, head }) => {
    const agreement = observation.agreement == null ? "" : ` (${Math.floor(1e4 * observation.agreement) / 100} % of sampled elements bit-equal)`;
    const facts = [
      ["file", capture.source],
      ["sizes", Object.entries(capture.shape).map(([k, v]) => `${k} ${v}`).join(", ")],
      ["observation", `${observation.name}: ${observation.backend}`],
      ["recipe that reproduces O", observation.recipe ? `${observation.recipe}${agreement}` : "none that is known"],
      ["outputs", observation.outputs.join(", ")],
      ["assumptions", capture.assumptions.message],
      ["assumed by default", capture.assumptions.defaults.join(", ") || "nothing"],
      ["rows", `${head.rows_all} analysed together; ${head.rows_fully_masked} fully masked, ${head.rows_nonfinite} not finite`],
      ["delta", head.delta_source === "captured" ? "as captured" : head.delta_source === "from_o" ? "rowsum(dO ∘ O) of the captured O" : "–"],
      ...Object.entries(capture.metadata),
    ];
    return el("dl", { class: "facts" }, facts.flatMap(([key, value]) => [el("dt", { dir: "auto" }, key), el("dd", { dir: "auto" }, value)]));
  };

  const missing = ({ missing: title, needs }) => el("p", { class: "missing" }, el("b", {}, title), needs);
  const drawn = (made) => (made.chart ? attnDiag.charts.figure(made.chart, made) : missing(made));

  const microscope = (entry) => {
    const m = entry.head.microscope;
    if (!m) return [missing({ missing: "The worst addition, bit by bit", needs: entry.head.details_note ?? "Run attn-diag inspect --html FILE --details 8 for the eight worst heads, or attn-diag microscope on this capture." })];
    const curve = attnDiag.figures.prefix(entry);
    return [...attnDiag.microscope.view(m).filter(Boolean), curve ? attnDiag.charts.figure(curve.chart, { wide: true }) : null];
  };

  const show = (entry) => {
    const place = document.getElementById("head");
    attnDiag.charts.dispose(place);
    const { capture, observation, head } = entry;
    const title = el("h2", {}, `${name(entry)} `, el("bdi", {}, observation.name), chips(entry));
    const from = el("p", { class: "from" }, el("bdi", {}, fileName(capture.source)), ` · ${observation.backend}`);
    if (!judged(entry)) {
      place.replaceChildren(title, from, el("p", {}, "No verdict, and no figures: the capture contradicts what was assumed of it. ", capture.assumptions.message), part("Provenance", provenance(entry)));
    } else {
      const figures = attnDiag.figures.of(entry);
      const reasons = el("ul", { class: "reasons" }, (head.verdict?.reasons ?? []).map((r) => el("li", { dir: "auto" }, r)));
      const suggestions = el("ul", { class: "suggestions" }, (head.verdict?.suggestions ?? []).map((r) => el("li", { dir: "auto" }, r)));
      const content = [title, from, keys(entry), reasons, suggestions,
        el("div", { class: "figures" }, figures.filter((f) => f.chart).map(drawn)),
        el("div", { class: "lacking" }, figures.filter((f) => f.missing).map(drawn)),
        head.quantities?.length ? captured(entry) : null,
        head.attribution ? part("Which rounding does it", el("ul", { class: "reasons" }, head.attribution.reasons.map((r) => el("li", { dir: "auto" }, r)))) : null,
        head.microscope ? part("The worst addition, bit by bit", microscope(entry)) : microscope(entry),
        part("Is there a bias?", tests(entry), el("p", { class: "faint" }, UNITS), checked(entry)),
        part("Where the gradients' errors come from", gradients(entry)),
        part("Provenance and assumptions", provenance(entry))];
      place.replaceChildren(...content.flat().filter(Boolean));
    }
    place.hidden = false;
  };

  return { show };
})();
