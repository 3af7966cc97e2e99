
"use strict";
// Links between ranks: by axis, and by pairs of hosts (of ranks within one host), those with long
// waits first.
const linkTables = (() => {
  const { $, show, number, grouped, percent, bytes, add } = page;
  const ROWS = 20;
  const NAMES = { tp: "TP, within layers", cp: "CP, between rows of a sequence", ep: "EP, between experts", dp: "DP, between replicas", pp: "PP, between stages", sync: "sync, between learners" };
  let axis = null;

  const upper = (name) => name === "sync" ? name : name.toUpperCase();
  const wait = (name) => lattice.data.phases.indexOf(`${upper(name)} wait`);
  const waited = (name, rank) => lattice.data.ms[wait(name)]?.[rank] ?? 0;
  const rate = (value) => value == null || !isFinite(value) ? "–" : `${bytes(value)}/s`;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1] ?? 0;

  // Axes with several ranks: bytes of a rank and step, waits, and use of the link.
  function axes() {
    const { data } = lattice, stepMs = mean(data.ranks.step_ms);
    return lattice.AXES.map(([name]) => name).filter((name) => lattice.length(name) > 1).map((name) => {
      const times = data.ranks.rank.map((_, rank) => waited(name, rank)), sent = data.sent?.[name] ?? null, ms = mean(times);
      return { name, sent, ms, longest: times.reduce((max, value) => Math.max(max, value), 0), share: stepMs > 0 ? ms / stepMs : 0,
        used: sent == null || !(stepMs > 0) ? null : sent / stepMs * 1e3, exposed: sent == null || !(ms > 0) ? null : sent / ms * 1e3 };
    }).sort((a, b) => b.ms - a.ms);
  }

  // Pairs of neighbours along an axis, by their hosts.
  function pairs(name) {
    const { data, size } = lattice, { ranks } = data, found = new Map();
    ranks.rank.forEach((_, rank) => {
      const next = lattice.position(rank), coordinate = name === "ep" || name === "sync" ? "dp" : name;
      next[coordinate] += name === "sync" ? lattice.length("dp") : 1;
      if ((name === "ep" || name === "dp") && next.dp % lattice.length(name) === 0) return;
      if (next[coordinate] >= size[coordinate]) return;
      const peer = lattice.at(next.pp, next.dp * size.cp + next.cp, next.tp);
      if (peer == null) return;
      const [from, to] = [ranks.host[rank], ranks.host[peer]], isOneHost = data.hosts.length === 1 || (from === to && ranks.rank.length <= 64);
      const key = isOneHost ? `${rank} ${peer}` : `${from}-${to}`;
      const text = isOneHost ? `ranks ${ranks.rank[rank]} and ${ranks.rank[peer]}, ${data.hosts[from]}` : from === to ? `within ${data.hosts[from]}`
        : `${data.hosts[from]} and ${data.hosts[to]}`;
      if (!found.has(key)) found.set(key, { name, text, first: rank, count: 0, ms: 0, longest: 0 });
      const pair = found.get(key), both = [waited(name, rank), waited(name, peer)];
      pair.count += 1;
      pair.ms += (both[0] + both[1]) / 2;
      pair.longest = Math.max(pair.longest, ...both);
    });
    const all = [...found.values()];
    for (const pair of all) pair.ms /= pair.count;
    // Stages wait differently by their schedule.
    for (const stage of new Set(ranks.pp)) {
      const alike = all.filter(({ first }) => ranks.pp[first] === stage), usual = median(alike.map(({ ms }) => ms));
      for (const pair of alike) pair.over = usual > 0 ? pair.ms / usual : 1;
    }
    return all;
  }

  function header(table, names) {
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    for (const name of names) add(head, "th", name).scope = "col";
    return add(table, "tbody");
  }

  function axisTable(rows) {
    const { link } = lattice.data, body = header($("links-axes"), ["axis", "sent by a rank", "waited, mean", "longest", "of the step", "sent over the step",
      "sent over the waits", ...link ? ["of the link"] : []]);
    for (const row of rows) {
      const line = add(body, "tr");
      for (const text of [NAMES[row.name], row.sent == null ? "not counted" : bytes(row.sent), `${number(row.ms, 2)} ms`, `${number(row.longest, 2)} ms`,
        percent(row.share, 1), rate(row.used), rate(row.exposed),
        ...link ? [row.used == null ? "–" : percent(row.used / link.bytes_per_s, 1)] : []]) add(line, "td", text);
    }
  }

  function pairTable(names) {
    const all = (axis ? [axis] : names).flatMap(pairs).sort((a, b) => b.over - a.over || b.ms - a.ms), { sent } = lattice.data;
    $("links-pairs-title").textContent = all.length > ROWS ? `Slowest ${ROWS} of ${grouped(all.length)} pairs` : "Pairs, slowest first";
    const body = header($("links-pairs"), ["between", "axis", "pairs of ranks", "waited, mean", "over the median", "longest", "sent over the waits"]);
    for (const pair of all.slice(0, ROWS)) {
      const line = add(body, "tr", null, pair.over > 1.25 ? "best" : ""), button = add(add(line, "td"), "button", pair.text, "link");
      button.type = "button";
      button.title = `Choose rank ${lattice.data.ranks.rank[pair.first]}`;
      button.addEventListener("click", () => lattice.choose(pair.first));
      for (const text of [upper(pair.name), grouped(pair.count), `${number(pair.ms, 2)} ms`, `${number(pair.over, 2)}×`, `${number(pair.longest, 2)} ms`,
        sent?.[pair.name] == null || !(pair.ms > 0) ? "–" : rate(sent[pair.name] / pair.ms * 1e3)]) add(line, "td", text);
    }
  }

  let isReady = false, drawn = null;
  // Draws the links of the lattice's ranks.
  function draw() {
    if (drawn === lattice.data || (drawn && document.activeElement?.closest("#links"))) return;  // rows stay under a reader
    drawn = lattice.data;
    const rows = axes(), names = rows.map(({ name }) => name);
    show("links");
    const isEmpty = !rows.length;
    for (const id of ["links-axes", "links-pairs"]) $(id).parentElement.hidden = isEmpty;
    $("links-pairs-title").hidden = $("links-axis").parentElement.parentElement.hidden = $("links-pairs-title").nextElementSibling.hidden = isEmpty;
    $("links-lead").textContent = isEmpty ? "One rank: it sends nothing to others."
      : "Bytes are what a rank sends in a step, mean of the ranks. Over the step's time they say how busy the link is; over the waits how fast it would be if " +
        `nothing were overlapped: an upper limit where computation hides a share. ${lattice.data.link
          ? `The job's link: ${rate(lattice.data.link.bytes_per_s)}, ${number(1e6 * lattice.data.link.latency_s, 0)} µs.`
          : "The job names no link to compare with (parallel.link)."}`;
    if (isEmpty) return;
    axisTable(rows);
    if (!isReady) {
      isReady = true;
      const list = $("links-axis");
      add(list, "option", "all").value = "";
      for (const name of names) add(list, "option", upper(name)).value = name;
      list.addEventListener("change", () => { axis = list.value || null; pairTable(axes().map((row) => row.name)); });
    }
    pairTable(names);
  }

  return { draw, pairs };
})();
