// One element of O under the microscope: the decisive addition, bit by bit.
attnDiag.microscope = (() => {
  const { el } = attnDiag;
  const { signed } = attnDiag.numbers;
  const { steps } = attnDiag.vocabulary;
  const step = (site) => steps[`${site.name}/${site.step}`] ?? `${site.name}, ${site.step}`;
  const pretty = (label) => label.replaceAll("P_bar", "P̄").replaceAll("O_bar", "Ō");
  const plain = (value) => (typeof value === "number" ? String(Number(value.toPrecision(9))).replaceAll("-", "−") : String(value));

  // Bits before the bar are kept by the format, those behind decide.
  const digits = (negative, aligned) => {
    const [kept, ...cut] = aligned.split("|");
    return el("td", { class: "digits" }, negative ? "−" : " ", el("span", { class: "kept" }, kept), cut.length ? el("span", { class: "cut" }, `|${cut.join("|")}`) : null);
  };

  const addition = (a) => {
    const row = (label, value, exponent, negative, aligned, kind) =>
      el("tr", { class: kind }, el("th", { scope: "row" }, label), el("td", {}, plain(value)), el("td", {}, exponent == null ? "–" : String(exponent).replace("-", "−")), digits(negative, aligned));
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Bits of the addition" }, el("table", { class: "bits" },
      el("thead", {}, el("tr", {}, ["operand", "value", "2^", "bits, aligned"].map((t, i) => el("th", { scope: "col", class: i === 3 ? "text" : null }, t)))),
      el("tbody", {},
        a.operands.map((o) => row(`${o.residual ? "residual: " : ""}${pretty(o.label)}`, o.value, o.exponent, o.negative, o.aligned)),
        row("exact sum", a.exact, a.exponent, a.exact < 0, a.exact_aligned, "sum"))));
  };

  const decided = (a) => {
    const tie = a.tie === "exact" ? "a tie: to even" : a.tie === "broken" ? `a tie of the main operands, broken by the residual ${signed(a.residual, 4)}` : `no tie (${signed(a.from_tie, 3)} from half-way)`;
    const carry = a.carry > 0 ? `carry of ${a.carry}` : a.carry < 0 ? `cancellation of ${-a.carry} bits` : "no carry";
    const alone = a.without_residual;
    return el("div", { class: "decided" },
      el("p", {}, el("b", {}, `Rounds to ${plain(a.rounded)}, ${a.direction}`), `: error ${signed(a.error, 6)}.`),
      el("p", {}, `${carry}; kept `, el("code", {}, a.kept), `, guard ${a.guard}, round ${a.round_bit}, sticky ${a.sticky}: ${tie}. Neighbours ${plain(a.toward_zero)} and ${plain(a.away)}.`),
      alone ? el("p", {}, `Without the residual ${plain(alone.exact)} would round to ${plain(alone.rounded)}${alone.tie ? ", a tie, to even" : ""}, error ${signed(alone.error, 4)}.`) : null);
  };

  const view = (m) => {
    const site = m.decisive == null ? null : m.sites[m.decisive];
    const what = m.observed == null ? "of the recipe" : `of ${m.observation}`;
    return [
      el("p", {}, `O[${m.row}, ${m.feature}], ${m.chosen}: the error ${what} is ${signed(m.error, 3)} = ${signed(m.error / m.ulp, 3)} ulp. `,
        `Walked through recipe ${m.recipe}, whose emulation ${m.bit_equal ? "agrees bit for bit" : `has ${plain(m.emulated)} instead of ${plain(m.walked)}`}.`),
      m.observed != null && m.observed !== m.walked ? el("p", {}, "The captured kernel did not do here what the recipe does: what follows is the recipe's.") : null,
      ...(m.addition && site ? [
        el("h3", {}, `${Math.abs(m.before_sum) > Math.abs(site.contribution) ? "Largest rounding of the sum (more was lost before it)" : "The decisive rounding"}: ${step(site)}${site.keys ? `, keys ${site.keys[0]} to ${site.keys[1] - 1}` : ""}, to ${m.addition.format}`),
        addition(m.addition), decided(m.addition)] : [el("p", {}, "The recipe rounds nothing in this sum.")]),
      m.closed_form ? el("p", {}, pretty(m.closed_form.statement)) : null,
    ];
  };

  return { view };
})();
