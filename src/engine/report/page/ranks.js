
"use strict";
// Map of ranks and steps.
const rankMap = (() => {
  const { $, show, number, grouped, percent, add, tip, loadColors } = page;

  // Factor of a time over the median of its pipeline stage, or its share of the step.
  function valuesOf(ranks, view) {
    const stages = ranks.rows.map((row) => row.stage);
    return view.ms.map((cells, x) => {
      if (view.wait) return cells.map((ms, y) => ms / (ranks.step_ms[x][y] || 1));
      const usual = new Map();
      for (const stage of new Set(stages)) {
        const sorted = cells.filter((_, y) => stages[y] === stage).sort((a, b) => a - b);
        const half = sorted.length >> 1;
        usual.set(stage, sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2);
      }
      return cells.map((ms, y) => usual.get(stages[y]) > 0 ? ms / usual.get(stages[y]) : 1);
    });
  }

  // Draws the map of ranks and steps; cells are read with the mouse or with the arrow keys.
  // Another call draws another map in its stead.
  let shown = null, readCell = null;
  function draw(ranks) {
    shown = ranks;
    if (!ranks) return;
    show("ranks");
    const select = $("ranks-view"), { rows, steps, last, views } = ranks;
    if (!$("ranks-map")) {
      const made = add($("ranks-box"), "canvas");
      made.id = "ranks-map";
      made.tabIndex = 0;
      made.setAttribute("role", "img");
      made.setAttribute("aria-label", `Time of ${rows.length} ranks over the steps`);
      made.setAttribute("aria-describedby", "ranks-cell");
      select.addEventListener("change", () => draw(shown));
      add($("ranks-box"), "div").id = "ranks-ends";
      made.addEventListener("mousemove", (event) => {
        const at = made.getBoundingClientRect();
        readCell?.((event.clientX - at.left) / at.width, (event.clientY - at.top) / at.height, event);
      });
      made.addEventListener("mouseleave", tip.hide);
      const cursor = { x: 0, y: 0 };
      made.addEventListener("keydown", (event) => {
        const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
        if (dx == null) return;
        event.preventDefault();
        const width = shown.steps.length, height = shown.rows.length;
        cursor.x = Math.max(0, Math.min(width - 1, cursor.x + dx));
        cursor.y = Math.max(0, Math.min(height - 1, cursor.y + dy));
        readCell((cursor.x + 0.5) / width, (cursor.y + 0.5) / height);
      });
    }
    const names = views.map((view) => view.name);
    if ([...select.options].map((option) => option.text).join() !== names.join()) {
      const chosen = select.value;
      select.replaceChildren();
      for (const name of names) add(select, "option", name);
      select.selectedIndex = Math.max(0, names.indexOf(chosen));
    }
    $("ranks-slow").replaceChildren();
    for (const line of ranks.slow) add($("ranks-slow"), "li", line);
    const ends = $("ranks-ends");
    ends.replaceChildren();
    add(ends, "span", `step ${grouped(steps[0])}`);
    add(ends, "span", rows.length > 1 ? `${rows[0].name} above, ${rows.at(-1).name} below` : rows[0].name);
    add(ends, "span", `${grouped(last)}`);
    const canvas = $("ranks-map");
    const view = views[Math.max(0, select.selectedIndex)], values = valuesOf(ranks, view), color = loadColors();
    // 25 % longer than the peers, or half of the step, has the strongest colour.
    const shade = (value) => color(view.wait ? 2 ** (2 * value) : value ** 3.1);
    canvas.width = steps.length;
    canvas.height = rows.length;
    canvas.style.height = `${Math.max(72, Math.min(640, 18 * rows.length))}px`;
    const context = canvas.getContext("2d");
    values.forEach((cells, x) => cells.forEach((value, y) => {
      context.fillStyle = shade(value);
      context.fillRect(x, y, 1, 1);
    }));
    const legend = $("ranks-legend"), marks = view.wait ? [0, 0.25, 0.5] : [0.8, 1, 1.25];
    legend.replaceChildren();
    add(legend, "b", view.wait ? `${view.name}: share of the step` : `${view.name}: over the median of the stage's ranks`);
    add(legend, "span", view.wait ? "0 %" : "0.8×");
    add(legend, "i").style.background = `linear-gradient(90deg, ${marks.map(shade).join(", ")})`;
    add(legend, "span", view.wait ? "50 %" : "1.25×");
    readCell = (across, down, event) => {
      const inside = (part, most) => Math.max(0, Math.min(most - 1, Math.floor(part * most)));
      const x = inside(across, steps.length), y = inside(down, rows.length);
      const to = x + 1 < steps.length ? steps[x + 1] - 1 : last, value = values[x][y];
      const text = `${rows[y].name} (${rows[y].position}), step${to > steps[x] ? `s ${grouped(steps[x])} to ${grouped(to)}`
        : ` ${grouped(to)}`}: ${view.name} ${number(view.ms[x][y], 2)} ms, ` +
        (view.wait ? `${percent(value, 1)} of the step` : `${number(value, 2)}× its stage's median`);
      if (event) tip.show(event, text); else $("ranks-cell").textContent = text;
    };
  }

  return { draw };
})();
