"""The page's style sheet and script, as they are put into it."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --rule: #d0d7de;
  --link: #0a58a8; --warn-ink: #7a3e00; --warn-paper: #fff4e0; --good: #006b4a; --bad: #a63c00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --panel: #1d2128; --ink: #e6e9ee; --soft: #a3acb8;
  --rule: #3a414b; --link: #7cc0ff; --warn-ink: #ffcf8f; --warn-paper: #3a2a10; --good: #4fd1a1; --bad: #ff9a66; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0 auto; max-width: 1500px; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.35rem; margin: 2.5rem 0 0.5rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 0 0 0.25rem; }
p { margin: 0.25rem 0; max-width: 75ch; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -100vw; }
.skip:focus { left: 0.5rem; top: 0.5rem; background: var(--paper); padding: 0.5rem; z-index: 10; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; list-style: none; padding: 0; margin: 0.75rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1rem;
  margin: 1rem 0; }
figure { margin: 0; padding: 0.75rem; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  min-width: 0; }
figure select { font: inherit; margin: 0.25rem 0; color: var(--ink); background: var(--paper);
  border: 1px solid var(--rule); border-radius: 4px; padding: 0.15rem 0.3rem; }
.plot { width: 100%; min-height: 380px; }
.scroll { overflow: auto; max-width: 100%; max-height: 30rem; }
.scroll.tall { max-height: none; }
thead th { position: sticky; top: 0; background: var(--paper); }
figure thead th { background: var(--panel); }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
table:not(.words) :is(th, td) { white-space: nowrap; }
.words td { min-width: 7rem; max-width: 30rem; }
.words tbody th { min-width: 11rem; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
tbody th { color: var(--ink); font-weight: 500; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; color: var(--link); }
.warnings { margin: 0.3rem 0 0; padding: 0.4rem 0.6rem 0.4rem 1.6rem; background: var(--warn-paper);
  color: var(--warn-ink); border-radius: 6px; min-width: 15rem; }
.better { color: var(--good); font-weight: 600; }
.worse { color: var(--bad); font-weight: 600; }
.mark { color: var(--warn-ink); background: var(--warn-paper); border-radius: 4px; padding: 0 0.3rem;
  white-space: nowrap; }
code { font-size: 0.9em; }
@media (max-width: 600px) { h1 { font-size: 1.4rem; } figure { padding: 0.5rem 0.25rem; }
  figure > *:not(.plot) { margin-left: 0.25rem; } }
@media print { figure { break-inside: avoid; } .scroll { max-height: none; } thead th { position: static; } }
"""

SCRIPT = """
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(figure) {
    const ink = colour("--ink"), soft = colour("--soft"), rule = colour("--rule"), panel = colour("--panel");
    const layout = structuredClone(figure.layout);
    Object.assign(layout, { paper_bgcolor: panel, plot_bgcolor: panel, autosize: true, hovermode: "closest",
      font: { color: ink, size: 13, family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif" },
      hoverlabel: { namelength: -1, bgcolor: colour("--paper"), bordercolor: rule, font: { color: ink } },
      margin: { l: 68, r: 24, t: 12, b: 14 } });
    // Its columns must not depend on the width that is left for the plot, which depends on its rows: no end to redraws.
    layout.legend = { orientation: "h", xref: "container", yref: "container", x: 0, xanchor: "left", y: 1,
      yanchor: "top" };
    for (const name of ["xaxis", "yaxis"])
      layout[name] = { gridcolor: rule, linecolor: soft, zerolinecolor: rule, ...layout[name] };
    for (const shape of layout.shapes ?? []) shape.line.color = soft;
    const data = structuredClone(figure.traces);
    for (const trace of data) {
      // A legend's entries are not broken by themselves, and a phone is narrow.
      if (trace.name && innerWidth < 600) trace.name = trace.name.replace(/(.{20,34}) /g, "$1<br>");
      if (trace.meta === "ink") trace.marker.color = trace.marker.line.color = ink;
      // Bars' own colour would not be seen on the bar.
      if (trace.type === "bar" && trace.error_y) trace.error_y.color = ink;
    }
    return { data, layout };
  }

  function shown(div) {
    const select = div.parentElement.querySelector("select");
    return select && div.figure.choices[Number(select.value)];
  }

  function draw(div) {
    const { data, layout } = themed(div.figure);
    const visible = shown(div);
    if (visible) data.forEach((trace, index) => { trace.visible = visible[index]; });
    // The legend above takes its rows from the plot's height.
    const entries = data.filter((trace) => trace.visible !== false).length;
    layout.height = 360 + 20 * Math.max(0, Math.ceil(entries / (div.clientWidth < 560 ? 1 : 2)) - 1);
    return Plotly.react(div, data, layout,
      { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
  }

  async function drawAll() {
    for (const div of plots) {
      div.figure ??= JSON.parse(document.getElementById(div.id + "-data").textContent);
      await draw(div);
      // Lets the page answer between plots.
      await new Promise((done) => setTimeout(done));
    }
    document.documentElement.dataset.drawn = String(plots.length);
  }

  for (const select of document.querySelectorAll("figure select"))
    select.addEventListener("change", () => draw(select.closest("figure").querySelector(".plot")));
  dark.addEventListener("change", drawAll);
  drawAll();
})();
"""
