const dark = matchMedia("(prefers-color-scheme: dark)"), themes = THEMES;
const template = () => ({layout: themes[dark.matches ? 1 : 0]});
const config = {displaylogo: false, responsive: true,
  displayModeBar: matchMedia("(hover: hover)").matches && "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
const figures = [];
const draw = (name, f) => figures.push([name, f]);
addEventListener("DOMContentLoaded", () => figures.forEach(([name, f]) =>
  Plotly.newPlot(name, f.data, {...f.layout, template: template()}, config)));
dark.addEventListener("change", () => document.querySelectorAll(".js-plotly-plot")
  .forEach(each => Plotly.relayout(each, {template: template()})));
