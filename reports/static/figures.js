// What a head's figures show: each a Chart (as in reports/charts.py), or a line that says what it would need.
attnDiag.figures = (() => {
  const { name } = attnDiag.entries;
  const { finite, number, percent } = attnDiag.numbers;
  const { symbols } = attnDiag.vocabulary;

  const axis = (label, log = false, names = []) => ({ label, log, names });
  const chart = (entry, key, title, caption, x, y, series, bands = []) => ({ name: `${name(entry)}-${entry.observation.name}-${key}`, title, caption, x, y, series, bands, map: null });
  const series = (title, x, y, kind) => ({ name: title, x, y: y.map(finite), kind });
  const missing = (title, needs) => ({ missing: title, needs });

  const drift = (key, title, what) => (entry) => {
    const estimate = entry.head.bias[key];
    const points = estimate?.drift ?? [];
    if (!points.length) return missing(title, "The capture would need O and dO (or the kernel's own delta).");
    const band = finite(estimate.drift_band99);
    const significant = (finite(estimate.p_adjusted) ?? finite(estimate.p_value) ?? 1) < 0.05;
    const outside = !estimate.drift_outside ? "It stays inside: no direction beyond chance."
      : `It leaves the band: more than unbiased, independent rows make${significant ? "" : "; yet the mean over all rows is not significant: rows that copy the same key share its rounding, which the band does not know"}.`;
    return {
      wide: key === "delta",
      chart: chart(entry, `cumulative-${key.replace("_", "-")}`, title,
        `Running sum of ${what} over the query rows. ${band === null ? "" : `An unbiased walk stays within ± ${number(band)} with probability 99 %. ${outside}`}`,
        axis("row"), axis("sum"), [series("sum", points.map((p) => p.row), points.map((p) => p.sum), "line")],
        band === null ? [] : [{ name: "99 % band", low: -band, high: band }]),
    };
  };

  const histogram = (entry) => {
    const title = "Error of O, in ulp";
    const h = entry.head.figures?.o_error;
    if (!h) return missing(title, "The capture would need O.");
    const centres = h.counts.map((_, i) => h.lowest + (i + 0.5) * h.width);
    // A category for each bin, so that bars touch; zero is the middle of a bin.
    const names = centres.map((c) => number(c));
    const outside = h.below || h.above ? ` Outside: ${h.below} below, ${h.above} above.` : "";
    return { chart: chart(entry, "o-error", title, `Elements by signed error, observed − reference. One correct rounding stays within ± 0.5 ulp.${outside}`,
      axis("ulp", false, names), axis("elements (log)", true), [series("elements", names.map((_, i) => i), h.counts, "bars")]) };
  };

  const strip = (entry) => {
    const title = "Multiplicity of the row maximum";
    const s = entry.head.figures?.strip;
    if (!s?.first_rows.length) return missing(title, "Inspect the capture again with this version: the file has no figures.");
    if (Math.max(...s.exact, ...s.unit) < 2) return missing(title, "Nothing to show: no row has a repeated maximum, neither in scores rounded to q's format nor in P̄.");
    return { wide: true, height: 190, chart: chart(entry, "multiplicity", title, "How often the maximum of a row occurs: scores rounded to q's format, and P̄ rounded to 1. Two or more is the trigger of Qiu & Yao; the largest in each group of rows is shown.",
      axis("row"), { ...axis("times"), whole: true }, [series("scores tie", s.first_rows, s.exact, "step"), series("P̄ = 1", s.first_rows, s.unit, "step")]) };
  };

  const unit = (entry) => {
    const title = "Where P̄ rounds to 1";
    const u = entry.head.figures?.unit_positions;
    if (!u) return missing(title, "Inspect the capture again with this version: the file has no figures.");
    if (!u.total) return missing(title, "Nothing to show: in no row does P̄ round to 1 more than once.");
    return { chart: chart(entry, "unit-positions", title, `Pairs of query row and key, in rows where it does so more than once; ${u.rows.length} of ${u.total}.`,
      { ...axis("row"), ends: [0, Math.max(entry.head.rows_all - 1, 1)] }, axis("key"), [series("P̄ = 1", u.rows, u.keys, "points")]) };
  };

  const alignment = (which, title, label, caption, values, bands = () => []) => (entry) => {
    const a = entry.head.figures?.alignment;
    if (!a) return missing(title, "The capture would need O and dO.");
    const features = a[values].map((_, i) => i);
    return { chart: chart(entry, which, title, caption, axis("feature"), axis(label), [series(label, features, a[values], values === "aligned" ? "points" : "bars")], bands(entry)) };
  };

  const predicted = (key, x) => (entry) => {
    const title = `Error of ${symbols[key]}, observed and predicted`;
    const g = entry.head.figures?.[key];
    if (!g) return missing(title, key === "dq" ? "The capture would need dO and O." : "The capture would need x and w_q (behind RoPE or QK-norm also dq and dq_pre).");
    const made = [
      ...(g.observed ? [series("observed", g.first, g.observed, "line")] : []),
      ...(g.predicted ? [series("from delta alone", g.first, g.predicted, "line")] : []),
      series(`‖${symbols[key]}‖`, g.first, g.reference, "line"),
    ];
    const note = g.observed ? "Where the first two lie together, delta explains the error." : `${symbols[key]} was not captured: only the prediction is known.`;
    return { chart: chart(entry, `${key.replace("_", "")}-error`, title, `Norms over groups of ${key === "dq" ? "rows" : "features of q"}, log scale. ${note} Where an error reaches the third line it is as large as the gradient.`,
      axis(x), axis("norm", true), made) };
  };

  const attribution = (entry) => {
    const title = "Which rounding makes the error";
    const found = entry.head.attribution;
    if (!found) return missing(title, entry.head.details_note ?? `Run attn-diag inspect --html FILE --details 8 for the eight worst heads, or attn-diag attribute ${entry.head.head == null ? "" : `--head ${entry.head.head} `}on this capture.`);
    const main = ["dq", "o"].find((q) => q in found.totals) ?? Object.keys(found.totals)[0];
    const sites = found.sites.filter((s) => main in s.effects).sort((a, b) => b.effects[main].share - a.effects[main].share);
    const places = sites.map((_, i) => i);
    const names = sites.map((s) => s.words);
    const made = ["dq", "dw_q", "o"].filter((q) => q in found.totals && q !== "o" || q === main)
      .map((q) => ({ name: `of ${symbols[q]}`, x: sites.map((s) => finite(s.effects[q]?.share)), y: places, kind: "bars" }));
    return { wide: true, height: 90 + 30 * sites.length, chart: chart(entry, "attribution", title,
      `Shapley shares of the squared error, which add up to 1; ${symbols[main]} is off by ${main === "delta" ? number(found.totals[main].error) : percent(found.totals[main].error)} under the emulated recipe ${found.recipe}.`,
      axis("share"), axis("", false, names), made) };
  };

  const prefix = (entry) => {
    const curve = entry.head.microscope?.curve;
    if (!curve?.points.length) return null;
    const t = curve.points.map((p) => p.position);
    const ones = curve.points.filter((p) => p.unit);
    return { chart: chart(entry, "prefix-error", "Prefix error of that sum", `Error after t visible keys, in the recipe's order, rounded to ${curve.format}; ${curve.unit_keys} of ${curve.keys} keys have P̄ = 1.`,
      axis("t"), axis("error"), [series("error", t, curve.points.map((p) => p.error), "line"), series("by rounding the sum alone", t, curve.points.map((p) => p.rounding_error), "line"), series("P̄ = 1", ones.map((p) => p.position), ones.map((p) => p.error), "points")],
      [{ name: "", low: 0, high: 0 }]) };
  };

  // A fraction of n fair coins: 0.5 ± 2.576 * 0.5 / sqrt(n) holds 99 % of them.
  const chance = ({ head }) => {
    const half = 1.288 / Math.sqrt(Math.max(head.rows_all, 1));
    return [{ name: "99 % by chance", low: 0.5 - half, high: 0.5 + half }];
  };
  const all = [
    drift("delta", "Cumulative error of delta", "delta's signed error"),
    drift("delta_excess", "Beyond correct rounding", "what delta's error exceeds one correct rounding of O by"),
    histogram,
    predicted("dq", "row"),
    predicted("dw_q", "feature"),
    strip,
    unit,
    alignment("contribution", "dO × error, by feature", "sum over rows", "What each feature adds to delta's error: orange pushes it up, blue down.", "contribution"),
    alignment("alignment", "Sign agreement of dO and the error", "fraction of rows", "In an unbiased kernel dO and the error of O share their sign in half of the rows; one feature in a hundred leaves the band by chance, if rows err independently.", "aligned", chance),
    attribution,
  ];
  const of = (entry) => {
    if (!entry.head.left_out) return all.map((make) => make(entry));
    return [missing("The figures of this head", `${entry.head.left_out} Run attn-diag inspect --html FILE on its capture alone.`)];
  };
  return { of, prefix };
})();
