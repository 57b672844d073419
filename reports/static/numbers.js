// Numbers as the page shows them; the terminal report's words, in JavaScript.
attnDiag.numbers = (() => {
  const DASH = "–";

  // A number of the diagnosis: null where unknown or not finite (in JSON those are strings).
  const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

  // "NaN" and "Infinity" are shown as what they are.
  const number = (value, digits = 3) => {
    if (value == null) return DASH;
    if (typeof value === "string") return value;
    if (value === 0) return "0";
    const size = Math.abs(value);
    const text = size >= 1e5 || size < 1e-4 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
    return text.replace(/\.?0*e\+?/, "e").replace("-", "−").replace("e-", "e−");
  };

  const percent = (value) => (finite(value) === null ? number(value) : `${number(100 * value)} %`);
  // A factor over another error, with as many digits as the terminal report gives it.
  const times = (value) => {
    const known = finite(value);
    if (known === null || known < 0.01 || known >= 1e5) return number(value);
    return known.toFixed(known < 9.995 ? 2 : known < 99.95 ? 1 : 0);
  };
  const signed = (value, digits = 2) => (finite(value) !== null && value > 0 ? `+${number(value, digits)}` : number(value, digits));
  return { DASH, finite, number, percent, signed, times };
})();
