
"use strict";
// Curves over the steps of one or several runs: what the x-axis counts, smoothing, and zoom, the same for
// all charts of a page. Runs: [{ name, series: { step, tokens, elapsed_s, loss, … } }].
const curves = (() => {
  const { $, style, number, grouped, short, add, chart, axis, options, legend, curve } = page;
  const AXES = {
    step: ["step", grouped], tokens: ["tokens", short],
    elapsed_s: ["time in steps", (s) => s < 120 ? `${number(s, s < 10 ? 1 : 0)} s` : s < 7200 ? `${number(s / 60, 0)} min` : `${number(s / 3600, 1)} h`],
  };
  const COLORS = ["first", "wait", "transfer", "experts", "gemm", "good", "muted", "ink"];
  const WIDTHS = [0, 0.01, 0.02, 0.05, 0.1];  // of the window, as a share of the points
  const state = { x: "step", isLog: false, isLogX: false, width: 2, range: null, hidden: new Set() };
  let redraw = () => {}, isReady = false;

  // Mean over a window that is centred at each point, and narrower at the ends: without lag.
  function smooth(values) {
    const half = Math.floor(WIDTHS[state.width] * values.length / 2);
    const sums = [0], counts = [0];
    for (const value of values) {
      sums.push(sums.at(-1) + (value ?? 0));
      counts.push(counts.at(-1) + (value != null));
    }
    return values.map((value, i) => {
      if (value == null) return null;
      const reach = Math.min(half, i, values.length - 1 - i);
      return (sums[i + reach + 1] - sums[i - reach]) / (counts[i + reach + 1] - counts[i - reach]);
    });
  }

  const hasAxis = (runs, name) => runs.every(({ series }) => series[name]?.some((x) => x != null));
  const axisOf = (runs) => hasAxis(runs, state.x) ? state.x : "step";
  const color = (i) => style(COLORS[i % COLORS.length]);
  const dash = (i) => i < COLORS.length ? undefined : [6, 3];

  // Points of `values` on the chosen axes.
  function points(runs, run, values) {
    const xs = run.series[axisOf(runs)];
    return values.map((y, i) => ({ x: xs[i], y })).filter(({ x }) => x != null && (!state.isLogX || x > 0));
  }

  function xScale(runs) {
    const name = axisOf(runs), [title, format] = AXES[name];
    const all = runs.flatMap(({ series }) => [series[name].find((x) => x != null && (!state.isLogX || x > 0)), series[name].findLast((x) => x != null)]);
    const [min, max] = state.range ?? [Math.min(...all), Math.max(...all)];
    const marks = max / min > 30 ? [1] : [1, 2, 5], mantissa = (x) => Number((x / 10 ** Math.floor(Math.log10(x) + 1e-9)).toFixed(3));
    return axis(title, { type: state.isLogX ? "logarithmic" : "linear", min, max, ticks: { maxTicksLimit: 9,
      callback: (x) => state.isLogX && !marks.includes(mantissa(x)) ? null : format(x) } });
  }

  function tooltip(runs, label) {
    const name = axisOf(runs);
    return { callbacks: { title: (items) => items.length ? `${name === "step" ? "step " : ""}${AXES[name][1](items[0].parsed.x)}${name === "tokens" ? " tokens" : ""}` : "", label } };
  }

  // Names of runs switch all their curves.
  function runLegend(runs) {
    if (runs.length === 1) return legend();
    return { ...legend(), labels: { ...legend().labels, filter: (item, data) => data.datasets[item.datasetIndex].isNamed },
      onClick: (_, item, { chart: { data } }) => {
        const { run } = data.datasets[item.datasetIndex];
        if (!state.hidden.delete(run)) state.hidden.add(run);
        redraw();
      } };
  }
  function set(run, label, data, lineColor, extra) {
    return curve(label, data, lineColor, { run: run.name, hidden: state.hidden.has(run.name), ...extra });
  }

  // A logarithmic axis begins below the least loss, not at a power of ten.
  function lossRange(sets) {
    if (!state.isLog) return { type: "linear" };
    const losses = sets.flatMap(({ data }) => data.map(({ y }) => y)).filter((y) => y > 0);
    return losses.length ? { type: "logarithmic", min: 0.95 * losses.reduce((a, b) => Math.min(a, b)) } : { type: "logarithmic" };
  }

  // Loss of all runs; `more`: curves of one run's report, in its steps.
  function lossChart(runs, more = () => []) {
    const isOne = runs.length === 1, sets = [];
    runs.forEach((run, i) => {
      const { loss, validation_loss: validation } = run.series, held = points(runs, run, validation).filter(({ y }) => y != null);
      const units = run.validation_unit ? `, nats per ${run.validation_unit}` : "";
      sets.push(set(run, isOne ? state.width ? "training, smoothed" : "training" : run.name, points(runs, run, smooth(loss)),
        color(i), { isNamed: true, borderDash: dash(i) }));
      if (held.length) {
        sets.push(set(run, isOne ? `validation${units}` : `${run.name}, validation${units}`, held, isOne ? style("good") : color(i),
          { pointRadius: held.length > 40 ? 0 : 3, borderDash: isOne ? undefined : [2, 3] }));
      }
      if (isOne && state.width) sets.push(set(run, "training, each step", points(runs, run, loss), style("soft"), { borderWidth: 1 }));
    });
    if (isOne && axisOf(runs) === "step") sets.push(...more());
    chart("loss", { type: "line", data: { datasets: sets }, options: options({ parsing: false, scales: { x: xScale(runs),
      y: axis("nats per token", { ...lossRange(sets), ticks: { callback: (y) => Number(y.toPrecision(3)) } }) },
      interaction: { mode: "nearest", axis: "x", intersect: false }, layout: { padding: { right: 8 } },
      plugins: { legend: runLegend(runs), decimation: { enabled: true, algorithm: "min-max" },
        tooltip: tooltip(runs, (item) => `${item.dataset.label}: ${number(item.parsed.y)} nats (${number(item.parsed.y / Math.LN2)} bits)`) } }) });
    listen("loss");
  }

  // Two curves of each run, `left` and `right` with an axis of its own: { label, key, color, show }.
  function pairChart(id, runs, left, right) {
    const sides = [left, right].filter(({ key }) => runs.some(({ series }) => series[key]?.some((v) => v != null)));
    if (!sides.length) return;
    const isOne = runs.length === 1, scales = { x: xScale(runs) };
    sides.forEach(({ label, show: format }, i) => {
      scales[`y${i}`] = axis(isOne || !i ? label : `${label}, dashed`, { beginAtZero: true, position: i ? "right" : "left", ticks: { callback: format },
        grid: { color: style("line"), drawOnChartArea: !i } });
    });
    const datasets = sides.flatMap(({ label, key, color: name }, side) => runs.filter(({ series }) => series[key]).map((run) => {
      const i = runs.indexOf(run);
      return set(run, isOne ? label : side ? `${run.name}, ${label}` : run.name, points(runs, run, run.series[key]), isOne ? style(name) : color(i),
        { borderWidth: 1.5, yAxisID: `y${side}`, isNamed: isOne || !side, side, borderDash: isOne ? undefined : side ? [2, 3] : dash(i) });
    }));
    chart(id, { type: "line", data: { datasets }, options: options({ parsing: false, scales,
      interaction: { mode: isOne ? "index" : "nearest", axis: "x", intersect: false },
      plugins: { legend: { ...runLegend(runs), display: datasets.length > 1 }, decimation: { enabled: true, algorithm: "min-max" },
        tooltip: tooltip(runs, (item) => `${item.dataset.label}: ${sides[item.dataset.side].show(item.parsed.y)}`) } }) });
    listen(id);
  }

  function zoom(range) {
    state.range = range;
    redraw();
  }

  // A drag chooses a range of x, a double click or Escape all of it; keys: + and − zoom, arrows move.
  const shown = new Map();
  function listen(id) {
    const canvas = $(id), isNew = !shown.has(id);
    shown.set(id, Chart.getChart(canvas));
    if (!isNew) return;
    const now = () => shown.get(id).scales.x, box = add(canvas.parentElement, "div", null, "zoom-box");
    box.hidden = true;
    let from = null;
    const at = (event) => Math.max(now().left, Math.min(now().right, event.clientX - canvas.getBoundingClientRect().left));
    const mark = (to) => {
      const { top, bottom } = shown.get(id).chartArea;
      Object.assign(box.style, { left: `${Math.min(from, to)}px`, width: `${Math.abs(to - from)}px`, top: `${top}px`, height: `${bottom - top}px` });
      box.hidden = Math.abs(to - from) < 5;
    };
    canvas.tabIndex = 0;
    canvas.classList.add("zooms");
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.offsetY < shown.get(id).chartArea.top) return;
      from = at(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => { if (from != null) mark(at(event)); });
    canvas.addEventListener("pointercancel", () => { from = null; box.hidden = true; });
    canvas.addEventListener("pointerup", (event) => {
      if (from == null) return;
      const ends = [from, at(event)].sort((a, b) => a - b), isDrag = !box.hidden;
      from = null;
      box.hidden = true;
      if (isDrag) zoom(ends.map((pixel) => now().getValueForPixel(pixel)));
    });
    canvas.addEventListener("dblclick", () => zoom(null));
    canvas.addEventListener("keydown", (event) => {
      const { left, right } = now(), wide = right - left, to = (a, b) => zoom([left + a * wide, left + b * wide].map((pixel) => now().getValueForPixel(pixel)));
      if (event.key === "+" || event.key === "=") to(0.25, 0.75);
      else if (event.key === "-") to(-0.5, 1.5);
      else if (event.key === "ArrowLeft" && state.range) to(-0.2, 0.8);
      else if (event.key === "ArrowRight" && state.range) to(0.2, 1.2);
      else if (event.key === "Escape") zoom(null);
      else return;
      event.preventDefault();
    });
  }

  // Fills the controls, and calls `draw` whenever one changes.
  function controls(runs, draw) {
    redraw = draw;
    const select = $("curve-x"), names = Object.keys(AXES).filter((name) => name === "step" || hasAxis(runs, name));
    if ([...select.options].map(({ value }) => value).join() !== names.join()) {
      select.replaceChildren();
      for (const name of names) add(select, "option", { step: "steps", tokens: "tokens", elapsed_s: "time" }[name]).value = name;
      if (!names.includes(state.x)) state.x = "step";
      select.value = state.x;
    }
    $("curve-reset").hidden = !state.range;
    if (isReady) return;
    isReady = true;
    select.addEventListener("change", () => { state.x = select.value; zoom(null); });
    for (const [id, key] of [["curve-log", "isLog"], ["curve-log-x", "isLogX"]]) {
      $(id).addEventListener("change", () => { state[key] = $(id).checked; zoom(key === "isLogX" ? null : state.range); });
    }
    $("curve-smooth").addEventListener("input", () => { state.width = Number($("curve-smooth").value); redraw(); });
    $("curve-reset").addEventListener("click", () => { zoom(null); $("loss").focus(); });
  }

  return { smooth, points, lossChart, pairChart, controls, state, color };
})();
