
"use strict";
// Step time, memory and wire formats of a job's layouts for other links, memory and accuracy: the
// formulas of engine/plan/step_cost.cc, layout_formats.cc and layout_search.cc, on kernels' seconds
// and bytes that the planner computed.
const planner = (data) => {
  const { factors, formats } = data;
  const worlds = data.worlds.map((world) => ({ ...world,
    rows: world.rows.map((values) => Object.fromEntries(data.columns.map((name, i) => [name, values[i]]))) }));

  // Knobs: GB/s of `host` and `network`, memory_gib, error (largest of a wire format), gpus.
  const defaults = { gpus: data.gpus, host: data.host, network: data.network, memory_gib: data.memory_gib, error: data.max_error };

  function encoded(bytes, rate, format) {
    const seconds = bytes / rate;
    return format === 0 ? seconds
      : Math.hypot(seconds * formats[format].bytes / 2, bytes * (2 + formats[format].bytes) / formats[format].rate);
  }

  // Index of the fastest format of an exchange within the error.
  function fastest(bytes, rate, error) {
    let best = 0, least = encoded(bytes, rate, 0);
    formats.forEach(({ error: bound }, i) => {
      const seconds = encoded(bytes, rate, i);
      if (bound <= error && seconds < least) [best, least] = [i, seconds];
    });
    return best;
  }

  function stepTerms(row, [zero, , optimizer], wires, host, network) {
    const epRate = row.ep_network ? network : host, m = row.m;
    const site = (all, coded, rate, wire) => (all - coded) / rate + encoded(coded, rate, wire);
    const tp = factors.tp * site(row.tp_bytes, row.tp_coded, host, wires[0]),
      ep = factors.ep * site(row.ep_bytes, row.ep_coded, epRate, wires[1]),
      transfers = factors.pp * encoded(row.pp_bytes, network, wires[2]);
    const layer = row.layer_s + tp + ep, head = row.head_s;
    const mean = layer * row.mean_layers + head / row.pp;
    const slowest = Math.max(layer * row.stage_layers, layer * row.last_stage_layers + head);
    const imbalance = m * factors.imbalance * (slowest - mean);
    const steady = m * (mean + transfers) + imbalance, bubble = steady * factors.bubble * row.bubble;
    const ring = (elements, adapters) => elements / (adapters === 0 ? host : Math.min(host, adapters * network));
    const passes = ring(row.dense, row.dense_adapters) + ring(row.experts, row.expert_adapters);
    const bytes = zero === 0 ? 2 * 4 : 4 * (zero === 2 ? m : 1) + 2;
    const sums = factors.dp * passes * bytes;
    const window = factors.window * steady / m * (zero === 2 ? m : row.window);
    const dp = (window ** 4 + sums ** 4) ** 0.25 - window;
    const sum = steady + bubble + dp + optimizer + factors.fixed;
    const total = sum * (1 + factors.jitter * row.octaves) * factors.software;
    return { total, terms: { compute: m * (row.layer_s * row.mean_layers + head / row.pp), tp: m * tp * row.mean_layers,
      ep: m * ep * row.mean_layers, pp: m * transfers, dp, imbalance, bubble, optimizer, fixed: factors.fixed, jitter: total - sum } };
  }

  const isAsGood = (a, b) => a.step_s <= b.step_s && a.memory_gib <= b.memory_gib && a.error <= b.error;

  // Layouts of a row that fit and that no other of the row beats.
  function layoutsOf(row, knobs, levels) {
    const host = knobs.host * 1e9, network = knobs.network * 1e9, limit = data.memory_share * knobs.memory_gib;
    const kept = [];
    for (const level of levels) {
      const wires = [row.tp > 1 ? fastest(row.tp_coded, host, level) : 0,
        row.ep > 1 ? fastest(row.ep_coded, row.ep_network ? network : host, level) : 0,
        row.pp > 1 ? fastest(row.pp_bytes, network, level) : 0];
      const error = Math.max(...wires.map((wire) => formats[wire].error));
      for (const variant of row.variants) {
        if (variant[1] > limit) continue;
        const { total, terms } = stepTerms(row, variant, wires, host, network);
        const layout = { row, zero: variant[0], memory_gib: variant[1], wires, error, step_s: total, terms };
        if (kept.some((other) => isAsGood(other, layout))) continue;
        for (let i = kept.length - 1; i >= 0; --i) if (isAsGood(layout, kept[i])) kept.splice(i, 1);
        kept.push(layout);
      }
    }
    return kept;
  }

  // Layouts that fit, fastest first, with the chosen values only: { tp: 4, zero: 1, … }.
  function search(knobs, chosen = {}) {
    const world = worlds.find(({ gpus }) => gpus === knobs.gpus);
    const levels = [0, ...formats.map(({ error }) => error).filter((error) => error > 0 && error <= knobs.error)];
    const picked = Object.entries(chosen);
    const found = [];
    for (const row of world.rows) {
      if (picked.some(([name, value]) => name !== "zero" && row[name] !== value)) continue;
      const variants = chosen.zero == null ? row.variants : row.variants.filter(([zero]) => zero === chosen.zero);
      found.push(...layoutsOf(variants === row.variants ? row : { ...row, variants }, knobs, levels));
    }
    return found.sort((a, b) => a.step_s - b.step_s || a.memory_gib - b.memory_gib || a.error - b.error);
  }

  // Layouts that no other beats in step time, memory and error, fastest first.
  function front(fastestFirst) {
    const found = [];
    for (const layout of fastestFirst) if (!found.some((other) => isAsGood(other, layout))) found.push(layout);
    return found;
  }

  const codec = ({ wires: [tp, ep, pp] }) => data.codecs[(tp * formats.length + ep) * formats.length + pp];

  // Keys of the layout in a job file.
  function jobKeys(layout) {
    const { row } = layout;
    return `[train]\ndtype = 'bf16'\nmicrobatch = ${row.mbs}\nrecompute = '${row.recompute}'\n\n[parallel]\ntp = ${row.tp}\npp = ${row.pp}\n`
      + `dp = ${row.dp}\nep = ${row.ep}\nzero = ${layout.zero}\nschedule = '${row.schedule}'\n`
      + `virtual_stages = ${row.vpp}\ncodec = '${codec(layout)}'\n`;
  }

  return { defaults, worlds, formats, search, front, codec, jobKeys };
};
