// The diagnosis as a list of entries (one head of one observation of one capture), and how the map arranges them.
attnDiag.entries = (() => {
  const { finite, number, percent, times } = attnDiag.numbers;
  const { tests, quantities, labels, calm } = attnDiag.vocabulary;
  const distinct = (values) => [...new Set(values)];

  // The page's diagnosis, what completes a head of it with what its figures show, and where an entry ranks (0: worst).
  const read = async (id) => {
    const data = attnDiag.data(id);
    if (!data.gzip) return { diagnosis: data, complete: async () => {}, rank: () => 0 };
    const { diagnosis, ranked, together, ...whole } = await attnDiag.unzipped(data.gzip);
    const heads = attnDiag.unpacked(whole.heads);
    let used = 0;
    for (const observation of diagnosis.captures.flatMap((capture) => capture.observations)) {
      observation.heads = heads.slice(used, used += observation.heads);
    }
    const rank = new Map(ranked.map((index, i) => [heads[index], i]));
    const packed = data.details.length * together;
    const parts = new Map();
    const unpack = async (part) => {
      const found = attnDiag.unpacked(await attnDiag.unzipped(data.details[part]));
      found.forEach(({ drift, ...rest }, i) => {
        const head = heads[ranked[part * together + i]];
        Object.assign(head, rest);
        for (const [test, points] of Object.entries(drift)) head.bias[test].drift = points;
      });
    };
    const complete = async (head) => {
      const part = Math.floor(rank.get(head) / together);
      if (part >= data.details.length) head.left_out = `This page of ${ranked.length} heads holds the figures of the worst ${packed}.`;
      else if (!parts.has(part)) parts.set(part, unpack(part));
      await parts.get(part);
    };
    return { diagnosis, complete, rank: ({ head }) => rank.get(head) };
  };

  const list = (diagnosis) =>
    diagnosis.captures.flatMap((capture, i) =>
      capture.observations.flatMap((observation, j) =>
        observation.heads.map((head, k) => ({ place: `c${i}o${j}h${k}`, capture, captureIndex: i, observation, head }))
          .filter((entry) => entry.head.head != null)));

  const name = ({ head }) => (head.layer == null ? `H${head.head}` : `L${head.layer}H${head.head}`);
  const judged = (entry) => entry.head.verdict !== null;

  // The primary test with the smallest adjusted p.
  const strongest = ({ head }) => {
    const known = Object.keys(tests).map((test) => ({ test, estimate: head.bias[test] })).filter((t) => finite(t.estimate?.p_adjusted) !== null);
    // Adjusted values tie often.
    return known.sort((a, b) => a.estimate.p_adjusted - b.estimate.p_adjusted || a.estimate.p_value - b.estimate.p_value)[0] ?? null;
  };

  // A quantity with what it is called and how it is read: ``raw`` as in the diagnosis, ``value`` where it is finite; its
  // prediction where it was not captured.
  const at = (head, path) => path.split(".").reduce((found, key) => found?.[key], head);
  const quantity = (key) => {
    const { title, path, predicted, fraction, words } = quantities[key];
    const either = (read) => ({ head }) => read(at(head, path)) ?? (predicted ? read(at(head, predicted)) : null);
    // A symbol such as dQ keeps its small letter.
    const capital = /^.[a-z]/.test(title) ? title[0].toUpperCase() + title.slice(1) : title;
    return { key, title: capital, raw: either((x) => x), value: either(finite), show: fraction ? percent : number, words };
  };

  // What the map can be coloured by. ``at``: where a value stands on the colour scale, whose ends do not come closer than
  // ``ends10`` (powers of ten), so that heads which hardly differ look alike.
  const logarithmic = (...ends10) => ({ at: (value) => (value > 0 ? Math.log10(value) : null), back: (x) => 10 ** x, ends10 });
  const linear = { at: (x) => x, back: (x) => x };
  const factor = ({ head }) => (head.quantities ?? []).map((q) => finite(q.factor)).reduce((a, b) => (b !== null && (a === null || b > a) ? b : a), null);
  // What a head is found to be: a capture that could not be compared with what it states of itself is a finding too.
  const kinds = ({ capture, head }) => head.verdict?.labels ?? (capture.assumptions.ok === false ? ["unjudged"] : []);
  const gravest = (entry) => Object.keys(labels).find((label) => kinds(entry).includes(label)) ?? null;
  // The ranks at fault, where others computed the head too; else the one that holds it. None where all share it.
  const ranks = (entry) => {
    const { capture: { metadata }, head } = entry;
    const found = kinds(entry).filter((kind) => !calm.includes(kind));
    const parts = (head.quantities ?? []).filter((q) => found.length === 1 && q.answer === found[0]).map((q) => q.ranks ?? []);
    if (parts.length && parts.every((part) => part.length)) return distinct(parts.flat());
    if (metadata.rank_of_heads) return metadata.rank_of_heads.split(",").slice(head.head - Number(metadata.head_offset ?? 0)).slice(0, 1);
    return metadata.rank == null ? [] : [metadata.rank];
  };
  const severalRanks = (entries) => distinct(entries.flatMap((e) => (e.capture.metadata.ranks ?? e.capture.metadata.rank ?? "").split(",")).filter(Boolean)).length > 1;
  const metrics = [
    { key: "verdict", title: "Verdict", named: true, value: gravest, at: (label) => Object.keys(labels).indexOf(label), show: (label) => labels[label][1], words: "" },
    { key: "factor", title: "× well-rounded", raw: factor, value: factor, show: times, ...logarithmic(-0.1, 1),
      words: "The largest of its quantities' errors over a well-rounded kernel's: up to 1.1 is as good, above 1.25 lossy." },
    { ...quantity("dw_q_error"), ...logarithmic(-3, 0) },
    { ...quantity("dq_error"), ...logarithmic(-3, 0) },
    { ...quantity("noise_factor"), ...logarithmic(-0.3, 1.3) },
    { ...quantity("conditioning"), ...logarithmic(0, 3) },
    { key: "bias", title: "Bias", diverging: true, value: (e) => finite(strongest(e)?.estimate.p_adjusted),
      at: (p, e) => Math.sign(strongest(e).estimate.mean) * Math.min(-Math.log10(Math.max(p, 1e-30)), 30) || 0, show: (p) => `p ${number(p, 2)}`,
      back: (x) => x, ends: ["negative mean", "positive mean"],
      words: "The smallest adjusted p of the primary tests, coloured by the sign of that mean; pale: no sign of bias." },
    { ...quantity("repeated_maxima"), ...linear },
    { ...quantity("max_logit"), ...linear },
  ];

  // The map's rows are whatever there are several of: layers, else steps (or files), else observations.
  // What is left with several values is chosen above the map.
  const fileName = (source) => source.split("/").pop() || source;
  const dimensions = (entries) => {
    const steps = distinct(entries.map((e) => e.captureIndex));
    const layers = distinct(entries.map((e) => e.head.layer));
    // Files of one step (a file a layer) belong together; files that would stand on the same cell do not.
    const cells = (group) => (e) => `${group(e)}/${e.observation.name}/${e.head.layer}/${e.head.head}`;
    const byStep = (e) => (e.capture.metadata.step == null ? "" : `step ${e.capture.metadata.step}`);
    const byFile = (e) => fileName(e.capture.source);
    const byIndex = (e) => `${e.captureIndex + 1}: ${fileName(e.capture.source)}`;
    const unique = (group) => distinct(entries.map(cells(group))).length === entries.length;
    const group = [byStep, byFile].find(unique) ?? byIndex;
    const all = {
      layer: { title: "layer", of: (e) => (e.head.layer == null ? "" : String(e.head.layer)), values: layers },
      group: { title: "capture", of: group, values: distinct(entries.map(group)) },
      observation: { title: "observation", of: (e) => e.observation.name, values: distinct(entries.map((e) => e.observation.name)) },
    };
    all.layer.values = distinct(entries.map(all.layer.of)).sort((a, b) => Number(a) - Number(b));
    const rows = all.layer.values.length > 1 ? "layer" : steps.length > 1 && all.group.values.length > 1 ? "group" : all.observation.values.length > 1 ? "observation" : "layer";
    const chosen = ["group", "observation"].filter((key) => key !== rows && all[key].values.length > 1);
    return { all, rows, chosen };
  };

  return { read, list, name, at, judged, kinds, ranks, severalRanks, strongest, factor, quantity, metrics, dimensions, fileName };
})();
