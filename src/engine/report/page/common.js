
"use strict";
// Helpers of the pages: elements, numbers, colours, charts and themes.
const page = (() => {
  const $ = (id) => document.getElementById(id);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const show = (id) => { $(id).hidden = false; };
  const number = (value, digits = 3) => value == null || !isFinite(value) ? "–" : Number(value).toFixed(digits);
  const grouped = (value) => Math.round(value).toLocaleString("en-US");
  const short = (value) => value >= 1e6 ? `${(value / 1e6).toPrecision(3)} M`
    : value >= 1e4 ? `${(value / 1e3).toPrecision(3)} k` : grouped(value);
  const percent = (value, digits = 0) => value == null ? "–" : `${(100 * value).toFixed(digits)} %`;
  const bytes = (value) => value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : value >= 1e6 ? `${(value / 1e6).toFixed(2)} MB` : `${(value / 1e3).toFixed(1)} kB`;

  function add(parent, name, text, className) {
    const element = document.createElement(name);
    if (text != null) element.textContent = text;
    if (className) element.className = className;
    parent.appendChild(element);
    return element;
  }

  const tip = {
    show(event, text) {
      const box = $("tip");
      box.textContent = text;
      box.hidden = false;
      const x = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
      const below = event.clientY + 16 + box.offsetHeight < innerHeight;
      box.style.left = `${Math.max(8, x)}px`;
      box.style.top = `${below ? event.clientY + 16 : event.clientY - box.offsetHeight - 10}px`;
    },
    hide() { $("tip").hidden = true; },
  };

  const charts = [];
  function chart(id, config) {
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    charts.push(new Chart($(id), config));
  }
  function axis(title, extra = {}) {
    const { ticks, ...rest } = extra;
    return { title: { display: true, text: title, color: style("muted") }, grid: { color: style("line") },
      ticks: { color: style("muted"), maxRotation: 0, ...ticks }, ...rest };
  }
  function options(extra) {
    return { responsive: true, maintainAspectRatio: false, animation: false, normalized: true,
      interaction: { mode: "index", intersect: false }, ...extra };
  }
  const legend = () => ({ position: "top", align: "start",
    labels: { color: style("ink"), boxWidth: 14, boxHeight: 3, usePointStyle: false } });
  function curve(label, values, color, extra = {}) {
    return { label, data: values, borderColor: color, backgroundColor: color, borderWidth: 2,
      pointRadius: values.length === 1 ? 3 : 0, pointHitRadius: 6, ...extra };
  }

  // Colors a load by its ratio to an even share: below is blue, above is red, half and double
  // equally strong; an even share has the colour `middle`.
  function loadColors(middle = "even") {
    const rgb = (name) => style(name).match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
    const even = rgb(middle), less = rgb("gemm"), more = rgb("wait");
    return (load) => {
      const far = Math.max(-1, Math.min(1, Math.log2(Math.max(load, 1e-3)))), to = far < 0 ? less : more;
      return `rgb(${even.map((from, i) => Math.round(from + (to[i] - from) * Math.abs(far))).join(",")})`;
    };
  }

  // Applies the reader's theme and draws, now and when it changes.
  function onTheme(draw) {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let chosen = null;
    const apply = () => {
      document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
      draw();
    };
    dark.addEventListener("change", apply);
    $("theme").addEventListener("click", () => {
      chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      apply();
    });
    apply();
  }

  return { $, style, show, number, grouped, short, percent, bytes, add, tip, charts, chart, axis, options, legend,
    curve, loadColors, onTheme };
})();
