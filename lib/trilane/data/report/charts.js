// Draws each figure of the report in place of its picture. No eval: the page's policy forbids it, so Vega interprets its expressions.
const dark = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 700; // pixels; below, panels stand one below the other and legends below them
const LABELS = 84; // pixels beside a panel, for the axis and its labels
// the colours of plots/style.py, and those that stand out on dark paper
const BRIGHT = { "#14618a": "#4fa8dc", "#2a9d67": "#3fbf85", "#a23b72": "#d875ab", "#7b8a97": "#9fb0be", "#5d4a99": "#9a86dd", "#b3261e": "#ff7a70",
  "#1b2530": "#e3e8ed", "#e3e8ec": "#323c46" };

function fit(view, width) {
  if (width < NARROW && (view.concat || view.facet)) view.columns = 1;
  if (typeof view.width === "number") view.width = Math.max(120, Math.min(view.width, width - LABELS));
  for (const part of [...(view.concat || []), ...(view.layer || []), ...(view.spec ? [view.spec] : [])]) fit(part, width);
  return view;
}

function config(width) {
  const light = { labelColor: "#c8d2db", titleColor: "#e3e8ed", gridColor: "#323c46", domainColor: "#66788a", tickColor: "#66788a" };
  const text = { color: "#e3e8ed", subtitleColor: "#a7b4bf" };
  const symbols = { symbolBaseFillColor: "#c8d2db", symbolBaseStrokeColor: "#c8d2db" }; // of legends of shapes
  const looks = dark.matches ? { axis: light, legend: { ...light, ...symbols }, title: text, header: light, text: { color: "#e3e8ed" }, rule: { color: "#c8d2db" } } : {};
  looks.legend = { ...looks.legend, titleLimit: width };
  if (width < NARROW) looks.legend = { ...looks.legend, orient: "bottom", columns: 2, labelLimit: 140 };
  return looks;
}

async function draw(figure) {
  const place = figure.querySelector(".drawing");
  const width = figure.clientWidth;
  let text = figure.querySelector("script").textContent;
  for (const [colour, bright] of dark.matches ? Object.entries(BRIGHT) : []) text = text.replaceAll(colour, bright);
  const spec = fit(JSON.parse(text), width);
  delete spec.usermeta; // would change the options below
  delete spec.$schema; // version 5, for JupyterLab; 6, which is here, draws the same
  const looks = { ...spec.config };
  for (const [part, values] of Object.entries(config(width))) looks[part] = { ...looks[part], ...values };
  const options = { ast: true, actions: false, renderer: "svg", tooltip: { theme: dark.matches ? "dark" : "light" }, mode: "vega-lite" };
  figure.classList.add("drawn");
  try {
    await vegaEmbed(place, { ...spec, config: looks }, options);
  } catch (error) {
    figure.classList.remove("drawn"); // the picture stays
    console.error(error);
  }
}

const figures = [...document.querySelectorAll("figure.chart")];
let drawn = innerWidth;
figures.forEach(draw);
dark.addEventListener("change", () => figures.forEach(draw));
addEventListener("resize", () => {
  if (Math.abs(innerWidth - drawn) < 40) return; // a scroll bar, or a phone's address bar
  drawn = innerWidth;
  figures.forEach(draw);
});
