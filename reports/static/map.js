// The map of heads: colour by a metric, choose by click or keyboard.
attnDiag.map = (() => {
  const { el, theme, options } = attnDiag;
  const { metrics, dimensions, name, judged, kinds, ranks, severalRanks, fileName } = attnDiag.entries;
  const { labels, calm } = attnDiag.vocabulary;

  // More cells than this are drawn as a picture.
  const MANY = 1000;
  // A cell so wide has room for "L rank 2", and one so wide for "L r2".
  const WORD = 64;
  const SHORT = 34;

  const start = (entries, onChoose, first) => {
    const card = document.getElementById("overview");
    const place = document.getElementById("map");
    const { all, rows, chosen } = dimensions(entries);
    const state = { metric: null, picked: {}, current: first, focus: null };
    let grid = null;
    let cells = [];
    let axes = null;
    let chart = null;

    const visible = () => entries.filter((e) => chosen.every((key) => all[key].of(e) === state.picked[key]));

    // Cells by row and column of what is chosen.
    const arrange = () => {
      const seen = visible();
      const columns = [...new Set(seen.map((e) => e.head.head))].sort((a, b) => a - b);
      const present = new Set(seen.map(all[rows].of));
      const names = all[rows].values.filter((value) => present.has(value));
      cells = seen.map((entry) => ({ entry, row: names.indexOf(all[rows].of(entry)), column: columns.indexOf(entry.head.head) }));
      axes = { columns, names };
    };
    const cellAt = (row, column) => cells.find((c) => c.row === row && c.column === column);
    const cellOf = (entry) => cells.find((c) => c.entry === entry);

    const ranked = severalRanks(entries);
    const value = (entry) => (judged(entry) || state.metric.named ? state.metric.value(entry) : null);
    const position = (entry) => {
      const v = value(entry);
      return v === null ? null : state.metric.at(v, entry);
    };
    const owners = (entry) => (ranked ? ranks(entry) : []);
    const labelsOf = (entry) => [...kinds(entry).map((kind) => labels[kind][1]), owners(entry).length ? `rank ${owners(entry).join(", ")}` : null].filter(Boolean).join(", ") || "no verdict";
    const spoken = (entry) => `${name(entry)}, ${entry.observation.name}: ${judged(entry) ? `${state.metric.title} ${state.metric.show(value(entry))}, ` : ""}${labelsOf(entry)}`;

    const option = () => {
      const narrow = place.clientWidth < 560;
      const { named } = state.metric;
      const known = cells.map((c) => position(c.entry)).filter((x) => x !== null);
      let low = Math.min(...known);
      let high = Math.max(...known);
      if (!known.length) [low, high] = [0, 1];
      if (state.metric.diverging) {
        // At least to p = 0.001, so that chance does not look like a finding.
        high = Math.max(3, Math.abs(low), Math.abs(high));
        low = -high;
      } else if (state.metric.ends10) [low, high] = [Math.min(low, state.metric.ends10[0]), Math.max(high, state.metric.ends10[1])];
      else if (low === high) [low, high] = [low - 0.5, high + 0.5];
      const colors = state.metric.diverging ? theme.signs() : theme.magnitude;
      const at = (x) => (x - low) / (high - low);
      const small = axes.columns.length > (narrow ? 6 : 14);
      const rowHeight = cellHeight();
      const data = cells.map((cell, index) => {
        const x = position(cell.entry);
        const fill = x === null ? theme.color("empty") : named ? verdict(cell.entry) : theme.along(colors, at(x));
        const focused = cell === state.focus && keyed();
        const current = cell.entry === state.current;
        return {
          // ECharts draws no cell without a number; an unknown one has a colour of its own.
          value: [cell.column, cell.row, x ?? low],
          // By number: ECharts copies all that it is given, and a whole diagnosis hangs on a cell.
          index,
          itemStyle: { color: fill, borderColor: focused ? theme.color("second") : current ? theme.color("ink") : theme.color("card"), borderWidth: focused || current ? 3 : 2, borderRadius: 4 },
          label: { show: !small || named, color: x === null ? theme.color("soft") : named ? theme.color(`t-${value(cell.entry)}`) : theme.readable(fill), fontSize: 10.5, fontFamily: theme.font(), formatter: () => short(cell.entry) },
          z: focused || current ? 3 : 1,
        };
      });
      // The chosen and the focused cell last, so that their borders lie on top.
      data.sort((a, b) => a.z - b.z);
      const end = (x) => (named ? "" : state.metric.ends ? (x === high ? state.metric.ends[1] : state.metric.ends[0]) : state.metric.show(state.metric.back(x)));
      const axisOf = (label, names, extra) => options.axis({ label, names, log: false }, extra);
      const labels = axes.names.map((n) => (n.length > 18 ? `${n.slice(0, 17)}…` : n || " "));
      return {
        animation: false,
        textStyle: { fontFamily: theme.font() },
        aria: { enabled: true, label: { description: `Map of ${cells.length} heads by ${state.metric.title}` } },
        grid: { left: 4, right: 4, top: 4, height: rowHeight * axes.names.length, containLabel: false, ...gridSides(labels) },
        tooltip: options.tooltip({
          formatter: ({ data: { index } }) => hover(cells[index]),
        }),
        xAxis: axisOf("head", axes.columns.map(String), { nameGap: 22, splitLine: { show: false }, axisLabel: { ...options.textStyle(), interval: narrow && axes.columns.length > 8 ? "auto" : 0 } }),
        yAxis: axisOf(axes.names.length > 1 && rows === "layer" ? "layer" : "", labels, { inverse: true, splitLine: { show: false }, nameGap: 26 }),
        visualMap: {
          show: known.length > 0 && !named, type: "continuous", min: low, max: high, dimension: 2, calculable: false, orient: "horizontal", left: 0, bottom: 0,
          itemHeight: 150, itemWidth: 9, text: [end(high), end(low)], textStyle: options.textStyle(), inRange: { color: colors }, seriesIndex: 99, hoverLink: false,
        },
        series: [{ type: "heatmap", data, emphasis: { itemStyle: { borderColor: theme.color("ink") } } }],
      };
    };
    // A press of the mouse focuses too; drawing anew between press and release would lose the click.
    const keyed = () => Boolean(grid?.matches(":focus-visible"));
    const hover = ({ entry }) => options.lines(name(entry), [
      judged(entry) ? `${state.metric.title}: ${state.metric.show(value(entry))}` : "no verdict: the assumptions do not hold",
      labelsOf(entry),
      `${entry.observation.name}, ${fileName(entry.capture.source)}`,
    ]);
    const short = (entry) => {
      const v = value(entry);
      if (v === null) return "";
      if (state.metric.named) return marked(entry);
      return state.metric.show === attnDiag.numbers.percent ? attnDiag.numbers.number(100 * v, 2) : attnDiag.numbers.number(v, 2);
    };
    const verdict = (entry) => {
      const color = theme.color(`v-${value(entry)}`);
      return theme.along([color, color], 0);
    };
    // Of every finding, the gravest first.
    const letters = (found) => Object.entries(labels).filter(([label]) => found.includes(label) && (!calm.includes(label) || found.length === 1)).map(([, [letter]]) => letter).join("");
    const room = () => gridSides(axes.names).width / axes.columns.length;
    const marked = (entry) => {
      const owner = owners(entry).join(",");
      const before = !owner || room() < SHORT ? "" : room() < WORD ? " r" : " rank ";
      return letters(kinds(entry)) + (before && before + owner);
    };
    const cellHeight = () => (axes.names.length > 16 ? 20 : axes.names.length > 4 ? 30 : 40);
    const height = () => cellHeight() * axes.names.length + (state.metric.named ? 52 : 92);
    // Few heads make no wide bricks.
    const gridSides = (labels) => {
      const left = Math.max(24, 6.4 * Math.max(...labels.map((l) => l.length)) + 12) + (axes.names.length > 1 && rows === "layer" ? 16 : 0);
      return { left, width: Math.min(place.clientWidth - left - 6, 84 * axes.columns.length) };
    };

    const refresh = () => chart.setOption(option(), { notMerge: true });
    const rearrange = () => {
      arrange();
      state.focus = cellOf(state.current) ?? cells[0];
      grid.style.height = `${height()}px`;
      chart.resize();
      refresh();
      markUsable();
    };
    const markUsable = () => {
      const known = (m) => cells.some((c) => (judged(c.entry) || m.named) && m.value(c.entry) !== null);
      for (const button of document.getElementById("metrics").children) {
        button.disabled = !known(metrics.find((m) => m.key === button.dataset.metric));
      }
      if (!known(state.metric)) setMetric(metrics.find(known) ?? state.metric);
    };

    // What the colours of verdicts mean; only those that the page has.
    const key = () => {
      // What stayed open beside a finding is drawn nowhere.
      const seen = new Set(entries.map(kinds).flatMap((found) => found.filter((kind) => found.length === 1 || !calm.includes(kind))));
      return el("span", { class: "legend" }, Object.entries(labels).filter(([label]) => seen.has(label)).map(([label, [letter, words]]) =>
        el("span", {}, el("span", { class: `swatch ${label}`, "aria-hidden": "true" }, letter), " ", el("span", {}, words))),
        entries.some((e) => owners(e).length) ? el("span", {}, "r2: rank 2") : null);
    };
    const setMetric = (metric) => {
      state.metric = metric;
      for (const button of document.getElementById("metrics").children) button.setAttribute("aria-pressed", String(button.dataset.metric === metric.key));
      document.getElementById("metric-words").replaceChildren(metric.named ? key() : metric.words);
      attnDiag.glossary.mark(document.getElementById("metric-words"));
      grid?.setAttribute("aria-label", `Heads coloured by ${metric.title}. Arrow keys move, Enter opens.`);
      if (chart) {
        grid.style.height = `${height()}px`;
        chart.resize();
        refresh();
      }
    };

    const focusOn = (cell) => {
      state.focus = cell;
      live.textContent = spoken(cell.entry);
      refresh();
    };
    const live = el("p", { class: "spoken", "aria-live": "polite" });
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const onKey = (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        onChoose(state.focus.entry);
      } else if (event.key === "Home" || event.key === "End") {
        event.preventDefault();
        focusOn(event.key === "Home" ? cells[0] : cells[cells.length - 1]);
      } else if (moves[event.key]) {
        event.preventDefault();
        const [down, right] = moves[event.key];
        // Over empty cells, to the next one there is.
        for (let r = state.focus.row + down, c = state.focus.column + right; r >= 0 && c >= 0 && r < axes.names.length && c < axes.columns.length; r += down, c += right) {
          if (cellAt(r, c)) return focusOn(cellAt(r, c));
        }
      }
      return undefined;
    };

    // Where what was chosen before does not exist together with the new choice: the first that does.
    const follow = (key) => {
      if (visible().length) return;
      const first = entries.find((e) => all[key].of(e) === state.picked[key]);
      for (const other of chosen) {
        state.picked[other] = all[other].of(first);
        choosers.querySelector(`[data-dimension="${other}"]`).value = state.picked[other];
      }
    };
    const choosers = document.getElementById("choosers");
    for (const key of chosen) {
      const select = el("select", { "data-dimension": key, onchange: () => {
        state.picked[key] = select.value;
        follow(key);
        rearrange();
      } }, all[key].values.map((v) => el("option", { value: v }, v.length > 60 ? `${v.slice(0, 59)}…` : v || "–")));
      state.picked[key] = all[key].of(first);
      select.value = state.picked[key];
      choosers.append(el("label", {}, all[key].title, select));
    }

    card.hidden = false;
    const usable = metrics.filter((m) => entries.some((e) => (judged(e) || m.named) && m.value(e) !== null));
    document.getElementById("metrics").append(...metrics.map((m) => el("button", { type: "button", "data-metric": m.key, onclick: () => setMetric(m) }, m.title)));
    setMetric(usable[0] ?? metrics.find((m) => m.key === "dq_error"));
    arrange();
    grid = el("div", { class: "grid", tabindex: 0, role: "application", onkeydown: onKey, onfocus: () => keyed() && focusOn(state.focus), onblur: () => refresh() });
    place.append(grid, live);
    grid.style.height = `${height()}px`;
    state.focus = cellOf(first);
    setMetric(state.metric);
    chart = attnDiag.charts.draw(grid, option, entries.length > MANY ? "canvas" : "svg");
    chart.on("click", ({ data }) => onChoose(cells[data.index].entry));
    // The size of cells and labels follows the card's width.
    let width = place.clientWidth;
    new ResizeObserver(() => {
      if (place.clientWidth !== width) refresh();
      width = place.clientWidth;
    }).observe(place);
    markUsable();

    // Show that ``entry`` is the chosen one; brings its capture and observation into view.
    const show = (entry) => {
      if (entry === state.current) return undefined;
      let moved = false;
      state.current = entry;
      for (const key of chosen) {
        moved ||= state.picked[key] !== all[key].of(entry);
        state.picked[key] = all[key].of(entry);
        choosers.querySelector(`[data-dimension="${key}"]`).value = state.picked[key];
      }
      if (moved) return rearrange();
      state.focus = cellOf(entry);
      return refresh();
    };
    return { show };
  };

  return { start };
})();
