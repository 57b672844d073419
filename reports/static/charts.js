// Charts on the page: drawn, redrawn when colours or sizes change, and saved.
attnDiag.charts = (() => {
  const { el, theme } = attnDiag;
  const drawn = new Map();

  // Draw ``option(width)`` in ``place`` and keep it current: it is called again when the colours or the width change.
  // Thousands of shapes are drawn as one picture ("canvas"): as elements they take seconds.
  const draw = (place, option, renderer = "svg") => {
    const width = place.clientWidth;
    const made = option(width);
    const chart = echarts.init(place, null, { renderer });
    chart.setOption(made);
    drawn.set(place, { chart, option, width });
    sizes.observe(place);
    return chart;
  };

  // A figure that is drawn when it comes near the screen (or the printer): a long page opens at once.
  const figure = (chart, { wide = false, height = 250 } = {}) => {
    const place = el("div", { class: "chart" });
    place.style.height = `${height}px`;
    const option = (width) => {
      place.style.height = `${height + attnDiag.options.extra(chart, width)}px`;
      return attnDiag.options.of(chart, width);
    };
    const first = () => {
      const made = draw(place, option);
      // A cell of a map leads to what is told of it elsewhere on the page.
      if (chart.map?.places?.length) made.on("click", ({ data }) => data.place && (location.hash = data.place));
      return made;
    };
    const ready = () => drawn.get(place)?.chart ?? first();
    const button = (text, what, action) => el("button", { type: "button", class: "quiet", "aria-label": `Save ${chart.title} as ${what}`, onclick: action }, text);
    const tools = [
      button("SVG", "SVG", () => attnDiag.export.saveSvg(chart.name, ready())),
      button("CSV", "CSV", () => attnDiag.export.saveCsv(chart)),
    ];
    const made = el("figure", { class: wide ? "wide" : null, "data-chart": chart.name },
      el("div", { class: "figure-head" }, el("h3", {}, chart.title), tools), place, el("figcaption", {}, chart.caption));
    waiting.set(place, ready);
    nearby.observe(place);
    return made;
  };

  const waiting = new Map();
  const nearby = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) if (isIntersecting) drawNow(target);
  }, { rootMargin: "600px" });
  const drawNow = (place) => {
    nearby.unobserve(place);
    waiting.get(place)?.();
    waiting.delete(place);
  };

  const sizes = new ResizeObserver((seen) => {
    for (const { target } of seen) {
      const kept = drawn.get(target);
      if (!kept || !target.clientWidth) continue;
      const changed = kept.width !== target.clientWidth;
      if (changed) renew(kept, target.clientWidth);
      kept.chart.resize();
    }
  });

  // Charts within an element that is about to go.
  const dispose = (within) => {
    for (const map of [drawn, waiting]) {
      for (const [place, kept] of map) {
        if (!within.contains(place)) continue;
        nearby.unobserve(place);
        sizes.unobserve(place);
        kept.chart?.dispose();
        map.delete(place);
      }
    }
  };

  const renew = (kept, width) => {
    kept.width = width;
    kept.chart.setOption(kept.option(width), { notMerge: true });
  };
  const redraw = () => drawn.forEach((kept, place) => renew(kept, place.clientWidth));
  theme.onChange(redraw);
  matchMedia("print").addEventListener("change", () => [...waiting.keys()].forEach(drawNow));
  addEventListener("beforeprint", () => [...waiting.keys()].forEach(drawNow));

  return { draw, figure, dispose };
})();
