// Functions that all pages share, for elements, colours, numbers and axes. Names are set as text and never as markup.
"use strict";
const HEIGHT = 270; // The height of a chart in pixels.

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "text", "rect", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Charts are drawn again for printing, because paper is white and narrower than most windows.
let printing = false;
const COLUMN = 450; // With this width in pixels, two columns fit on A4 and Letter paper in landscape.
const widthOf = plot => printing ? COLUMN : Math.max(plot.clientWidth, 200);

function followPrint(repaint) {
  const {dataset} = document.documentElement;
  let theme;
  const print = on => {
    printing = on;
    if (on) [theme, dataset.theme] = [dataset.theme, "light"];
    else if (theme) dataset.theme = theme;
    else delete dataset.theme;
    repaint();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
}

// Convert a colour of the style sheet to a form that a canvas accepts.
const probe = document.body.appendChild(make("i", {hidden: true}));
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function text(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toLocaleString("en", {maximumFractionDigits: 1}) + " M";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size && size < 0.001) return value.toExponential(0);
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3))).replace("-", "−");
}

// Functions for the axes of charts.

function logTicks(low, high) {
  const ticks = [], digits = high < 4 * low ? [1, 1.5, 2, 3, 4, 5, 6, 8] : [1, 2, 3, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const digit of digits) ticks.push(digit * 10 ** power);
  const inside = ticks.filter(tick => tick >= low * 0.999 && tick <= high * 1.001);
  if (inside.length <= 9) return inside;
  const leading = tick => Math.round(tick / 10 ** Math.floor(Math.log10(tick) + 1e-9));
  const fewer = inside.filter(tick => [1, 3].includes(leading(tick)));
  return fewer.length <= 9 ? fewer : inside.filter(tick => leading(tick) === 1);
}

function axes(name, log, whole) {
  const look = {stroke: colour("ink"), font: "12px system-ui, sans-serif", grid: {stroke: colour("line"), width: 1}};
  look.ticks = {stroke: colour("line"), width: 1, size: 5};
  const across = {...look, label: name, labelFont: look.font, labelSize: 20, size: 34, space: 55,
    values: (_, ticks) => ticks.map(text)};
  if (log) across.splits = (_u, _a, low, high) => logTicks(low, high);
  if (log) across.filter = (_, ticks) => ticks;
  if (whole) across.incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
  return [across, {...look, size: 52, values: (_, ticks) => ticks.map(text)}];
}

function padded(low, high, log) {
  if (low == null || !Number.isFinite(low)) return log ? [1, 10] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.03, high * (high / low) ** 0.03];
  const space = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  return [low - space, high + space];
}
