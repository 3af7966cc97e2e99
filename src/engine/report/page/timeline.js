
"use strict";
// One layer per rank as SVG: a row for the rank's threads (GEMMs, other computation, exposed
// waits) and one or more for its link; arrows connect a transfer to the wait that it ended.
const timeline = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const KINDS = {
    gemm: "matrix product", compute: "other computation", wait: "waiting for communication",
    transfer: "transfer on the link", data: "input", checkpoint: "checkpoint",
  };
  const color = (kind) => `var(--${kind === "data" || kind === "checkpoint" ? "rest" : kind})`;

  function node(name, attributes, parent) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.appendChild(element);
    return element;
  }

  function format(us) {
    return us >= 1000 ? `${(us / 1000).toPrecision(3)} ms` : `${us.toPrecision(3)} µs`;
  }

  // Smallest 1, 2 or 5 times a power of ten that gives at most `most` steps.
  function tick(span, most) {
    const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw);
  }

  function describe(slice, rank) {
    let text = `${slice.name}: ${KINDS[slice.kind]}\nrank ${rank}, ${format(slice.end - slice.begin)}`;
    text += ` from ${format(slice.begin)}`;
    if (slice.tile >= 0) text += `\ntile ${slice.tile}`;
    if (slice.peer >= 0) {
      text += (slice.tile >= 0 ? ", " : "\n") + (slice.kind === "transfer" ? "to" : "from") +
        ` rank ${slice.peer}`;
    }
    return text;
  }

  // `span`: width in microseconds, the same for all strips, for visual comparison.
  function draw(box, data, span, tip) {
    const width = Math.max(box.clientWidth, 280), narrow = width < 560;
    const left = narrow ? 44 : 104, right = width - 8;
    const x = (us) => left + us / span * (right - left);
    const BUSY = 26, LINK = 13, GAP = 5, BETWEEN = 16, TOP = 4;
    let y = TOP;
    const places = data.ranks.map((rank) => {
      const links = Math.max(1, ...rank.slices.map((s) => s.kind === "transfer" ? s.row + 1 : 0));
      const place = { busy: y, link: y + BUSY + GAP, links };
      y = place.link + links * (LINK + 2) + BETWEEN;
      return place;
    });
    const bottom = y - BETWEEN + 4;
    const svg = node("svg", { viewBox: `0 0 ${width} ${bottom + 20}`, height: bottom + 20,
      role: "img", "aria-label": `Timeline of one layer, ${data.title}` });
    const defs = node("defs", {}, svg);
    const hatch = node("pattern", { id: `hatch-${data.id}`, width: 6, height: 6,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    node("rect", { width: 6, height: 6, style: "fill: var(--wait)" }, hatch);
    node("rect", { width: 2, height: 6, style: "fill: var(--card); opacity: .45" }, hatch);

    const head = node("marker", { id: `head-${data.id}`, viewBox: "0 0 6 6", refX: 5, refY: 3,
      markerWidth: 6, markerHeight: 6, orient: "auto" }, defs);
    node("path", { class: "head", d: "M0 0L6 3L0 6z" }, head);

    const step = tick(span, narrow ? 4 : 9);
    for (let us = 0; us <= span * 1.0001; us += step) {
      node("line", { class: "grid", x1: x(us), x2: x(us), y1: 0, y2: bottom }, svg);
      const label = node("text", { x: x(us), y: bottom + 14,
        "text-anchor": us === 0 ? "start" : x(us) > right - 24 ? "end" : "middle" }, svg);
      label.textContent = us === 0 ? "0" : format(us);
    }
    data.ranks.forEach((rank, r) => {
      const place = places[r];
      node("text", { class: "rank", x: 0, y: place.busy + 17 }, svg).textContent =
        narrow ? `r${rank.rank}` : `rank ${rank.rank}`;
      if (!narrow) node("text", { x: 56, y: place.link + 10 }, svg).textContent = "link";
      node("rect", { class: "lane", x: left, y: place.busy, width: right - left, height: BUSY }, svg);
      node("rect", { class: "lane", x: left, y: place.link, width: right - left,
        height: place.links * (LINK + 2) - 2 }, svg);
      for (const slice of rank.slices) {
        const link = slice.kind === "transfer";
        const w = x(slice.end) - x(slice.begin);
        const rect = node("rect", { class: "slice", x: x(slice.begin),
          y: link ? place.link + slice.row * (LINK + 2) : place.busy,
          width: Math.max(w > 3 ? w - 0.7 : w, 0.6), height: link ? LINK : BUSY, rx: w > 6 ? 2 : 0,
          style: `fill: ${slice.kind === "wait" ? `url(#hatch-${data.id})` : color(slice.kind)}` }, svg);
        rect.addEventListener("pointermove", (e) => tip.show(e, describe(slice, rank.rank)));
        rect.addEventListener("pointerleave", tip.hide);
        const wide = w > slice.name.length * 6.6 + 8;
        if (wide && (slice.kind === "gemm" || slice.kind === "compute")) {
          const text = node("text", { x: x(slice.begin) + w / 2, y: place.busy + 17, "text-anchor": "middle",
            style: `pointer-events: none; fill: ${slice.kind === "gemm" ? "#fff" : "#14171f"}` }, svg);
          text.textContent = slice.name;
        }
      }
    });
    for (const arrow of data.arrows) {
      const from = data.ranks[arrow.from].slices[arrow.transfer];
      const to = data.ranks[arrow.to].slices[arrow.wait];
      const y1 = places[arrow.from].link + from.row * (LINK + 2) + LINK / 2;
      const y2 = places[arrow.to].busy + BUSY / 2;
      const x1 = x(from.end), x2 = x(to.end), bend = Math.min(22, Math.abs(y2 - y1) / 2);
      node("path", { class: "arrow", "marker-end": `url(#head-${data.id})`,
        d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 + bend} ${y2} ${x2} ${y2}` }, svg);
    }
    box.replaceChildren(svg);
  }

  return { draw, KINDS, color, format };
})();
