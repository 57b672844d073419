// A Chart (reports/charts.py) as an option of ECharts. Nothing is animated: figures are to be read.
attnDiag.options = (() => {
  const { el, theme } = attnDiag;
  const { number } = attnDiag.numbers;

  const textStyle = (color = "soft") => ({ color: theme.color(color), fontFamily: theme.font(), fontSize: 11.5 });
  const TONES = ["accent", "second", "third", "good", "fourth", "fifth", "sixth"];
  const palette = () => TONES.map(theme.color);

  const base = (chart) => ({
    animation: false,
    textStyle: { fontFamily: theme.font() },
    color: palette(),
    aria: { enabled: true, label: { description: `${chart.title}. ${chart.caption}` } },
  });

  // Tooltips are made of nodes: a string would be read as HTML.
  const tooltip = (extra) => ({
    confine: true,
    backgroundColor: theme.color("card"),
    borderColor: theme.color("line"),
    borderWidth: 1,
    padding: [7, 10],
    className: "tip",
    textStyle: textStyle("ink"),
    extraCssText: "box-shadow: 0 2px 10px rgba(0,0,0,.12); white-space: normal; max-width: 20rem;",
    ...extra,
  });
  const lines = (title, rows) => {
    const box = el("div", {}, el("b", {}, title));
    rows.forEach((row) => box.append(el("div", {}, row)));
    return box;
  };

  const axis = (given, extra = {}) => ({
    type: given.names.length ? "category" : given.log ? "log" : "value",
    name: given.label,
    nameLocation: "middle",
    nameTextStyle: textStyle(),
    axisLabel: { ...textStyle(), hideOverlap: true, ...(given.names.length ? {} : { formatter: (v) => number(v, 4) }) },
    axisLine: { show: false },
    axisTick: { show: false },
    splitLine: { show: !given.names.length, lineStyle: { color: theme.color("line"), width: 1 } },
    ...(given.names.length ? { data: given.names } : {}),
    ...(given.log ? { minorSplitLine: { show: false } } : {}),
    ...extra,
  });

  // A log axis cannot show zero or less: those points are gaps.
  const shown = (value, given) => (given.log && !(value > 0) ? null : value);

  // Rows that texts need side by side in a width, none over another: [left, right] of each, in pixels -> its row.
  const rowsOf = (spans) => {
    const ends = [];
    return spans.map(([left, right]) => {
      const free = ends.findIndex((end) => end + 6 <= left);
      const row = free < 0 ? ends.length : free;
      ends[row] = right;
      return row;
    });
  };
  const textWidth = (text) => 6.4 * text.length;

  // Where a chart's legend and marks' labels go in a width: rows of the legend, and each mark with its row and side.
  const layout = (chart, width) => {
    let [rows, filled] = [chart.series.length > 1 ? 1 : 0, 0];
    for (const { name } of rows ? chart.series : []) {
      const wide = 32 + textWidth(name);
      if (filled && filled + wide > width) [rows, filled] = [rows + 1, 0];
      filled += wide;
    }
    const xs = [...(chart.marks ?? []), ...chart.series.flatMap((s) => s.x.map((x) => ({ x })))];
    const [low, high] = xs.reduce(([a, b], { x }) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
    // The axis takes about 50 pixels.
    const inner = width - 50;
    const marks = [...(chart.marks ?? [])].sort((a, b) => a.x - b.x);
    const spans = marks.map((mark) => {
      const [at, wide] = [(inner * (mark.x - low)) / (high - low || 1), textWidth(mark.label)];
      const left = Math.max(0, Math.min(at - wide / 2, inner - wide));
      return { align: left > at - wide / 4 ? "left" : left < at - (3 * wide) / 4 ? "right" : "center", at, wide };
    });
    const START = { left: 0, center: 0.5, right: 1 };
    const places = rowsOf(spans.map(({ align, at, wide }) => [at - START[align] * wide, at + (1 - START[align]) * wide]));
    return {
      legend: rows, low, high,
      marks: marks.map((mark, i) => ({ ...mark, row: places[i], align: spans[i].align })),
      labels: Math.max(-1, ...places) + 1,
    };
  };

  // Pixels that a chart needs beyond its height: more than one row of legend, marks' labels, many bars side by side.
  const extra = (chart, width) => {
    // A name in every cell needs the height of a line; others are read by their colours.
    if (chart.map) return (chart.map.names ?? []).length ? Math.max(24 * chart.map.values.length - 180, -120) : 0;
    const { legend, labels } = layout(chart, width);
    return 19 * Math.max(legend - 1, 0) + 15 * labels + Math.max(0, 22 * chart.y.names.length - 190);
  };

  // A high band's name is on the left, out of the way of marks' labels, which more often stand on the right.
  const side = (chart, band) => {
    const top = chart.series.flatMap((s) => s.y).reduce((a, y) => (y > a ? y : a), -Infinity);
    return chart.marks?.length && band.high > 0.6 * top ? "insideStartTop" : "insideEndTop";
  };

  const guides = (chart, { marks }) => ({
    silent: true,
    markArea: {
      silent: true,
      itemStyle: { color: theme.color("band") },
      label: { show: false },
      data: chart.bands.filter((b) => b.high > b.low).map((b) => [{ yAxis: b.low, name: b.name }, { yAxis: b.high }]),
    },
    markLine: {
      silent: true,
      symbol: "none",
      // As it is: ECharts would round a line's place to two decimals.
      precision: -1,
      lineStyle: { color: theme.color("third"), type: "dashed", width: 1 },
      // Its edge keeps a name legible on the lines it lies on.
      label: { ...textStyle(), position: "insideEndTop", formatter: (p) => p.name, textBorderColor: theme.color("paper"), textBorderWidth: 3 },
      data: [
        ...chart.bands.flatMap((b) => (b.high > b.low
          ? [{ yAxis: b.high, name: b.name, label: { position: side(chart, b) } }, { yAxis: b.low, name: "" }]
          : [{ yAxis: b.low, name: b.name, label: { position: side(chart, b) } }])),
        ...marks.map((mark) => ({
          xAxis: mark.x, name: mark.label,
          lineStyle: { color: theme.color("ink"), type: "solid", width: 1, opacity: 0.7 },
          label: { position: "end", rotate: 0, align: mark.align, distance: 4 + 15 * mark.row, color: theme.color("ink") },
        })),
      ],
    },
  });

  // A colour for every series: its own, or the next that none has; dashed where colours begin again.
  const tonesOf = (chart) => {
    const free = TONES.filter((tone) => !chart.series.some((s) => s.tone === tone));
    let next = 0;
    return chart.series.map((s) => {
      if (s.tone) return { tone: s.tone, dashed: false };
      const at = next++;
      return free.length ? { tone: free[at % free.length], dashed: at >= free.length } : { tone: TONES[at % TONES.length], dashed: true };
    });
  };

  const seriesOf = (chart, sideways, arranged, tones) => (series, i) => {
    const points = series.x.map((x, k) => [shown(x, chart.x), shown(series.y[k], chart.y)]);
    const bars = series.kind === "bars";
    // The first of several lines is broad and pale: what lies on it does not hide it. Not where tones tell them apart.
    const broad = series.look === "broad" || (!i && chart.series.length > 1 && !chart.series.some((s) => s.tone || s.look));
    const faint = series.look === "faint";
    const made = {
      name: series.name,
      type: bars ? "bar" : series.kind === "points" ? "scatter" : "line",
      data: points,
      ...(series.kind === "step" ? { step: "end" } : {}),
      ...(bars ? { barCategoryGap: sideways ? "35%" : "8%", barMinHeight: 0, ...(sideways ? { barMaxWidth: 22 } : {}) } : {}),
      symbolSize: series.kind === "points" ? 5 : 4,
      showSymbol: series.kind === "points" || points.length < 3,
      color: theme.color(tones[i].tone),
      lineStyle: { type: tones[i].dashed ? "dashed" : "solid", ...(faint ? { width: 1, opacity: 0.45 } : broad ? { width: 4.5, opacity: 0.45 } : { width: 1.6 }) },
      z: faint ? 1 : 2,
      ...(i ? {} : guides(chart, arranged)),
      silent: false,
    };
    // One series of bars around zero: colour by sign, as in the maps.
    if (bars && chart.series.length === 1 && series.y.some((y) => y < 0) && !sideways) {
      made.itemStyle = { color: (p) => theme.color(p.value[1] < 0 ? "accent" : "second") };
    }
    return made;
  };

  const hover = (chart, sideways) => (given) => {
    const items = Array.isArray(given) ? given : [given];
    if (!items.length) return "";
    const at = items[0].value[sideways ? 1 : 0];
    const of = sideways ? chart.y : chart.x;
    const title = of.names.length ? String(of.names[at] ?? at) : `${of.label} ${number(at, 6)}`;
    return lines(title, items.map((item) => `${item.seriesName}: ${number(item.value[sideways ? 0 : 1], 5)}`));
  };

  const series = (chart, width) => {
    const arranged = layout(chart, width);
    const labels = 15 * arranged.labels;
    const sideways = chart.y.names.length > 0 && chart.series.every((s) => s.kind === "bars");
    const scattered = chart.series.every((s) => s.kind === "points");
    // Bars of which no two share a place need no room side by side.
    const places = chart.series.flatMap((s) => (sideways ? s.y : s.x));
    const alone = new Set(places).size === places.length;
    const zoomable = !sideways && !chart.x.names.length;
    return {
      ...base(chart),
      grid: { left: 8, right: 14, top: (sideways ? 10 : 30) + (arranged.legend ? 24 + 19 * (arranged.legend - 1) : 0) + labels, bottom: 26, containLabel: true },
      legend: { show: chart.series.length > 1, data: chart.series.map((s) => ({ name: s.name, ...(s.look ? { itemStyle: { opacity: 0.45 } } : {}) })), top: 0, left: 0, itemWidth: 16, itemHeight: 8, icon: scattered ? "circle" : "roundRect", textStyle: textStyle("ink") },
      tooltip: tooltip({
        trigger: scattered ? "item" : "axis",
        axisPointer: { type: chart.series.some((s) => s.kind === "bars") ? "shadow" : "line", axis: sideways ? "y" : "x", shadowStyle: { color: theme.color("band") } },
        formatter: hover(chart, sideways),
      }),
      xAxis: axis(chart.x, { nameGap: 26, scale: scattered, ...(sideways || chart.x.names.length ? {} : { min: chart.x.ends?.[0] ?? (arranged.marks.length ? arranged.low : "dataMin"), max: chart.x.ends?.[1] ?? (arranged.marks.length ? arranged.high : "dataMax"), splitLine: { show: false }, axisLabel: { ...textStyle(), hideOverlap: true, showMaxLabel: false, formatter: (v) => number(v, 6) } }) }),
      yAxis: axis(chart.y, {
        ...(sideways ? { inverse: true, name: "" } : { nameGap: 12 + labels, nameLocation: "end", nameTextStyle: { ...textStyle(), align: "left", padding: [0, 0, 0, 0] } }),
        ...(chart.y.fit ? { scale: true } : {}),
        ...(chart.y.whole ? { minInterval: 1 } : {}),
        // A band must be seen whole, whatever the walk does.
        ...(chart.bands.length && !chart.y.log && !sideways ? {
          min: (v) => Math.min(v.min, ...chart.bands.map((b) => b.low)), max: (v) => Math.max(v.max, ...chart.bands.map((b) => b.high)),
          axisLabel: { ...textStyle(), showMinLabel: false, showMaxLabel: false, formatter: (v) => number(v, 4) },
        } : {}),
      }),
      // Zoom by pinching, dragging and ctrl+wheel: a plain wheel goes on scrolling the page.
      ...(zoomable ? { dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, preventDefaultMouseMove: false, filterMode: "none" }] } : {}),
      series: chart.series.map(seriesOf(chart, sideways, arranged, tonesOf(chart))).map((s) => (alone && s.type === "bar" ? { ...s, barGap: "-100%" } : s)),
    };
  };

  // Names shown of so many rows: as many as have room one under another in the height that a map has.
  const everyRow = (count) => Math.ceil((count * 15) / 215) - 1;

  // Cells that narrow have no room for a name.
  const NAMED = 36;

  const map = (chart, width) => {
    // Where a value stands on the colour scale, behind the value itself.
    const at = (value) => (chart.map.log ? Math.log10(value) : value);
    const back = (x) => (chart.map.log ? 10 ** x : x);
    const named = (chart.map.names ?? []).length > 0;
    const all = chart.map.values.flatMap((row, i) => row.map((value, j) => ({ value: [j, i, value, value === null ? NaN : at(value)], name: named ? chart.map.names[i][j] : "", place: chart.map.places?.[i]?.[j] })));
    // A cell that has a name but no place on the scale is drawn pale.
    const cells = all.filter((c) => Number.isFinite(c.value[3]) || c.name);
    const values = cells.map((c) => c.value[3]).filter(Number.isFinite);
    // Not spread: there may be more cells than a call takes arguments.
    const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const range = chart.map.ends?.map(at) ?? (chart.map.diverging ? [-reach, reach] : [low, high]);
    const indices = (count) => Array.from({ length: count }, (_, i) => String(i));
    const columns = { ...chart.x, names: chart.x.names.length ? chart.x.names : indices(chart.map.values[0]?.length ?? 0) };
    const rows = { ...chart.y, names: chart.y.names.length ? chart.y.names : indices(chart.map.values.length) };
    const colors = chart.map.diverging ? theme.signs() : theme.magnitude;
    const room = (width - 60) / Math.max(columns.names.length, 1);
    const drawn = ({ value, name, place }) => {
      const known = Number.isFinite(value[3]);
      const fill = known ? theme.along(colors, (value[3] - range[0]) / (range[1] - range[0] || 1)) : theme.color("empty");
      const label = { show: room > NAMED, color: known ? theme.readable(fill) : theme.color("soft"), fontSize: 10.5, width: room - 4, overflow: "truncate", formatter: () => name };
      return { value: known ? value : [value[0], value[1], null, range[0]], label, place, ...(known ? {} : { visualMap: false, itemStyle: { color: fill } }) };
    };
    // One series a name, so that the legend shows and hides the cells of a name.
    const names = [...new Set(cells.map((c) => c.name))].sort((a, b) => cells.filter((c) => c.name === b).length - cells.filter((c) => c.name === a).length);
    const own = (name) => cells.filter((c) => c.name === name).map(drawn);
    const heat = { type: "heatmap", itemStyle: { borderWidth: 0 } };
    const border = { borderWidth: 1, borderColor: theme.color("card") };
    return {
      ...base(chart),
      ...(named ? { color: [theme.color("soft")], legend: { type: "scroll", data: names, top: 0, left: 0, itemWidth: 10, itemHeight: 8, icon: "roundRect", textStyle: textStyle("ink") } } : {}),
      grid: { left: 8, right: 14, top: named ? 46 : 26, bottom: 74, containLabel: true },
      tooltip: tooltip({
        formatter: (item) => lines(`${columns.label} ${columns.names[item.value[0]]}, ${rows.label} ${rows.names[item.value[1]]}`,
          [`${chart.map.label}: ${item.value[2] === null ? "not known" : number(item.value[2], 5)}`, ...(named ? [item.seriesName] : [])]),
      }),
      xAxis: axis(columns, { nameGap: 26 }),
      // The name stands above the axis, as in other charts: beside it labels of any width would need room.
      yAxis: axis(rows, { inverse: true, nameLocation: "start", nameGap: 10, nameTextStyle: { ...textStyle(), align: "left" }, axisLabel: { ...textStyle(), interval: named ? 0 : everyRow(rows.names.length) } }),
      visualMap: {
        min: values.length ? range[0] : 0, max: values.length ? range[1] : 1, dimension: 3, calculable: false, orient: "horizontal", left: "center", bottom: 0,
        itemHeight: 140, itemWidth: 10, text: [number(back(range[1])), `${chart.map.label}   ${number(back(range[0]))}`],
        textStyle: textStyle(), inRange: { color: colors },
      },
      series: named ? names.map((name) => ({ ...heat, name, data: own(name), itemStyle: border })) : [{ ...heat, data: cells.map((c) => c.value) }],
    };
  };

  // ``width``: of the place, in pixels.
  return { of: (chart, width) => (chart.map ? map(chart, width) : series(chart, width)), extra, base, axis, tooltip, lines, textStyle };
})();
