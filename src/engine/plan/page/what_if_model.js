
"use strict";
// Step time, memory and wire formats of a job's layouts for other links, memory and accuracy: the
// formulas of engine/plan/cost/step_cost.cc, layout_formats.cc and layout_search.cc, on kernels' seconds
// and bytes that the planner computed.
const planner = (data) => {
  const { factors, formats, dp_formats: dpFormats } = data;
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

  // Seconds of replicas' sums: bytes of `passes` over the ring, and kernels that encode and decode.
  const passesOf = (row, host, network) => {
    const ring = (elements, adapters) => elements / (adapters === 0 ? host : Math.min(host, adapters * network));
    return ring(row.dense, row.dense_adapters) + ring(row.experts, row.expert_adapters);
  };
  function encodedSum(row, passes, site, format) {
    const whole = site === 0 ? 4 : 2, codings = site === 0 ? 2 : row.weight_codings;
    if (format === 0) return passes * whole;
    const { gradient_bytes: ofGradient, weight_bytes: ofWeight, rate } = dpFormats[format], bytes = site === 0 ? ofGradient : ofWeight;
    return Math.hypot(passes * bytes, codings * row.sent_weights * (whole + bytes) / rate);
  }

  // No format, the fastest exact one and the fastest within the error.
  function alternatives(row, passes, site, error) {
    const best = (bound) => dpFormats.reduce((found, format, i) => format.error <= bound
      && encodedSum(row, passes, site, i) < encodedSum(row, passes, site, found) ? i : found, 0);
    return [...new Set([0, best(0), best(error)])];
  }

  function stepTerms(row, [zero, , update], wires, host, network) {
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
    const passes = passesOf(row, host, network);
    const [gradients, weights] = [0, 1].map((site) => encodedSum(row, passes, site, wires[3 + site]));
    const sums = factors.dp * (zero === 0 ? 2 * gradients : gradients * (zero === 2 ? m : 1) + weights);
    const optimizer = update + (dpFormats[wires[3]].error > 0 ? row.residual_s : 0);
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
    const add = (variant, memory_gib, wires) => {
      if (memory_gib > limit) return;
      const { total, terms } = stepTerms(row, variant, wires, host, network);
      const error = Math.max(...wires.map((wire, site) => (site < 3 ? formats : dpFormats)[wire].error));
      const layout = { row, zero: variant[0], memory_gib, wires, error, step_s: total, terms };
      if (kept.some((other) => isAsGood(other, layout))) return;
      for (let i = kept.length - 1; i >= 0; --i) if (isAsGood(layout, kept[i])) kept.splice(i, 1);
      kept.push(layout);
    };
    const passes = passesOf(row, host, network);
    for (const level of levels) {
      const sites = [row.tp > 1 ? fastest(row.tp_coded, host, level) : 0,
        row.ep > 1 ? fastest(row.ep_coded, row.ep_network ? network : host, level) : 0,
        row.pp > 1 ? fastest(row.pp_bytes, network, level) : 0];
      for (const variant of row.variants) add(variant, variant[1], [...sites, 0, 0]);
      if (row.dp === 1 || dpFormats.length === 1) continue;
      for (const gradient of alternatives(row, passes, 0, level)) {
        for (const weight of alternatives(row, passes, 1, level)) {
          if (gradient + weight === 0) continue;
          const kind = (dpFormats[gradient].error > 0 ? 3 : 0) + (weight === 0 ? 0 : dpFormats[weight].error > 0 ? 2 : 1);
          for (const variant of row.variants) {
            if (variant[0] > 0) add(variant, variant[3][kind], [...sites, gradient, weight]);
          }
        }
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

  const codec = ({ wires: [tp, ep, pp, gradients, weights] }) =>
    data.codecs[(((tp * formats.length + ep) * formats.length + pp) * dpFormats.length + gradients) * dpFormats.length + weights];
  // Names of the formats in use.
  const formatNames = ({ wires }) =>
    [...new Set(wires.map((wire, site) => wire > 0 ? (site < 3 ? formats : dpFormats)[wire].name : ""))].filter((name) => name);

  // Keys of the layout in a job file.
  function jobKeys(layout) {
    const { row } = layout;
    return `[train]\ndtype = 'bf16'\nmicrobatch = ${row.mbs}\nrecompute = '${row.recompute}'\n\n[parallel]\ntp = ${row.tp}\npp = ${row.pp}\n`
      + `dp = ${row.dp}\nep = ${row.ep}\nzero = ${layout.zero}\nschedule = '${row.schedule}'\n`
      + `virtual_stages = ${row.vpp}\ncodec = '${codec(layout)}'\n`;
  }

  return { defaults, worlds, formats, search, front, codec, formatNames, jobKeys };
};
