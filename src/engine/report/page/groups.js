
"use strict";
// Ranks by their coordinates: blocks of pipeline stages, columns of replicas, rows of
// tensor-parallel ranks.
const groupMap = (() => {
  const { $, show, number, grouped, style, loadColors, add } = page;
  let data = null, grid = null, chosen = 0;

  // Rank by coordinates, and the blocks' position on the canvas.
  function arrange(ranks, width) {
    const of = (key) => ranks[key].reduce((most, value) => Math.max(most, value), 0) + 1;
    const tp = of("tp"), dp = of("dp"), pp = of("pp"), gap = 6;
    const perLine = Math.max(1, Math.min(pp, Math.floor((width + gap) / (dp * 3 + gap))));
    const columns = Math.ceil(pp / Math.ceil(pp / perLine));
    const cell = Math.max(2, Math.min(28, Math.floor((width - gap * (columns - 1)) / columns / dp)));
    const index = new Map();
    ranks.tp.forEach((t, rank) => index.set((ranks.pp[rank] * dp + ranks.dp[rank]) * tp + t, rank));
    const height = Math.max(2, Math.min(cell, 28));
    return { tp, dp, pp, gap, columns, cell, height, index,
      x: (p, d) => (p % columns) * (dp * cell + gap) + d * cell,
      y: (p, t) => Math.floor(p / columns) * (tp * height + gap) + t * height,
      rank: (p, d, t) => index.get((p * dp + d) * tp + t) };
  }

  function paint() {
    const { ranks } = data, canvas = $("groups-map"), color = loadColors();
    const width = Math.max(120, canvas.parentElement.clientWidth - 40), ratio = Math.min(2, devicePixelRatio || 1);
    grid = arrange(ranks, width);
    const high = grid.y(grid.pp - 1, grid.tp - 1) + grid.height + 2, wide = grid.x(grid.columns - 1, grid.dp - 1) + grid.cell + 2;
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const box = (rank) => [grid.x(ranks.pp[rank], ranks.dp[rank]) + 1, grid.y(ranks.pp[rank], ranks.tp[rank]) + 1];
    const inset = grid.cell > 4 ? 1 : 0;
    const shade = (value) => color(value ** 3.1);
    ranks.work.forEach((work, rank) => {
      context.fillStyle = shade(work);
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
    const groups = groupsOf(chosen);
    outline(groups.pp, "first");
    outline(groups.dp, "transfer");
    outline(groups.tp, "gemm");
    outline([chosen], "ink");
    const legend = $("groups-legend");
    legend.replaceChildren();
    add(legend, "b", "own work over the median of the stage");
    add(legend, "span", "0.8×");
    add(legend, "i").style.background = `linear-gradient(90deg, ${[0.8, 1, 1.25].map(shade).join(", ")})`;
    add(legend, "span", "1.25×");
  }

  // Ranks that differ from this one on one axis only.
  function groupsOf(rank) {
    const { ranks } = data, [t, d, p] = [ranks.tp[rank], ranks.dp[rank], ranks.pp[rank]];
    const along = (count, find) => Array.from({ length: count }, (_, i) => find(i)).filter((other) => other != null && other !== rank);
    return { tp: along(grid.tp, (i) => grid.rank(p, d, i)), dp: along(grid.dp, (i) => grid.rank(p, i, t)),
      pp: along(grid.pp, (i) => grid.rank(i, d, t)) };
  }

  function describe() {
    const { ranks, hosts, phases } = data, groups = groupsOf(chosen);
    const names = (members) => members.map((member) => ranks.rank[member]);
    const list = (shown, members = names(shown)) => members.length > 12 ? `${members.slice(0, 12).join(", ")}, … (${members.length})` : members.join(", ") || "none";
    $("groups-rank").textContent = `rank ${ranks.rank[chosen]}: tp ${ranks.tp[chosen]}, dp ${ranks.dp[chosen]}, pp ${ranks.pp[chosen]}, ` +
      `host ${hosts[ranks.host[chosen]]}; step ${grouped(ranks.step[chosen])}, own work ${number(ranks.work[chosen], 2)}× its stage's median` +
      `${ranks.work[chosen] > 1.02 ? `, longest over it in ${phases[ranks.phase[chosen]]}` : ""}. Shares layers with ${list(groups.tp)}; replicas ${list(groups.dp)}; stages ${list(groups.pp)}.`;
  }

  function choose(rank) {
    if (rank == null) return;
    chosen = rank;
    paint();
    describe();
  }

  function listen() {
    const canvas = $("groups-map");
    canvas.addEventListener("click", (event) => {
      const from = canvas.getBoundingClientRect(), x = event.clientX - from.left - 1, y = event.clientY - from.top - 1;
      const column = Math.floor(x / (grid.dp * grid.cell + grid.gap)), line = Math.floor(y / (grid.tp * grid.height + grid.gap));
      const d = Math.floor((x - column * (grid.dp * grid.cell + grid.gap)) / grid.cell);
      const t = Math.floor((y - line * (grid.tp * grid.height + grid.gap)) / grid.height);
      if (column < grid.columns && d >= 0 && d < grid.dp && t >= 0 && t < grid.tp) choose(grid.rank(line * grid.columns + column, d, t));
    });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, -1, 0], ArrowDown: [0, 1, 0],
        PageUp: [0, 0, -1], PageDown: [0, 0, 1] };
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const { ranks } = data, keep = (value, count) => Math.max(0, Math.min(count - 1, value));
      choose(grid.rank(keep(ranks.pp[chosen] + move[2], grid.pp), keep(ranks.dp[chosen] + move[0], grid.dp),
        keep(ranks.tp[chosen] + move[1], grid.tp)));
    });
    new ResizeObserver(() => requestAnimationFrame(() => { if (data) paint(); })).observe(canvas.parentElement);
  }

  // Draws other ranks, or the same again.
  function draw(next) {
    if (!next.ranks.tp.length) return;
    const isFirst = !data;
    data = next;
    chosen = Math.min(chosen, data.ranks.tp.length - 1);
    show("groups");
    if (isFirst) listen();
    paint();
    describe();
  }

  return { draw };
})();
