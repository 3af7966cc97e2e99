
"use strict";
// Knobs, charts and tables of the planner's page; `whatIf` has its state.
const whatIf = (() => {
  const { $, style, number, percent, add, axis, options, legend, onTheme } = page;
  const data = JSON.parse($("data").textContent), model = planner(data);
  const SHOWN = 8;
  const state = { knobs: { ...model.defaults }, chosen: {}, selected: 0, found: [], front: [] };
  const first = model.search(state.knobs)[0];

  const TERMS = [["compute", "gemm"], ["tp", "compute"], ["ep", "first"], ["pp", "soft"], ["dp", "transfer"],
    ["bubble", "wait"], ["imbalance", "muted"], ["optimizer", "good"], ["fixed", "rest"], ["jitter", "experts"]];
  const CHOICES = [["tp", "TP"], ["pp", "PP"], ["schedule", "Schedule"], ["vpp", "Stages per rank"], ["ep", "EP"], ["mbs", "Microbatch, sequences"],
    ["recompute", "Recomputation"], ["zero", "ZeRO stage"]];

  const ms = (seconds) => seconds >= 10 ? `${number(seconds, 2)} s` : `${number(1e3 * seconds, seconds >= 1 ? 0 : 1)} ms`;
  const name = ({ row, zero }) => `tp ${row.tp} pp ${row.pp}${row.vpp > 1 ? `×${row.vpp}` : ""}${row.pp > 1 ? ` ${row.schedule}` : ""} ep ${row.ep} dp ${row.dp} mb ${row.mbs} zero ${zero}`
    + (row.recompute === "full" ? " recompute" : "");
  const change = (step, from) => `${step >= from ? "+" : "−"}${number(100 * Math.abs(step / from - 1), 1)} %`;
  const errorName = (error) => error === 0 ? "lossless"
    : `${model.formats.filter((format) => format.error > 0 && format.error <= error).at(-1)?.name ?? "lossless"} (${(100 * error).toPrecision(2)} %)`;

  function select(id, label, values, text, change) {
    const box = add($("knobs"), "label", label), list = add(box, "select");
    list.id = id;
    values.forEach((value) => { add(list, "option", text(value)).value = JSON.stringify(value); });
    list.addEventListener("change", () => change(JSON.parse(list.value)));
    return list;
  }

  // A slider in octaves around the value at first, and the number.
  function slider(id, label, key) {
    const box = add($("knobs"), "label", label), pair = add(box, "span", null, "pair");
    const range = add(pair, "input"), field = add(pair, "input");
    Object.assign(range, { type: "range", min: -4, max: 4, step: 0.05, id: `${id}-range`, ariaLabel: `${label}, in octaves` });
    Object.assign(field, { type: "number", min: 0, step: "any", id });
    const show = () => {
      field.value = Number(state.knobs[key].toPrecision(4));
      range.value = Math.log2(state.knobs[key] / model.defaults[key]);
      range.setAttribute("aria-valuetext", field.value);
    };
    range.addEventListener("input", () => { set({ [key]: model.defaults[key] * 2 ** Number(range.value) }); show(); });
    field.addEventListener("change", () => {
      if (Number(field.value) > 0 && isFinite(field.value)) set({ [key]: Number(field.value) });
      show();
    });
    show();
    return show;
  }

  const knobs = {};
  function buildKnobs() {
    knobs.gpus = select("gpus", "GPUs", model.worlds.map(({ gpus }) => gpus), String, (gpus) => set({ gpus }));
    const refresh = [slider("host", "Link within a host, GB/s", "host"), slider("network", "Network of a GPU, GB/s", "network"),
      slider("memory-gib", "Memory of a GPU, GiB", "memory_gib")];
    const errors = [...new Set([0, ...model.formats.map(({ error }) => error), data.max_error])].sort((a, b) => a - b);
    knobs.error = select("error", "Largest error of a wire format", errors, errorName, (error) => set({ error }));
    for (const [key, label] of CHOICES) {
      knobs[key] = select(key, label, [null, ...valuesOf(key)], (value) => value ?? "any", (value) => choose(key, value));
    }
    const reset = () => {
      refresh.forEach((show) => show());
      knobs.gpus.value = JSON.stringify(state.knobs.gpus);
      knobs.error.value = JSON.stringify(state.knobs.error);
      for (const [key] of CHOICES) knobs[key].value = "null";
    };
    $("reset").addEventListener("click", () => {
      Object.assign(state, { knobs: { ...model.defaults }, chosen: {}, selected: 0 });
      reset();
      update();
    });
    reset();
  }
  function valuesOf(key) {
    const values = new Set(model.worlds.flatMap(({ rows }) => rows.flatMap((row) =>
      key === "zero" ? row.variants.map(([zero]) => zero) : [row[key]])));
    return [...values].sort((a, b) => typeof a === "number" ? a - b : a < b ? 1 : -1);
  }

  function set(knob) {
    Object.assign(state.knobs, knob);
    state.selected = 0;
    update();
  }
  function choose(key, value) {
    if (value == null) delete state.chosen[key];
    else state.chosen[key] = value;
    state.selected = 0;
    update();
  }

  function figure(value, unit, label, note) {
    const box = add($("figures"), "div", null, "figure"), strong = add(box, "b", value);
    add(strong, "small", ` ${unit}`);
    add(box, "span", label);
    add(box, "p", note);
  }

  function drawFigures(layout) {
    $("figures").replaceChildren();
    if (!layout) return;
    const limit = data.memory_share * state.knobs.memory_gib, step = ms(layout.step_s).split(" ");
    figure(step[0], step[1], "predicted step", first ? `${change(layout.step_s, first.step_s)} against the layout at first` : "");
    figure(number(layout.memory_gib, 1), "GiB", "memory of a rank", `${percent(layout.memory_gib / limit)} of the limit, ${number(limit, 1)} GiB`);
    figure(model.formatNames(layout).join(", ") || "none", "", "wire formats", `${model.codec(layout)}; error at most ${(100 * layout.error).toPrecision(2)} %`);
    const [slow] = Object.entries(layout.terms).filter(([term]) => term !== "compute").sort((a, b) => b[1] - a[1]);
    figure(percent(layout.terms.compute / layout.step_s), "", "of the step is compute", `next: ${slow[0]}, ${ms(slow[1])}`);
  }

  const drawn = {};
  function draw(id, config) {
    drawn[id]?.destroy();
    drawn[id] = new Chart($(id), config);
  }
  function drawCharts(shown) {
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    const labels = shown.map((layout, i) => i + 1), limit = data.memory_share * state.knobs.memory_gib;
    const title = (items) => name(shown[items[0].dataIndex]);
    draw("step", { type: "bar", data: { labels, datasets: TERMS.map(([term, color]) => ({ label: term,
      data: shown.map((layout) => 1e3 * layout.terms[term]), backgroundColor: style(color) })) },
    options: options({ indexAxis: "y", scales: { x: axis("step, ms", { stacked: true }), y: axis("layout", { stacked: true }) },
      plugins: { legend: legend(), tooltip: { callbacks: { title, label: (item) => `${item.dataset.label}: ${ms(item.parsed.x / 1e3)}` } } } }) });
    draw("memory", { data: { labels, datasets: [
      { type: "line", label: "limit", data: shown.map(() => limit), borderColor: style("wait"), borderWidth: 2, pointRadius: 0 },
      { type: "bar", label: "peak", data: shown.map((layout) => layout.memory_gib), backgroundColor: style("gemm") }] },
    options: options({ scales: { x: axis("layout"), y: axis("GiB", { beginAtZero: true }) },
      plugins: { legend: legend(), tooltip: { callbacks: { title, label: (item) => `${item.dataset.label}: ${number(item.parsed.y, 1)} GiB` } } } }) });
    draw("front", { type: "scatter", data: { datasets: [{ label: "layouts", pointRadius: 5, backgroundColor: style("first"),
      data: state.front.map((layout) => ({ x: layout.memory_gib, y: 1e3 * layout.step_s })) }] },
    options: options({ interaction: { mode: "nearest", intersect: false }, scales: { x: axis("memory of a rank, GiB"), y: axis("step, ms") },
      plugins: { legend: { display: false }, tooltip: { callbacks: { label: (item) => {
        const layout = state.front[item.dataIndex];
        return [name(layout), `${ms(layout.step_s)}, ${number(layout.memory_gib, 1)} GiB, ${model.codec(layout)}`];
      } } } } }) });
  }

  function pick(index, focus) {
    state.selected = index;
    show();
    if (focus) $("fastest").querySelectorAll("button")[index].focus();
  }
  function drawTable(shown) {
    const table = $("fastest");
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    ["layout", "tp", "pp", "schedule", "stages per rank", "ep", "dp", "zero", "microbatch", "microbatches", "recompute", "wire formats", "step", "memory, GiB", "slower by"]
      .forEach((text) => { add(head, "th", text).scope = "col"; });
    const body = add(table, "tbody");
    shown.forEach((layout, i) => {
      const { row } = layout, line = add(body, "tr");
      line.setAttribute("aria-selected", i === state.selected);
      const button = add(add(line, "td"), "button", i + 1);
      button.type = "button";
      button.setAttribute("aria-label", `Select layout ${i + 1}: ${name(layout)}`);
      button.addEventListener("keydown", (event) => {
        const to = i + { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (to >= 0 && to < shown.length) { event.preventDefault(); pick(to, true); }
      });
      line.addEventListener("click", (event) => pick(i, event.target === button));
      [row.tp, row.pp, row.schedule, row.vpp, row.ep, row.dp, layout.zero, row.mbs, row.m, row.recompute, model.codec(layout), ms(layout.step_s),
        number(layout.memory_gib, 1), i ? ms(layout.step_s - shown[0].step_s) : ""].forEach((text) => add(line, "td", text));
    });
  }

  // Knobs moved separately, as the table below the charts lists them.
  function moves() {
    const { knobs: now } = state, at = model.worlds.findIndex(({ gpus }) => gpus === now.gpus);
    const list = [["Network × 2", { network: 2 * now.network }], ["Network ÷ 2", { network: now.network / 2 }],
      ["Link within a host × 2", { host: 2 * now.host }], ["Link within a host ÷ 2", { host: now.host / 2 }],
      ["Memory × 1.5", { memory_gib: 1.5 * now.memory_gib }], ["Memory ÷ 1.5", { memory_gib: now.memory_gib / 1.5 }]];
    for (const other of [model.worlds[at - 1], model.worlds[at + 1]]) if (other) list.push([`${other.gpus} GPUs`, { gpus: other.gpus }]);
    for (const error of new Set(model.formats.map((format) => format.error))) {
      if (error !== now.error) list.push([`Error ${errorName(error)}`, { error }]);
    }
    return list.map(([label, knob]) => ({ label, best: model.search({ ...now, ...knob }, state.chosen)[0] }));
  }
  function drawMoves(best) {
    const table = $("moves");
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    ["knob", "step", "change", "layout"].forEach((text, i) => { add(head, "th", text, i === 3 ? "text" : null).scope = "col"; });
    const body = add(table, "tbody");
    for (const { label, best: other } of moves()) {
      const line = add(body, "tr");
      add(line, "td", label);
      add(line, "td", other ? ms(other.step_s) : "nothing fits");
      add(line, "td", other && best ? change(other.step_s, best.step_s) : "–");
      add(line, "td", !other ? "–" : best && name(other) === name(best) ? "the same" : name(other), "text");
    }
  }

  // Draws the state, of which only the selection may have changed.
  function show() {
    const shown = state.found.slice(0, SHOWN), layout = shown[state.selected];
    drawFigures(layout);
    drawTable(shown);
    drawCharts(shown);
    $("keys").textContent = layout ? model.jobKeys(layout) : "";
    $("none").hidden = shown.length > 0;
    const smallest = Math.min(...model.worlds.find(({ gpus }) => gpus === state.knobs.gpus).rows.flatMap((row) => row.variants.map((v) => v[1])));
    $("none").textContent = `No layout fits: the smallest of all needs ${number(smallest, 1)} GiB a rank, the limit is ${number(data.memory_share * state.knobs.memory_gib, 1)} GiB.`;
  }
  function update() {
    state.found = model.search(state.knobs, state.chosen);
    state.front = model.front(state.found);
    show();
    drawMoves(state.found[0]);
    const world = model.worlds.find(({ gpus }) => gpus === state.knobs.gpus);
    $("note").textContent = (world.considered < world.divided
      ? `Of ${world.divided} layouts that divide the job on ${world.gpus} GPUs, the ${world.considered} that are fastest with the links and memory at first are considered. ` : "")
      + `${world.rows.length} of ${world.considered} can run. Times of kernels and the fit of the step cost stay as they are; links, memory and formats change the step as tandem plan computes it.`;
  }

  $("title").textContent = `Tandem plan: ${data.job}`;
  document.title = `Tandem plan: ${data.job}`;
  $("meta").textContent = `${data.gpu}, ${data.gpus_per_host} GPUs a host, bf16, ${data.memory_share * 100} % of the memory for the job`;
  buildKnobs();
  state.found = model.search(state.knobs);
  state.front = model.front(state.found);
  onTheme(update);
  return { state, model, set, choose, moves };
})();
