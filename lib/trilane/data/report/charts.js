// Draws each figure of the report in place of its picture. No eval: the page's policy forbids it, so Vega interprets its expressions.
const dark = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 700; // pixels; below, panels stand one below the other and legends below them
const LABELS = 84; // pixels beside a panel, for the axis and its labels: at first
// the colours of plots/style.py, and those that stand out on dark paper
const BRIGHT = { "#14618a": "#4fa8dc", "#2a9d67": "#3fbf85", "#a23b72": "#d875ab", "#7b8a97": "#9fb0be", "#5d4a99": "#9a86dd", "#b3261e": "#ff7a70",
  "#1b2530": "#e3e8ed", "#e3e8ec": "#323c46", "#d3dae0": "#46525d", "#0f4c6d": "#2b76a4", "#5b9bc0": "#8cc4e6" };

function fit(view, width, labels) {
  if (width < NARROW && (view.concat || view.facet)) Object.assign(view, { columns: 1, align: "none" });
  if (width < NARROW) delete view.encoding?.color?.legend?.columns; // wide legends would press the panels together
  if (typeof view.width === "number") view.width = Math.max(120, Math.min(view.width, width - labels));
  for (const part of [...(view.concat || []), ...(view.layer || []), ...(view.spec ? [view.spec] : [])]) fit(part, width, labels);
  return view;
}

function config(width) {
  const light = { labelColor: "#c8d2db", titleColor: "#e3e8ed", gridColor: "#323c46", domainColor: "#66788a", tickColor: "#66788a" };
  const text = { color: "#e3e8ed", subtitleColor: "#a7b4bf" };
  const symbols = { symbolBaseFillColor: "#c8d2db", symbolBaseStrokeColor: "#c8d2db" }; // of legends of shapes
  const looks = dark.matches ? { axis: light, legend: { ...light, ...symbols }, title: text, header: light, text: { color: "#e3e8ed" }, rule: { color: "#c8d2db" } } : {};
  looks.legend = { ...looks.legend, titleLimit: width };
  looks.title = { ...looks.title, limit: width };
  if (width < NARROW) looks.legend = { ...looks.legend, orient: "bottom", columns: 2, labelLimit: 110 };
  return looks;
}

// The explorer of 02 by keys, buttons and touch; its parameters are plan_key (the picked plan), a, b and zoom_start.
function steer(place, view) {
  const set = (name, value) => view.signal(name, value).runAsync();
  const pin = name => () => set(name, view.signal("plan_key"));
  const walk = by => () => {
    const dots = [...place.querySelectorAll(".points_marks path")].map(dot => dot.__data__.datum).filter(dot => dot.kept);
    dots.sort((p, q) => p.gib - q.gib || p.s - q.s); // as they stand in the figure
    const at = dots.findIndex(dot => dot.key === view.signal("plan_key"));
    if (dots.length) set("plan_key", dots[(Math.max(at, 0) + by + dots.length) % dots.length].key);
  };
  const look = (nearer, further) => () => { // a part of the schedule: `nearer` times as long, moved by `further` times its length
    const { whole } = view.data("plans").find(({ key }) => key === view.signal("plan_key"));
    if (!whole) return; // a plan without its schedule
    const [from, to] = view.signal("zoom_start") || [0, whole];
    const middle = (from + to) / 2 + further * (to - from), half = nearer * (to - from) / 2;
    set("zoom_start", nearer ? [middle - half, middle + half] : null);
  };
  const acts = { "Pin A": ["Enter", pin("a")], "Pin B": ["B", pin("b")], "Zoom in": ["+", look(.5, 0)], "Zoom out": ["-", look(2, 0)],
    Earlier: ["<", look(1, -.5)], Later: [">", look(1, .5)], Whole: ["0", look(0, 0)] };
  const keys = { ArrowRight: walk(1), ArrowDown: walk(1), ArrowLeft: walk(-1), ArrowUp: walk(-1), ...Object.fromEntries(Object.values(acts)) };
  for (const [name, [key, act]] of Object.entries(acts)) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name, title: `key ${key}`, onclick: act });
    place.querySelector(".vega-bindings").append(button);
  }
  place.classList.add("steered");
  const drawing = place.querySelector("svg");
  drawing.tabIndex = 0;
  drawing.onkeydown = event => {
    const act = keys[event.key] ?? keys[event.key.toUpperCase()];
    if (act) event.preventDefault(), act();
  };
  drawing.style.touchAction = "pan-y"; // sideways a finger moves the schedule
}

async function draw(figure, labels = LABELS) {
  const place = figure.querySelector(".drawing");
  const width = figure.clientWidth;
  let text = figure.querySelector("script").textContent;
  for (const [colour, bright] of dark.matches ? Object.entries(BRIGHT) : []) text = text.replaceAll(colour, bright);
  const spec = fit(JSON.parse(text), width, labels);
  delete spec.usermeta; // would change the options below
  delete spec.$schema; // version 5, for JupyterLab; 6, which is here, draws the same
  const looks = { ...spec.config };
  for (const [part, values] of Object.entries(config(width))) looks[part] = { ...looks[part], ...values };
  const options = { ast: true, actions: false, renderer: "svg", tooltip: { theme: dark.matches ? "dark" : "light" }, mode: "vega-lite" };
  // what a reader has picked stays where a window changes or a phone turns
  const held = (spec.params || []).filter(({ bind }) => bind).map(({ name, select }) => select ? `${name}_key` : name);
  const kept = figure.view?.getState({ signals: name => held.includes(name) }).signals ?? {};
  figure.classList.add("drawn");
  try {
    const { view } = await vegaEmbed(place, { ...spec, config: looks }, options);
    for (const [name, value] of Object.entries(kept)) view.signal(name, value);
    figure.view = await view.runAsync();
    const beyond = place.querySelector("svg").clientWidth - width;
    if (beyond > 0 && labels === LABELS && width < NARROW) return draw(figure, labels + beyond);
    if (spec.params?.some(({ name }) => name === "plan")) steer(place, view);
  } catch (error) {
    figure.classList.remove("drawn"); // the picture stays
    console.error(error);
  }
}

const figures = [...document.querySelectorAll("figure.chart")];
let drawn = innerWidth;
figures.forEach(figure => draw(figure));
dark.addEventListener("change", () => figures.forEach(figure => draw(figure)));
addEventListener("resize", () => {
  if (Math.abs(innerWidth - drawn) < 40) return; // a scroll bar, or a phone's address bar
  drawn = innerWidth;
  figures.forEach(figure => draw(figure));
});
