
"use strict";
// Ranks as points of a lattice in space: across data parallelism, down tensor parallelism, into
// depth pipeline stages.
const rankSpace = (() => {
  const { $, style, add } = page;
  const turn = { yaw: 0.55, pitch: 0.42 };
  let spots = null, isDue = false;

  // Positions of a length along an axis, in the middle of which is 0. Long axes are compressed, and
  // groups of `every` have gaps between them.
  function along(length, every = length) {
    const gaps = Math.ceil(length / every) - 1, extent = length > 1 ? (length - 1) ** 0.6 : 0;
    const step = length > 1 ? extent / (length - 1 + 0.8 * gaps) : 1;
    return { step, extent, of: (i) => (i + 0.8 * Math.floor(i / every)) * step - extent / 2 };
  }

  // Projects points of the lattice onto width x height pixels.
  function projection(width, height) {
    const { size } = lattice, across = along(size.columns, size.cp * size.ep > 1 ? size.cp * size.ep : size.columns), down = along(size.tp), deep = along(size.pp);
    const [sy, cy, sp, cp] = [Math.sin(turn.yaw), Math.cos(turn.yaw), Math.sin(turn.pitch), Math.cos(turn.pitch)];
    const far = 3 * Math.hypot(across.extent, down.extent, deep.extent) || 3;
    const flat = (x, y, z) => {
      const x1 = x * cy + z * sy, z1 = z * cy - x * sy, y2 = y * cp - z1 * sp, z2 = y * sp + z1 * cp, near = far / (far + z2);
      return [x1 * near, y2 * near, z2, near];
    };
    const half = [across, down, deep].map(({ extent }) => extent / 2 + 0.25);
    let [left, right, top, bottom] = [0, 0, 0, 0];
    for (let corner = 0; corner < 8; ++corner) {
      const [x, y] = flat(...half.map((value, i) => corner >> i & 1 ? value : -value));
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
    const margin = 32, scale = Math.min((width - 2 * margin) / (right - left), (height - 2 * margin) / (bottom - top), 150);
    const [x0, y0] = [width / 2 - scale * (left + right) / 2, height / 2 - scale * (top + bottom) / 2];
    const to = (x, y, z) => {
      const [px, py, depth, near] = flat(x, y, z);
      return [x0 + scale * px, y0 + scale * py, depth, near];
    };
    const steps = [[across, size.columns], [down, size.tp], [deep, size.pp]].filter(([, length]) => length > 1).map(([axis]) => axis.step);
    return { to, across, down, deep, half, radius: Math.max(1.6, Math.min(11, 0.3 * scale * Math.min(1, ...steps))) };
  }

  function prepare() {
    const canvas = $("space-map"), width = Math.max(160, canvas.parentElement.clientWidth), ratio = Math.min(2, devicePixelRatio || 1);
    const height = Math.round(Math.max(240, Math.min(440, 0.62 * width)));
    if (canvas.width !== width * ratio || canvas.height !== height * ratio) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return { context, width, height };
  }

  // Edges of the lattice from its first rank, or their names, which are above the points.
  function paintAxes(context, { to, half }, { width, height }, isNames) {
    const { size } = lattice, corner = half.map((value) => -value);
    context.strokeStyle = style("muted");
    context.fillStyle = style("muted");
    context.lineWidth = 1;
    context.font = "600 12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    const from = to(...corner), say = (text, x, y) => {
      context.strokeStyle = style("bg");
      context.lineWidth = 4;
      context.strokeText(text, x, y);
      context.fillText(text, x, y);
    };
    [[size.cp === 1 ? "DP" : size.dp === 1 ? "CP" : "DP × CP", size.columns], ["TP", size.tp], ["PP", size.pp]].forEach(([name, length], axis) => {
      if (length < 2) return;
      const end = to(...corner.map((value, i) => i === axis ? half[i] : value));
      if (!isNames) {
        context.beginPath();
        context.moveTo(from[0], from[1]);
        context.lineTo(end[0], end[1]);
        context.stroke();
        return;
      }
      const far = Math.hypot(end[0] - from[0], end[1] - from[1]) || 1, text = `${name} ${length - 1}`, room = context.measureText(text).width / 2 + 3;
      const [x, y] = [end[0] + 20 * (end[0] - from[0]) / far, end[1] + 14 * (end[1] - from[1]) / far];
      say(text, Math.max(room, Math.min(width - room, x)), Math.max(9, Math.min(height - 9, y)));
    });
    if (isNames) say("0", Math.max(6, from[0] - 8), Math.max(9, from[1] - 8));
  }

  function paint() {
    const began = performance.now(), { data, chosen, isFocused } = lattice, { ranks } = data;
    const { context, width, height } = prepare(), view = projection(width, height), { to, across, down, deep, radius } = view;
    const colors = lattice.coloring(), groups = lattice.groups(chosen), members = new Set([chosen, ...Object.values(groups).flat()]);
    const count = ranks.tp.length, order = Array.from({ length: count }, (_, rank) => rank);
    spots = ranks.tp.map((tp, rank) => to(across.of(lattice.column(rank)), down.of(tp), deep.of(ranks.pp[rank])));
    order.sort((a, b) => spots[b][2] - spots[a][2]);
    paintAxes(context, view, { width, height }, false);
    const dot = (rank, wider) => {
      const [x, y, , near] = spots[rank], r = radius * near * wider;
      context.fillStyle = colors.of(rank);
      if (count > 1024 && wider === 1) return context.fillRect(x - r, y - r, 2 * r, 2 * r);
      context.beginPath();
      context.arc(x, y, r, 0, 7);
      context.fill();
    };
    const dim = (rank) => isFocused && !members.has(rank) ? 0.16 : 1;
    for (const rank of order) {
      context.globalAlpha = dim(rank) * (count > 1024 ? 0.6 : 1);
      dot(rank, 1);
    }
    // Those that differ are seen through the others.
    for (const rank of order) {
      if (!colors.differs(rank)) continue;
      context.globalAlpha = dim(rank);
      dot(rank, count > 1024 ? 2 : 1.25);
    }
    context.globalAlpha = 1;
    paintGroups(context, groups, radius, colors);
    paintAxes(context, view, { width, height }, true);
    $("space-map").dataset.frameMs = (performance.now() - began).toFixed(2);
  }

  // Lines from the chosen rank to its peers.
  function paintGroups(context, groups, radius, colors) {
    const { chosen } = lattice, from = spots[chosen];
    const ring = (rank, color, wide) => {
      const [x, y, , near] = spots[rank];
      context.beginPath();
      context.arc(x, y, radius * near + wide, 0, 7);
      context.fillStyle = colors.of(rank);
      context.fill();
      context.strokeStyle = color;
      context.stroke();
    };
    for (const [axis, name] of [...lattice.AXES].sort(([a], [b]) => (a === "ep") - (b === "ep"))) {  // within DP, so above it
      context.strokeStyle = style(name);
      context.lineWidth = axis === "ep" ? 3.5 : 2;
      context.beginPath();
      for (const rank of groups[axis]) {
        context.moveTo(from[0], from[1]);
        context.lineTo(spots[rank][0], spots[rank][1]);
      }
      context.stroke();
      context.lineWidth = radius > 4 ? 2 : 1.25;
      for (const rank of groups[axis]) ring(rank, style(name), radius > 4 ? 1 : 0.5);
    }
    context.lineWidth = 3;
    ring(chosen, style("ink"), 3);
  }

  function schedule() {
    if (isDue || $("groups").hidden) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      paint();
    });
  }
  function rotate(yaw, pitch) {
    turn.yaw += yaw;
    turn.pitch = Math.max(-1.5, Math.min(1.5, turn.pitch + pitch));
    schedule();
  }

  // Nearest rank of those under the pointer.
  function rankAt(x, y) {
    let found = null, best = 14 ** 2;
    spots.forEach(([px, py, depth], rank) => {
      const far = (px - x) ** 2 + (py - y) ** 2;
      if (far < best - 1 || (far < best + 1 && found != null && depth < spots[found][2])) [found, best] = [rank, far];
    });
    return found;
  }

  function listen() {
    const canvas = $("space-map");
    let from = null, isDrag = false;
    canvas.addEventListener("pointerdown", (event) => {
      from = [event.clientX, event.clientY];
      isDrag = false;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) return;
      const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
      if (!isDrag && Math.hypot(dx, dy) < 5) return;
      isDrag = true;
      from = [event.clientX, event.clientY];
      rotate(0.008 * dx, -0.008 * dy);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from && !isDrag) {
        const box = canvas.getBoundingClientRect(), rank = rankAt(event.clientX - box.left, event.clientY - box.top);
        if (rank != null) lattice.choose(rank);
        lattice.focus(rank != null);
      }
      from = null;
    });
    canvas.addEventListener("pointercancel", () => { from = null; });
    const turns = { ArrowLeft: [-0.12, 0], ArrowRight: [0.12, 0], ArrowUp: [0, 0.12], ArrowDown: [0, -0.12] };
    canvas.addEventListener("keydown", (event) => {
      if (event.shiftKey && turns[event.key]) rotate(...turns[event.key]);
      else if (event.key === "Enter" || event.key === " ") lattice.focus(true);
      else if (event.key === "Escape") lattice.focus(false);
      else if (!lattice.move(event.key)) return;
      event.preventDefault();
    });
    for (const [text, name, key] of [["←", "left", "ArrowLeft"], ["→", "right", "ArrowRight"], ["↑", "up", "ArrowUp"], ["↓", "down", "ArrowDown"]]) {
      const button = add($("space-turns"), "button", text);
      button.type = "button";
      button.title = `Turn ${name}`;
      button.setAttribute("aria-label", `Turn ${name}`);
      button.addEventListener("click", () => rotate(...turns[key]));
    }
    lattice.onChange(schedule);
    new ResizeObserver(schedule).observe(canvas.parentElement);
  }

  let isReady = false;
  function draw() {
    if (!isReady) listen();
    isReady = true;
    schedule();
  }

  return { draw, rotate, paint, spot: (rank) => spots?.[rank], turn };
})();
