
"use strict";
// Ranks by their coordinates, their groups, the chosen rank and the shown colour: what all views of
// the ranks share.
const lattice = (() => {
  const { number, grouped, percent, loadColors } = page;
  const AXES = [["tp", "gemm"], ["cp", "good"], ["ep", "experts"], ["dp", "transfer"], ["pp", "first"], ["sync", "soft"]];
  const views = [];
  let data = null, events = null, size = null, index = null, chosen = 0, shown = null, isFocused = false;

  // Takes other ranks, or the same again, and the run's events (null: not known). False without a
  // rank.
  function set(next, nextEvents = null) {
    const { ranks } = next;
    if (!ranks.tp.length) return false;
    const count = (key) => ranks[key].reduce((max, value) => Math.max(max, value), 0) + 1;
    data = next;
    events = nextEvents;
    size = { tp: count("tp"), cp: count("cp"), dp: count("dp"), pp: count("pp"), ep: 1, sync: 1 };
    size.columns = size.dp * size.cp;
    if (data.ep > 1 && size.dp % data.ep === 0) size.ep = data.ep;
    if (data.learners > 1 && size.dp % data.learners === 0) size.sync = data.learners;
    index = new Map();
    ranks.tp.forEach((tp, rank) => index.set(key(ranks.pp[rank], column(rank), tp), rank));
    chosen = Math.min(chosen, ranks.tp.length - 1);
    if (shown != null && !data.ms[shown]?.length) shown = null;
    return true;
  }

  // Copies of the same parameters, those of a replica's context-parallel ranks next to each other.
  const column = (rank) => data.ranks.dp[rank] * size.cp + data.ranks.cp[rank];
  const key = (pp, column, tp) => (pp * size.columns + column) * size.tp + tp;
  const at = (pp, column, tp) => index.get(key(pp, column, tp));
  const position = (rank) => ({ tp: data.ranks.tp[rank], cp: data.ranks.cp[rank], dp: data.ranks.dp[rank], pp: data.ranks.pp[rank], column: column(rank) });

  // Ranks of an axis; replicas are those of a learner.
  const length = (axis) => axis === "dp" ? size.dp / size.sync : size[axis];

  // Ranks that differ from this one on one axis only, by axis; "ep" are those of "dp" that hold the
  // other experts.
  function groups(rank) {
    const { tp, cp, dp, pp } = position(rank), first = dp - dp % size.ep, replica = dp % length("dp");
    const copy = (dp) => at(pp, dp * size.cp + cp, tp);
    const along = (length, find) => Array.from({ length }, (_, i) => find(i)).filter((other) => other != null && other !== rank);
    return { tp: along(size.tp, (i) => at(pp, column(rank), i)), cp: along(size.cp, (i) => at(pp, dp * size.cp + i, tp)),
      ep: size.ep > 1 ? along(size.ep, (i) => copy(first + i)) : [], dp: along(length("dp"), (i) => copy(dp - replica + i)),
      pp: along(size.pp, (i) => at(i, column(rank), tp)), sync: along(size.sync, (i) => copy(i * length("dp") + replica)) };
  }

  function redraw() {
    for (const view of views) view();
  }
  function choose(rank) {
    if (rank == null) return;
    chosen = rank;
    redraw();
  }
  // Moves the choice along the axes, within the lattice.
  function move(key) {
    const [axis, by] = { ArrowLeft: ["columns", -1], ArrowRight: ["columns", 1], ArrowUp: ["tp", -1], ArrowDown: ["tp", 1],
      PageUp: ["pp", -1], PageDown: ["pp", 1] }[key] ?? [];
    if (!axis) return false;
    const { tp, pp } = position(chosen), to = { tp, pp, columns: column(chosen) };
    to[axis] = Math.max(0, Math.min(size[axis] - 1, to[axis] + by));
    choose(at(to.pp, to.columns, to.tp));
    return true;
  }
  // Shows the groups of the chosen rank only, or all ranks.
  function focus(on) {
    isFocused = on;
    redraw();
  }

  const isWait = (phase) => / wait$/.test(data.phases[phase]);
  const share = (phase, rank) => data.ms[phase].length && data.ranks.step_ms[rank] > 0 ? data.ms[phase][rank] / data.ranks.step_ms[rank] : 0;

  // Time of a phase over the median of the stage, by rank.
  function ratios(times) {
    const stages = new Map();
    data.ranks.pp.forEach((pp, rank) => { if (!stages.has(pp)) stages.set(pp, []); stages.get(pp).push(times[rank]); });
    for (const [pp, values] of stages) stages.set(pp, values.sort((a, b) => a - b)[values.length >> 1]);
    return times.map((ms, rank) => stages.get(data.ranks.pp[rank]) > 0 ? ms / stages.get(data.ranks.pp[rank]) : 1);
  }

  // Choices to show: [index of the phase or null, name].
  const choices = () => [[null, "own work"], ...data.phases.map((name, phase) => [phase, name])
    .filter(([phase]) => data.ms[phase].length && data.shares[phase] >= 0.005)];

  // Colour of each rank, and its legend.
  function coloring() {
    const color = loadColors("point"), wait = shown != null && isWait(shown);
    const values = shown == null ? data.ranks.work : wait ? data.ms[shown].map((_, rank) => share(shown, rank)) : ratios(data.ms[shown]);
    const shade = (value) => color(wait ? 2 ** (2 * value) : value ** 3.1), known = new Map();
    const name = shown == null ? "own work" : data.phases[shown];
    return { marks: (wait ? [0, 0.25, 0.5] : [0.8, 1, 1.25]).map(shade), ends: wait ? ["0 %", "50 %"] : ["0.8×", "1.25×"],
      text: wait ? `${name}: share of the step` : `${name} over the median of the stage`,
      of: (rank) => {
        const step = Math.round(100 * values[rank]);
        if (!known.has(step)) known.set(step, shade(step / 100));
        return known.get(step);
      },
      // Whether a rank stands out: clearly longer than the others, or waits of a quarter of the step.
      differs: (rank) => wait ? values[rank] > 0.25 : values[rank] > 1.04 };
  }

  const host = (rank) => data.hosts[data.ranks.host[rank]];
  const eventsOf = (rank) => (events ?? []).filter((event) => event.rank === data.ranks.rank[rank]);
  function coordinates(rank) {
    const { tp, cp, dp, pp } = position(rank);
    const learner = size.sync > 1 ? `learner ${Math.floor(dp / length("dp"))}, ` : "";
    return `${learner}tp ${tp}, ${size.cp > 1 ? `cp ${cp}, ` : ""}dp ${dp}${size.ep > 1 ? ` (ep ${dp % size.ep})` : ""}, pp ${pp}`;
  }
  function list(members) {
    const names = members.map((member) => data.ranks.rank[member]);
    return names.length > 12 ? `${names.slice(0, 12).join(", ")}, … (${names.length})` : names.join(", ") || "none";
  }
  // The chosen rank as a sentence.
  function sentence() {
    const { ranks, phases } = data, of = groups(chosen);
    return `rank ${ranks.rank[chosen]}: ${coordinates(chosen)}, host ${host(chosen)}; step ${grouped(ranks.step[chosen])}, ` +
      `own work ${number(ranks.work[chosen], 2)}× its stage's median` +
      `${ranks.work[chosen] > 1.02 ? `, longest over it in ${phases[ranks.phase[chosen]]}` : ""}. Shares layers with ${list(of.tp)}; ` +
      `${size.cp > 1 ? `sequences with ${list(of.cp)}; ` : ""}${size.ep > 1 ? `experts of ${list(of.ep)}; ` : ""}replicas ${list(of.dp)}; stages ${list(of.pp)}${size.sync > 1 ? `; other learners ${list(of.sync)}` : ""}.`;
  }
  // The same as names and values.
  function facts() {
    const { ranks, phases } = data, all = phases.map((name, phase) => [name, share(phase, chosen), phase]);
    const longest = all.reduce((max, entry) => entry[1] > max[1] ? entry : max), waits = all.filter(([, value, phase]) => isWait(phase) && value >= 0.0005);
    return [["coordinates", coordinates(chosen)], ["host", host(chosen)],
      ["last step", `${grouped(ranks.step[chosen])}, ${number(ranks.step_ms[chosen], 1)} ms`],
      ["own work", `${number(ranks.work[chosen], 2)}× the median of its stage`],
      ["longest phase", `${longest[0]}, ${percent(longest[1], 1)} of the step`],
      ["waits", waits.map(([name, value]) => `${name} ${percent(value, 1)}`).join(", ") || "none"],
      ...events ? [["faults", eventsOf(chosen).slice(-3).map((event) => `${event.event}${event.step == null ? "" : `, step ${grouped(event.step)}`}: ${event.text}`).join("; ") || "none"]] : []];
  }

  return { AXES, set, at, position, column, length, groups, choose, move, focus, redraw, choices, coloring, coordinates, host, share, isWait, eventsOf, sentence, facts,
    onChange: (view) => views.push(view), show: (phase) => { shown = phase; redraw(); },
    get data() { return data; }, get size() { return size; }, get chosen() { return chosen; }, get hasEvents() { return events != null; }, get shown() { return shown; }, get isFocused() { return isFocused; } };
})();
