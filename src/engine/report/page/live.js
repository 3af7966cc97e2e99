
"use strict";
// Page of a run that trains: redraws with every event of the server.
(() => {
  const { $, style, show, number, grouped, short, percent, bytes, add, charts } = page;
  let state = null, ranks = null, loading = false;

  function duration(seconds) {
    if (seconds == null) return "–";
    const s = Math.round(seconds), pad = (value) => String(value).padStart(2, "0");
    return s < 3600 ? `${Math.floor(s / 60)}:${pad(s % 60)}` : `${Math.floor(s / 3600)}:${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}`;
  }

  function header(connected) {
    $("title").textContent = state?.name ?? "Tandem";
    document.title = state?.step ? `${percent(state.share)} ${state.name}` : "Tandem live";
    const idle = state?.state === "running" && state.idle_s > 30;
    $("state").textContent = !connected ? "not connected" : idle ? `no step for ${duration(state.idle_s)}` : state?.state ?? "";
    $("state").dataset.good = connected && !idle;
    if (!state) return;
    $("meta").textContent = [state.layout, state.last.saved_step == null ? null : `saved step ${grouped(state.last.saved_step)}`]
      .filter(Boolean).join(" · ");
    const share = state.share ?? 0;
    $("progress").firstElementChild.style.width = `${100 * share}%`;
    $("progress").setAttribute("aria-valuenow", Math.round(100 * share));
    $("eta").textContent = state.step == null ? "Waiting for the first step."
      : `step ${grouped(state.step)}${state.steps == null ? "" : ` of ${grouped(state.steps)}`} · ${percent(state.share, 1)}` +
        (state.state === "done" ? " · done" : ` · ${duration(state.eta_s)} to go`);
    $("problems").replaceChildren();
    for (const problem of [state, ...state.others].flatMap(({ problems }) => problems)) add($("problems"), "li", problem);
  }

  function figures() {
    const { last } = state;
    $("figures").replaceChildren();
    const figure = (value, unit, name) => {
      const box = add($("figures"), "div", null, "figure"), b = add(box, "b", value);
      if (unit) add(b, "small", ` ${unit}`);
      add(box, "span", name);
    };
    if (last.loss != null) figure(number(last.loss), "nats/token", "Loss");
    if (last.tokens_per_s != null) figure(short(last.tokens_per_s), "tokens/s", "Throughput");
    if (last.step_ms != null) figure(number(last.step_ms, 1), "ms", "Step");
    if (last.mfu) figure(percent(last.mfu, 1), "", "MFU");
    if (last.memory_bytes) figure(bytes(last.memory_bytes), "", "Memory of a rank, largest");
  }

  function selfCheck() {
    const { self_check: check } = state;
    if (!check?.measured_ms) return;
    show("check");
    $("check-lead").textContent = `Steps ${check.first} to ${check.last}, mean of the ranks, as measured and as predicted from costs measured at the start.`;
    const table = $("check-table");
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    for (const text of ["", "measured", "predicted", "difference"]) add(head, "th", text);
    const body = add(table, "tbody");
    for (const [name, ms] of Object.entries(check.measured_ms)) {
      const predicted = check.predicted_ms?.[name] ?? 0;
      if (Math.max(ms, predicted) < 0.002 * check.measured_ms.step) continue;
      const row = add(body, "tr", null, name === "step" ? "best" : "");
      for (const text of [name, `${number(ms, 2)} ms`, `${number(predicted, 2)} ms`, `${ms < predicted ? "−" : "+"}${number(Math.abs(ms - predicted), 2)} ms`]) add(row, "td", text);
    }
  }

  function events() {
    if (!state.events.length) return;
    show("events");
    $("events-lead").textContent = Object.entries(state.event_counts).map(([kind, count]) => `${kind}: ${count}`).join(", ");
    const table = $("events-table");
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    for (const text of ["event", "rank", "step", "noticed", "recovered"]) add(head, "th", text);
    add(head, "th", "cause", "text");
    const body = add(table, "tbody"), ms = (value) => value == null ? "" : `${grouped(value)} ms`;
    for (const event of [...state.events].reverse().slice(0, 30)) {
      const row = add(body, "tr");
      for (const text of [event.event, event.rank < 0 ? "launcher" : event.rank, event.step, ms(event.noticed_ms), ms(event.recovered_ms)]) add(row, "td", text ?? "");
      add(row, "td", event.text, "text");
    }
  }

  // Says in a sentence why a section is not there.
  function missing() {
    const list = [], isForeign = state.problems.some((problem) => problem.includes(".records"));
    if (!state.series.step.length) list.push("Curves and figures: no step has finished yet. They begin with the first line of metrics.jsonl.");
    if (!ranks?.ranks.rank.length) {
      list.push(isForeign ? "Ranks and links: files in ranks/ are damaged or not records of ranks that this version reads; the top of the page names them."
        : "Ranks and links: no records yet. Ranks write them to ranks/ within a second of a step, unless the job sets trace.ranks = false.");
    } else if (!ranks.map) {
      list.push("Ranks over the steps: no step has records of all ranks yet.");
    }
    if (!state.events.length) {
      list.push("Faults and recoveries: none so far. Lost ranks are replaced only under tandem launch, with --spares or --restarts; without them a lost rank ends the run.");
    }
    $("missing").hidden = !list.length;
    $("missing-list").replaceChildren();
    for (const text of list) add($("missing-list"), "li", text);
  }

  function draw() {
    for (const old of charts.splice(0)) old.destroy();
    if (!state) return;
    header(true);
    figures();
    selfCheck();
    events();
    missing();
    if (state.series.step.length) {
      const runs = [state, ...state.others.filter(({ series }) => series.step.length)];
      curves.controls(runs, draw);
      show("learning");
      curves.lossChart(runs);
      show("throughput");
      show("optimizer");
      show("time");
      curves.pairChart("speed", runs, { label: "tokens per second", key: "tokens_per_s", color: "gemm", show: short },
        { label: "MFU", key: "mfu", color: "compute", show: (v) => percent(v) });
      curves.pairChart("steps", runs, { label: "gradient norm", key: "grad_norm", color: "first", show: (v) => number(v) },
        { label: "learning rate", key: "lr", color: "wait", show: (v) => Number(v).toExponential(1) });
      curves.pairChart("step-time", runs, { label: "milliseconds per step", key: "step_ms", color: "transfer", show: (v) => number(v, 1) },
        { label: "memory of a rank", key: "memory_bytes", color: "rest", show: bytes });
    }
    if (!ranks) return;
    rankMap.draw(ranks.map);
    if (lattice.set(ranks, state.events)) {
      groupMap.draw();
      rankSpace.draw();
      linkTables.draw();
    }
  }

  // Loads the ranks if there are newer ones, one request at a time.
  async function loadRanks() {
    if (loading || !state || state.ranks_version === (ranks?.version ?? 0)) return;
    loading = true;
    try {
      const answer = await fetch("ranks.json");
      if (answer.ok) {
        ranks = await answer.json();
        draw();
      }
    } catch { /* the server has ended; the state says so */ } finally {
      loading = false;
    }
  }

  page.onTheme(draw);
  const source = new EventSource("events");
  source.onmessage = (event) => {
    state = JSON.parse(event.data);
    draw();
    loadRanks();
  };
  source.onerror = () => header(false);
})();
