
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { summary, runs, samples, experts, ranks, groups, timelines } = data, { series } = runs[0];
  const { $, style, show, number, grouped, short, percent, bytes, add, tip, charts, chart, axis, options, legend,
    curve, loadColors } = page;

  function header() {
    const run = summary.run;
    $("title").textContent = run.title;
    document.title = `${run.title} – report`;
    const meta = $("meta");
    meta.append([run.hardware, run.date].filter(Boolean).join(" · "));
    if (run.command) {
      add(meta, "br");
      add(meta, "code", run.command);
    }
    $("versions").textContent = `Made by tandem ${run.version} (${run.commit}). All charts and data are inside this file.`;
    const omitted = [...summary.omitted, ...groups ? [] : ["ranks and links (no records in ranks/: trace.ranks was off, or they were removed)"]];
    if (omitted.length) $("omitted").textContent = `Not shown: ${omitted.join("; ")}.`;
  }

  function figure(value, unit, name, detail) {
    const box = add($("figures"), "div", null, "figure");
    const b = add(box, "b", value);
    if (unit) add(b, "small", ` ${unit}`);
    add(box, "span", name);
    if (detail) add(box, "p", detail);
  }

  function figures() {
    const { training, held_out: held, step_split: split } = summary;
    if (held) {
      const rivals = held.compressors.map((c) => `${c.name} ${number(c.bits_per_byte)}`).join(", ");
      figure(number(held.model_bits_per_byte), "bits/byte", "Held-out text", rivals);
    }
    figure(short(training.tokens_per_s), "tokens/s", "Training speed",
      `${grouped(training.steps)} steps` + (training.tokens ? `, ${short(training.tokens)} tokens` : ""));
    if (split && split.efficiency != null) {
      figure(split.shown ? percent(split.efficiency) : "not shown", "", "Overlap efficiency E",
        (split.shown ? "communication hidden" : "faster no more often than by chance") + `, ${split.link}` +
        (split.warning ? "; measured on a busy machine" : ""));
    }
    if (training.gemm_share != null) {
      figure(percent(training.gemm_share), "", "Of a step is matrix products",
        `${number(training.gemm_ms, 1)} of ${number(training.step_ms, 1)} ms`);
    }
  }

  function table(id, head, rows, best) {
    const element = $(id);
    const tr = add(add(element, "thead"), "tr");
    for (const text of head) add(tr, "th", text);
    const body = add(element, "tbody");
    rows.forEach((cells, i) => {
      const row = add(body, "tr", null, i === best ? "best" : "");
      for (const cell of cells) {
        if (cell && cell.meter != null) {
          add(add(row, "td", null, "meter"), "i").style.width = `${Math.max(0, Math.min(1, cell.meter)) * 100}%`;
        } else {
          add(row, "td", cell);
        }
      }
    });
  }

  function heldOut() {
    const held = summary.held_out;
    if (!held) return;
    show("heldout");
    $("heldout-lead").textContent = `${grouped(held.files)} files, ${bytes(held.bytes)}, none of them trained on. ` +
      "Each file alone: compressors start cold, the model starts from what it learnt.";
    const rows = [{ name: "tandem", bits_per_byte: held.model_bits_per_byte }, ...held.compressors];
    const values = rows.map((row) => row.bits_per_byte), most = Math.max(...values);
    table("heldout-table", ["", "bits per byte", ""],
      rows.map((row) => [row.name, number(row.bits_per_byte), { meter: row.bits_per_byte / most }]),
      values.indexOf(Math.min(...values)));
  }

  function stepSplit() {
    const split = summary.step_split;
    if (!split) return;
    show("split");
    $("link").textContent = split.link;
    $("link").title = split.link_choice ?? "";
    $("split-lead").textContent = "The same model and batch, once with every collective run on its own and once with " +
      "collectives running under the matrix products, step by step in turns. Mean of the middle half of the pairs of " +
      "steps, of the rank that computes longest: matrix products, other compute, exposed communication and rest add up " +
      "to the step.";
    $("split-warning").textContent = split.warning ?? "";
    $("split-warning").hidden = !split.warning;
    table("split-table",
      ["strategy", "step", "matrix products", "other compute", "exposed communication", "rest", "ECT"],
      split.rows.map((row) => [row.strategy, ...[row.step_ms, row.gemm_ms, row.other_compute_ms,
        row.exposed_comm_ms, row.rest_ms, row.ect_ms].map((ms) => `${number(ms, 2)} ms`)]));
    $("split-note").textContent = `E = ${percent(split.efficiency, 1)}. ${split.formula}` +
      ` Overlapped was faster in ${split.pairs_overlapped_faster} of ${split.pairs} pairs; ${split.verdict}.`;
  }

  function operators() {
    const rows = summary.receipts;
    if (!rows.length) return;
    show("operators");
    table("operators-table", ["operator", "shape", "ranks", "asked", "ran", "speedup", "calls", "candidate", "why"],
      rows.map((row) => [row.op, row.shape, row.group, row.asked, row.ran, row.speedup == null ? "–" : `${number(row.speedup, 2)}×`,
        grouped(row.calls), row.candidate ?? "", row.why]));
  }

  function sample() {
    const text = summary.sample;
    if (!text) return;
    show("sample");
    const pre = $("sample-text");
    const prompt = text.prompt && text.text.startsWith(text.prompt) ? text.prompt : "";
    if (prompt) add(pre, "mark", prompt);
    pre.append(text.text.slice(prompt.length));
    if (!samples.length) return;
    show("samples");
    const slider = $("samples-step");
    slider.max = slider.value = samples.length - 1;
    const choose = () => {
      const { step, text } = samples[slider.value];
      $("samples-of").textContent = slider.ariaValueText = `step ${grouped(step)}`;
      $("samples-text").textContent = text;
    };
    slider.addEventListener("input", choose);
    choose();
  }

  // Curves of general compressors on the held-out files.
  function rivals() {
    const held = summary.held_out, last = series.step.at(-1);
    if (!held) return [];
    return [curve("held-out files, nats per byte", [{ x: last, y: held.model_bits_per_byte * Math.LN2 }], style("good"),
      { showLine: false, pointRadius: 6, pointStyle: "rectRot", clip: false }),
    ...held.compressors.map((c, i) => curve(`${c.name}, nats per byte`,
      [series.step[0], last].map((x) => ({ x, y: c.bits_per_byte * Math.LN2 })), style(i ? "ink" : "muted"),
      { borderWidth: 1.5, borderDash: i ? [2, 4] : [7, 5] }))];
  }

  function lossChart() {
    if (!series.step.length) return;
    show("learning");
    const hasValidation = runs.some((run) => run.series.validation_loss.some((value) => value != null));
    $("learning-lead").textContent = "Cross-entropy of the next token on the training data." +
      (hasValidation ? ` Validation${runs.length > 1 ? ", dashed" : ""}: on held-out data, as tandem eval takes it.` : "") +
      (summary.held_out && runs.length === 1 ? " Dashed: what general compressors reach on the held-out files." : "") +
      (runs.length > 1 ? " A click on a run's name hides it." : "");
    curves.lossChart(runs, rivals);
  }

  // Numbers of the runs side by side, and what differs in their jobs.
  function comparison() {
    const { compared } = summary;
    if (!compared) return;
    show("runs");
    $("runs-lead").textContent = "Loss of the last step, in nats per token; validation as it was last taken; median tokens per second.";
    table("runs-table", ["run", "parameters", "steps", "loss", "validation", "tokens/s", "commit"], compared.runs.map((run, i) => [run.name,
      runs[i].parameters == null ? "–" : short(runs[i].parameters), grouped(run.steps), number(run.final_loss), number(run.validation_loss), short(run.tokens_per_s),
      runs[i].started?.commit ?? "–"]));
    $("runs-same").hidden = compared.settings.length > 0;
    if (compared.settings.length) table("settings-table", ["key", ...runs.map(({ name }) => name)], compared.settings.map(({ key, values }) => [key, ...values.map((value) => value ?? "–")]));
  }

  function configuration() {
    const { parameters, started, settings, defaults } = runs[0], facts = $("run-facts");
    const list = [["command", started?.command], ["started", started?.date], ["on", started?.hardware],
      ["tandem", started && `${started.version} (${started.commit})`], ["model", parameters && `${short(parameters)} parameters`]].filter(([, value]) => value);
    if (!list.length) return;
    show("configuration");
    for (const [name, value] of list) {
      add(facts, "dt", name);
      add(add(facts, "dd"), name === "command" ? "code" : "span", value);
    }
    $("run-settings-box").hidden = !Object.keys(settings).length;
    table("run-settings", ["key", "value", "default"], Object.entries(settings).map(([key, value]) => [key, value, defaults[key]]));
  }

  function speedChart() {
    const speed = series.tokens_per_s, { tokens_per_s: median, mfu } = summary.training;
    if (!speed.some((v) => v != null)) return;
    show("throughput");
    $("throughput-lead").textContent = `Median ${short(median)} tokens per second over all ranks` + (mfu == null ? "."
      : `, MFU ${percent(mfu)}: the model's FLOPs over those that matrix products alone reached on all ranks at once.`);
    curves.pairChart("speed", runs, { label: "tokens per second", key: "tokens_per_s", color: "gemm", show: short },
      { label: "MFU", key: "mfu", color: "compute", show: (v) => percent(v) });
  }

  function expertChart() {
    const layers = summary.training.expert_imbalance;
    if (!layers) return;
    show("experts");
    $("load-chart").replaceChildren();
    const canvas = add($("load-chart"), "canvas");
    canvas.id = "load";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Imbalance of the experts over the steps");
    $("experts-lead").textContent = "Rows of the fullest expert over the mean of all: 1 is even. The curve is of the " +
      `fullest layer; the last step's, by layer: ${layers.map((value) => number(value, 2)).join(", ")}.`;
    curves.pairChart("load", runs, { label: "expert imbalance", key: "expert_imbalance", color: "first", show: (v) => number(v, 2) },
      { label: "auxiliary loss", key: "aux_loss", color: "wait", show: (v) => Number(v).toExponential(1) });
  }

  // Draws a map per MoE layer: steps from left to right, one row per expert.
  function expertMaps() {
    if (!experts) return;
    $("maps").hidden = false;
    const color = loadColors(), { steps, load } = experts, last = series.step.at(-1);
    const legend = $("maps-legend");
    legend.replaceChildren();
    add(legend, "b", "Load of every expert, by layer with experts: rows over the mean");
    add(legend, "span", "½×");
    const stops = [-1, -0.5, 0, 0.5, 1].map((far) => color(2 ** far)).join(", ");
    add(legend, "i").style.background = `linear-gradient(90deg, ${stops})`;
    add(legend, "span", "2×");
    const grid = $("maps-grid");
    grid.replaceChildren();
    load.forEach((columns, layer) => {
      const box = add(grid, "div", null, "map"), head = add(box, "h3", `Layer ${layer + 1}`);
      const end = columns.at(-1), fullest = end.indexOf(Math.max(...end));
      add(head, "small", `fullest at the end: expert ${fullest}, ${number(end[fullest], 2)}×`);
      const canvas = add(box, "canvas"), lines = columns[0].length;
      canvas.id = `map-${layer}`;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Load of ${lines} experts over the steps, layer ${layer + 1}`);
      canvas.width = columns.length;
      canvas.height = lines;
      canvas.style.height = `${Math.max(72, Math.min(220, 16 * lines))}px`;
      const context = canvas.getContext("2d");
      columns.forEach((cells, x) => cells.forEach((value, y) => {
        context.fillStyle = color(value);
        context.fillRect(x, y, 1, 1);
      }));
      const ends = add(box, "div");
      add(ends, "span", `step ${grouped(steps[0])}`);
      add(ends, "span", `${lines} experts`);
      add(ends, "span", `${grouped(last)}`);
      canvas.addEventListener("mousemove", (event) => {
        const at = canvas.getBoundingClientRect(), inside = (part, most) => Math.max(0, Math.min(most - 1, Math.floor(part * most)));
        const x = inside((event.clientX - at.left) / at.width, columns.length);
        const y = inside((event.clientY - at.top) / at.height, lines);
        const to = x + 1 < steps.length ? steps[x + 1] - 1 : last;
        tip.show(event, `expert ${y}, step${to > steps[x] ? `s ${grouped(steps[x])} to ${grouped(to)}` : ` ${grouped(to)}`}: ` +
          `${number(columns[x][y], 2)}× the mean`);
      });
      canvas.addEventListener("mouseleave", tip.hide);
    });
  }

  function optimizerChart() {
    const { lr, grad_norm: norm } = series;
    if (![...lr, ...norm].some((v) => v != null)) return;
    show("optimizer");
    curves.pairChart("steps", runs, { label: "gradient norm", key: "grad_norm", color: "first", show: (v) => number(v) },
      { label: "learning rate", key: "lr", color: "wait", show: (v) => Number(v).toExponential(1) });
  }

  function barChart() {
    const split = summary.step_split;
    if (!split) return;
    const parts = [["matrix products", "gemm_ms", "gemm"], ["other compute", "other_compute_ms", "compute"],
      ["exposed communication", "exposed_comm_ms", "wait"], ["rest", "rest_ms", "rest"]];
    chart("bars", { type: "bar",
      data: { labels: split.rows.map((row) => row.strategy), datasets: parts.map(([label, key, color]) => ({
        label, data: split.rows.map((row) => row[key]), backgroundColor: style(color), barPercentage: 0.8 })) },
      options: options({ indexAxis: "y",
        scales: { x: axis("milliseconds per step", { stacked: true, beginAtZero: true }),
          y: { stacked: true, grid: { display: false }, ticks: { color: style("ink"), font: { size: 13 } } } },
        plugins: { legend: { ...legend(), labels: { ...legend().labels, boxHeight: 10 } },
          tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${number(item.parsed.x, 2)} ms`,
            footer: (items) => `step: ${number(split.rows[items[0].dataIndex].step_ms, 2)} ms` } } } }) });
  }

  function drawTimelines() {
    const span = Math.max(...timelines.map((t) => t.span_us));
    timelines.forEach((t, i) => timeline.draw($(`strip-${i}`), { ...t, id: i }, span, tip));
  }
  function timelineSection() {
    if (!timelines.length) return;
    show("timeline");
    const longer = timelines.length > 1 && timelines[1].span_us > timelines[0].span_us;
    $("timeline-lead").textContent = timelines.length > 1
      ? "The same layer under each strategy, in a step of each whose time is near the median, on one time scale" + (longer
        ? ". This layer took longer overlapped: whole steps are compared above." : ": shorter is faster.")
      : "What every rank computes, what it sends meanwhile, and where it still has to wait.";
    for (const kind of ["gemm", "compute", "wait", "transfer"]) {
      const item = add($("timeline-legend"), "span");
      add(item, "i").style.background = timeline.color(kind);
      item.append(timeline.KINDS[kind]);
    }
    timelines.forEach((t, i) => {
      const strip = add($("timelines"), "div", null, "strip");
      const h = add(strip, "h3", t.title);
      add(h, "small", `  ${timeline.format(t.span_us)}` + (t.step >= 0 ? `, step ${t.step}` : "") +
        (t.link ? `, ${t.link}` : ""));
      add(strip, "div").id = `strip-${i}`;
    });
    drawTimelines();
    let width = $("timelines").clientWidth;
    new ResizeObserver(() => {
      if ($("timelines").clientWidth === width) return;
      width = $("timelines").clientWidth;
      requestAnimationFrame(drawTimelines);
    }).observe($("timelines"));
  }

  function drawCharts() {
    for (const old of charts.splice(0)) old.destroy();
    curves.controls(runs, drawCharts);
    lossChart();
    barChart();
    speedChart();
    expertChart();
    expertMaps();
    rankMap.draw(ranks);
    if (groups && lattice.set(groups)) {
      groupMap.draw();
      rankSpace.draw();
      linkTables.draw();
    }
    optimizerChart();
  }

  header();
  figures();
  heldOut();
  stepSplit();
  operators();
  sample();
  comparison();
  configuration();
  page.onTheme(drawCharts);
  timelineSection();
})();
