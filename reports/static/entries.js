// The diagnosis as a list of entries (one head of one observation of one capture), and how the map arranges them.
attnDiag.entries = (() => {
  const { finite, number, percent } = attnDiag.numbers;
  const TESTS = { delta: "delta, total", delta_excess: "delta, excess", o_away_excess: "|O|, excess", o_excess: "O, excess" };

  const list = (diagnosis) =>
    diagnosis.captures.flatMap((capture, i) =>
      capture.observations.flatMap((observation, j) =>
        observation.heads.map((head, k) => ({ place: `c${i}o${j}h${k}`, capture, captureIndex: i, observation, head }))
          .filter((entry) => entry.head.head != null)));

  const name = ({ head }) => (head.layer == null ? `H${head.head}` : `L${head.layer}H${head.head}`);
  const judged = (entry) => entry.capture.assumptions.ok !== false;

  // The primary test with the smallest adjusted p.
  const strongest = ({ head }) => {
    const known = Object.keys(TESTS).map((test) => ({ test, estimate: head.bias[test] })).filter((t) => finite(t.estimate?.p_adjusted) !== null);
    // Adjusted values tie often.
    return known.sort((a, b) => a.estimate.p_adjusted - b.estimate.p_adjusted || a.estimate.p_value - b.estimate.p_value)[0] ?? null;
  };
  const gradient = (which) => ({ head }) => {
    const error = head.propagation[which];
    return finite(error?.relative_error) ?? finite(error?.predicted_relative_error);
  };

  // What the map can be coloured by. ``value``: the number itself; ``at``: where it stands on the colour scale, whose
  // ends do not come closer than ``ends10`` (powers of ten), so that heads which hardly differ look alike.
  const log = (value) => (value > 0 ? Math.log10(value) : null);
  const metrics = [
    { key: "dw_q", title: "dW_Q error", value: gradient("dw_q"), at: log, ends10: [-3, 0], back: (x) => 10 ** x, show: percent,
      words: "How far dW_Q is off: ‖error‖ / ‖dW_Q‖ (predicted from delta where it was not captured)." },
    { key: "dq", title: "dQ error", value: gradient("dq"), at: log, ends10: [-3, 0], back: (x) => 10 ** x, show: percent,
      words: "How far dQ is off: ‖error‖ / ‖dQ‖ (predicted from delta where it was not captured)." },
    { key: "noise", title: "Noise factor", value: (e) => finite(e.head.noise_factor), at: log, ends10: [-0.3, 1.3], back: (x) => 10 ** x, show: number,
      words: "Delta's error over what one correct rounding of O makes. About 1: the kernel is at its floor; over 2: lossy." },
    { key: "conditioning", title: "Conditioning", value: (e) => finite(e.head.conditioning), at: log, ends10: [0, 3], back: (x) => 10 ** x, show: number,
      words: "How much a relative error of delta grows on its way into dQ. 6 to 8 is ordinary." },
    { key: "bias", title: "Bias", diverging: true, value: (e) => finite(strongest(e)?.estimate.p_adjusted),
      at: (p, e) => Math.sign(strongest(e).estimate.mean) * Math.min(-Math.log10(Math.max(p, 1e-30)), 30) || 0, show: (p) => `p ${number(p, 2)}`,
      back: (x) => x, ends: ["negative mean", "positive mean"],
      words: "The smallest adjusted p of the primary tests, coloured by the sign of that mean; pale: no sign of bias." },
    { key: "repeats", title: "Repeated maxima", value: (e) => finite(e.head.row_maxima.exact.fraction), at: (x) => x, back: (x) => x, show: percent,
      words: "Rows whose maximum is repeated when scores are rounded to q's format." },
    { key: "logit", title: "Max logit", value: (e) => finite(e.head.figures?.max_logit), at: (x) => x, back: (x) => x, show: number,
      words: "The largest score of a visible key." },
  ];

  // The map's rows are whatever there are several of: layers, else steps (or files), else observations.
  // What is left with several values is chosen above the map.
  const fileName = (source) => source.split("/").pop() || source;
  const distinct = (values) => [...new Set(values)];
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

  return { TESTS, list, name, judged, strongest, metrics, dimensions, fileName };
})();
