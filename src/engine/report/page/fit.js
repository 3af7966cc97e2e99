"use strict";
// Curves and table of `tandem fit`.
(() => {
  const { $, style, grouped, bytes, add, charts, chart, axis, options, legend, curve, onTheme } = page;
  const runs = JSON.parse($("data").textContent);
  const { config } = runs[0];
  const COLORS = ["gemm", "wait", "transfer", "first", "experts", "good", "compute", "muted"];
  const COLUMNS = [["bytes", "bytes_sent", "bytes sent", bytes], ["rounds", "rounds", "rounds", grouped],
    ["seconds", "seconds", "seconds", (value) => value.toPrecision(3)]];
  const name = ({ method, config: { control } }) => control ? `${method} (control)` : method;

  function header() {
    $("meta").textContent = `${grouped(config.rows)} rows, ${grouped(config.features)} features, ${config.loss} loss, `
      + `l1 ${config.l1}, l2 ${config.l2.toPrecision(4)}, ${config.clients} clients on ${config.ranks} ranks`;
    $("link").textContent = config.link ? `Link between ranks: ${config.link}.` : "Ranks of this machine, no emulated link.";
    $("versions").textContent = `Made by tandem (${config.commit}). All charts and data are inside this file.`;
  }

  // Distances that a logarithmic axis can show.
  function points({ history }, key) {
    return history.filter(({ distance }) => distance > 0 && isFinite(distance)).map((point) => ({ x: point[key], y: point.distance }));
  }

  function draw() {
    charts.splice(0).forEach((each) => each.destroy());
    for (const [id, key, label, format] of COLUMNS) {
      const datasets = runs.map((run, i) => curve(name(run), points(run, key), style(COLORS[i % COLORS.length]),
        run.config.control ? { borderDash: [6, 4] } : {}));
      chart(id, { type: "line", data: { datasets }, options: options({ parsing: false, interaction: { mode: "nearest", intersect: false },
        scales: { x: axis(label, { type: "linear", min: 0, ticks: { callback: format } }),
          y: axis("distance", { type: "logarithmic", ticks: { callback: (value) => Math.log10(value) % 1 === 0 ? value.toExponential(0) : null } }) },
        plugins: { legend: legend(), tooltip: { callbacks: { title: (items) => `${format(items[0].parsed.x)} ${label}`,
          label: (item) => `${item.dataset.label}: ${item.parsed.y.toExponential(2)}` } } } }) });
    }
  }

  function table() {
    const head = add(add($("runs"), "thead"), "tr");
    ["method", "rounds", "floats up", "floats down", "bytes sent", "seconds", "distance", "bias", "objective − optimum"]
      .forEach((text) => { add(head, "th", text).scope = "col"; });
    const body = add($("runs"), "tbody");
    for (const run of runs) {
      const row = add(body, "tr");
      [name(run), grouped(run.rounds), grouped(run.floats_up), grouped(run.floats_down), bytes(run.bytes_sent), run.seconds.toPrecision(3),
        run.distance?.toExponential(2) ?? "diverged", run.bias ? run.bias.toExponential(2) : "–",
        run.objective == null ? "–" : (run.objective - run.optimum).toExponential(2)].forEach((text) => add(row, "td", text));
    }
  }

  header();
  table();
  onTheme(draw);
})();
