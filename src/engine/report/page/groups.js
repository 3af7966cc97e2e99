
"use strict";
// Ranks by their coordinates on a plane: blocks of pipeline stages, columns of copies, rows of
// tensor-parallel ranks. Also what the views of the ranks say in words: colours, the chosen rank, a
// table.
const groupMap = (() => {
  const { $, show, number, grouped, percent, style, add } = page;
  const TABLE_ROWS = 50;
  let grid = null, first = 0, spoken = null;

  // The blocks' position on the canvas.
  function arrange(width) {
    const { tp, columns: dp, pp } = lattice.size, gap = 6;
    const perLine = Math.max(1, Math.min(pp, Math.floor((width + gap) / (dp * 3 + gap))));
    const columns = Math.ceil(pp / Math.ceil(pp / perLine));
    const cell = Math.max(2, Math.min(28, Math.floor((width - gap * (columns - 1)) / columns / dp)));
    const height = Math.max(2, Math.min(cell, 28));
    return { gap, columns, cell, height, tp, dp, pp,
      x: (p, d) => (p % columns) * (dp * cell + gap) + d * cell,
      y: (p, t) => Math.floor(p / columns) * (tp * height + gap) + t * height };
  }

  function paint() {
    const { data, chosen } = lattice, { ranks } = data, canvas = $("groups-map"), colors = lattice.coloring();
    const width = Math.max(120, canvas.parentElement.clientWidth - 40), ratio = Math.min(2, devicePixelRatio || 1);
    grid = arrange(width);
    const high = grid.y(grid.pp - 1, grid.tp - 1) + grid.height + 2, wide = grid.x(grid.columns - 1, grid.dp - 1) + grid.cell + 2;
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const box = (rank) => [grid.x(ranks.pp[rank], lattice.column(rank)) + 1, grid.y(ranks.pp[rank], ranks.tp[rank]) + 1];
    const inset = grid.cell > 4 ? 1 : 0;
    ranks.work.forEach((_, rank) => {
      context.fillStyle = colors.of(rank);
      context.fillRect(...box(rank), grid.cell - inset, grid.height - inset);
    });
    context.lineWidth = grid.cell > 6 ? 2 : 1;
    const outline = (members, name) => {
      context.strokeStyle = style(name);
      for (const rank of members) {
        const [x, y] = box(rank);
        context.strokeRect(x - 0.5, y - 0.5, grid.cell - inset + 1, grid.height - inset + 1);
      }
    };
    const groups = lattice.groups(chosen);
    for (const axis of ["sync", "pp", "dp", "ep", "cp", "tp"]) outline(groups[axis], Object.fromEntries(lattice.AXES)[axis]);
    outline([chosen], "ink");
    const legend = $("groups-legend");
    legend.replaceChildren();
    add(legend, "b", colors.text);
    add(legend, "span", colors.ends[0]);
    add(legend, "i").style.background = `linear-gradient(90deg, ${colors.marks.join(", ")})`;
    add(legend, "span", colors.ends[1]);
  }

  function describe() {
    const text = lattice.sentence(), note = $("groups-rank");
    if (note.textContent !== text) {  // read out if another rank is chosen, not with every step
      note.setAttribute("aria-live", spoken === lattice.chosen ? "off" : "polite");
      spoken = lattice.chosen;
      note.textContent = text;
    }
    $("rank-name").textContent = `Rank ${grouped(lattice.data.ranks.rank[lattice.chosen])}`;
    const facts = $("rank-facts");
    facts.replaceChildren();
    for (const [name, value] of lattice.facts()) {
      add(facts, "dt", name);
      add(facts, "dd", value);
    }
  }

  function axesLegend() {
    const legend = $("axes-legend"), names = { tp: "shares layers (TP)", cp: "same sequences (CP)", ep: "other experts (EP)", dp: "replicas (DP)", pp: "stages (PP)", sync: "other learners (sync)" };
    legend.replaceChildren();
    for (const [axis, color] of lattice.AXES) {
      if (lattice.length(axis) < 2) continue;
      const item = add(legend, "span");
      add(item, "i").style.background = style(color);
      item.append(names[axis]);
    }
  }

  function select() {
    const list = $("groups-view"), choices = lattice.choices();
    if ([...list.options].map(({ text }) => text).join() === choices.map(([, name]) => name).join()) return;
    list.replaceChildren();
    choices.forEach(([phase, name]) => { add(list, "option", name).value = phase ?? ""; });
    list.value = lattice.shown ?? "";
  }

  // All ranks as a table, some rows at a time, if it is open.
  function table() {
    if (!$("ranks-table-box").open) return;
    const { ranks, phases } = lattice.data, order = ranks.rank.map((_, rank) => rank), body = $("ranks-table"), count = order.length;
    if ($("ranks-order").value === "work") order.sort((a, b) => ranks.work[b] - ranks.work[a]);
    first = Math.max(0, Math.min(first, TABLE_ROWS * Math.floor((count - 1) / TABLE_ROWS)));
    const active = document.activeElement?.closest?.("#ranks-table") ? document.activeElement.textContent : null;
    body.replaceChildren();
    const head = add(add(body, "thead"), "tr");
    for (const text of ["rank", "coordinates", "host", "own work", "longest over its stage", "waits", "last step", ...lattice.hasEvents ? ["faults"] : []]) add(head, "th", text).scope = "col";
    const rows = add(body, "tbody");
    for (const rank of order.slice(first, first + TABLE_ROWS)) {
      const row = add(rows, "tr", null, rank === lattice.chosen ? "best" : ""), button = add(add(row, "td"), "button", ranks.rank[rank], "link");
      button.type = "button";
      button.setAttribute("aria-label", `Choose rank ${ranks.rank[rank]}`);
      button.setAttribute("aria-pressed", rank === lattice.chosen);
      button.addEventListener("click", () => lattice.choose(rank));
      const waits = phases.reduce((sum, _, phase) => sum + (lattice.isWait(phase) ? lattice.share(phase, rank) : 0), 0);
      for (const text of [lattice.coordinates(rank), lattice.host(rank), `${number(ranks.work[rank], 2)}×`, ranks.work[rank] > 1.02 ? phases[ranks.phase[rank]] : "–",
        percent(waits, 1), grouped(ranks.step[rank]), ...lattice.hasEvents ? [lattice.eventsOf(rank).length || "–"] : []]) add(row, "td", text);
      if (active === button.textContent) button.focus();
    }
    $("ranks-shown").textContent = `${first + 1} to ${Math.min(count, first + TABLE_ROWS)} of ${grouped(count)}`;
    $("ranks-before").disabled = first === 0;
    $("ranks-after").disabled = first + TABLE_ROWS >= count;
  }

  function listen() {
    const canvas = $("groups-map");
    canvas.addEventListener("click", (event) => {
      const from = canvas.getBoundingClientRect(), x = event.clientX - from.left - 1, y = event.clientY - from.top - 1;
      const column = Math.floor(x / (grid.dp * grid.cell + grid.gap)), line = Math.floor(y / (grid.tp * grid.height + grid.gap));
      const d = Math.floor((x - column * (grid.dp * grid.cell + grid.gap)) / grid.cell);
      const t = Math.floor((y - line * (grid.tp * grid.height + grid.gap)) / grid.height);
      if (column < grid.columns && d >= 0 && d < grid.dp && t >= 0 && t < grid.tp) lattice.choose(lattice.at(line * grid.columns + column, d, t));
    });
    canvas.addEventListener("keydown", (event) => {
      if (lattice.move(event.key)) event.preventDefault();
    });
    $("groups-view").addEventListener("change", ({ target }) => lattice.show(target.value === "" ? null : Number(target.value)));
    $("ranks-table-box").addEventListener("toggle", table);
    $("ranks-order").addEventListener("change", () => { first = 0; table(); });
    $("ranks-before").addEventListener("click", () => { first -= TABLE_ROWS; table(); });
    $("ranks-after").addEventListener("click", () => { first += TABLE_ROWS; table(); });
    lattice.onChange(() => { paint(); describe(); table(); });
    new ResizeObserver(() => requestAnimationFrame(paint)).observe(canvas.parentElement);
  }

  let isReady = false;
  // Draws the lattice's ranks.
  function draw() {
    show("groups");
    if (!isReady) {
      listen();
      // Below eight ranks the map over the steps says it all.
      for (const id of ["groups-fold", "links-fold"]) $(id).open = lattice.data.ranks.rank.length >= 8;
    }
    isReady = true;
    select();
    axesLegend();
    paint();
    describe();
    if (!document.activeElement?.closest("#ranks-table")) table();  // rows stay under a reader
  }

  return { draw };
})();
