// Charts, and what changes while one looks. All else works without this file.
"use strict";
(() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // As many digits as tell two marks of an axis apart, however small its values are.
  const mark = (value) => {
    const rounded = Number(value.toPrecision(6)), size = Math.abs(rounded);
    return size && (size < 1e-3 || size >= 1e6) ? rounded.toExponential() : String(rounded);
  };

  // A constant stands in the middle of an axis about itself.
  const range = (_, low, high) => {
    if (low === null) return [0, 1];
    const around = Math.abs(low) / 10 || 1;
    return low === high ? [low - around, high + around] : uPlot.rangeNum(low, high, 0.1, true);
  };

  function draw(box) {
    const { kind, x, y, data } = JSON.parse(box.dataset.chart);
    const interval = kind === "interval";
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1, size: 4 } };
    const edge = { stroke: "transparent", points: { show: false }, spanGaps: true };
    const line = { label: y, stroke: color("--accent"), width: 2, points: { size: 7, fill: color("--accent"), show: data[0].length < 60 }, spanGaps: true };
    box.replaceChildren();
    new uPlot({
      width: box.clientWidth, height: box.clientHeight, padding: [8, 12, 0, 0], legend: { show: false },
      scales: { x: { time: false }, y: { range } },
      axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e4, 1e5, 1e6], label: x, labelSize: 18, size: 30 }, { ...axis, size: 62, values: (_, marks) => marks.map(mark) }],
      series: interval ? [{ label: x }, { ...edge, label: "low" }, { ...edge, label: "high" }, line] : [{ label: x }, line],
      cursor: { y: false }, bands: interval ? [{ series: [2, 1], fill: color("--t1") }] : [],
    }, data, box);
  }

  const drawAll = (root) => root.querySelectorAll("[data-chart]").forEach(draw);
  const ready = () => {
    drawAll(document);
    const here = document.querySelector("nav [aria-current]");
    if (here) here.scrollIntoView({ block: "nearest", inline: "center" });
    document.body.addEventListener("htmx:afterSettle", (event) => drawAll(event.detail.elt.parentElement || document));
    let timer;
    const again = () => { clearTimeout(timer); timer = setTimeout(() => drawAll(document), 150); };
    window.addEventListener("resize", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  };

  // What a page shows is asked for again every few seconds, but never what has the focus.
  function update() {
    const busy = document.activeElement && document.activeElement.closest("[hx-trigger*='tuneloop-changed']");
    if (!document.hidden && !busy) htmx.trigger(document.body, "tuneloop-changed");
  }

  // One key for each choice.
  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    const chosen = document.querySelector(`[data-key="${CSS.escape(event.key.toLowerCase())}"]`);
    if (chosen) { event.preventDefault(); chosen.click(); }
  }

  // A tap, a click or Enter on a term shows what it means; anything else hides it.
  function explain(event) {
    const term = event.target.closest(".term"), about = document.getElementById("about");
    about.hidden = !term;
    about.textContent = term ? `${term.textContent}: ${term.title}` : "";
    if (term && event.detail) term.blur();
  }

  document.addEventListener("DOMContentLoaded", ready);
  document.addEventListener("click", explain);
  setInterval(update, 5000);
  document.addEventListener("keydown", press);
})();
