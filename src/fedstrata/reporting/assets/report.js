// The script of the report, which sorts tables and draws curves, heat maps and strips. Names come from specs and data,
// and are therefore set as text or as attributes, and never as markup.
"use strict";
(() => {
const blocks = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const repaints = []; // Charts and heat maps are drawn again when the colours change.

const choice = (options, chosen) => make("select", {}, ...options.map(([value, name]) =>
  make("option", {value, selected: value === chosen}, name)));

// The part of the page about a data set: its methods, which of them are shown, and updates when this choice changes.

class Block {
  constructor(section, data) {
    Object.assign(this, {section, data, hidden: new Set(), listeners: [], across: "round", log: false, last: false});
    this.find = selector => section.querySelector(selector);
    if (data.metrics.length) this.curves();
    this.heats();
    this.strips();
  }

  shown(index) { return !this.hidden.has(index); }

  changed() {
    for (const listener of this.listeners) listener();
  }

  curves() {
    const {methods, metrics, axes: across} = this.data;
    const select = this.find(".axis"), log = this.find(".log"), last = this.find(".last");
    select.append(...choice(across.map(axis => [axis.key, axis.name]), "round").children);
    select.value = "round";
    select.addEventListener("change", () => {
      log.checked = this.log = select.value === "bytes"; // The bytes of methods differ by orders of magnitude.
      this.across = select.value;
      this.draw();
    });
    log.addEventListener("change", () => { this.log = log.checked; this.draw(); });
    last.addEventListener("change", () => { this.last = last.checked; this.draw(); });
    this.find(".controls").hidden = this.find(".zoom").hidden = false;
    this.legend();
    const box = this.find(".curves"), costs = this.find(".costs");
    const first = [...new Set([this.data.primary.key, "loss"])].filter(key => metrics.some(metric => metric.key === key));
    const others = metrics.map(metric => metric.key).filter(key => !first.includes(key) && key !== "train_loss");
    const order = [...others, ...metrics.map(metric => metric.key).filter(key => key === "train_loss")];
    this.charts = [...first, ...order.slice(0, 2)].map(key => new Chart(this, box, key));
    if (costs) this.charts.unshift(new Pareto(this, costs));
    this.draw();
    repaints.push(() => this.draw());
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }

  legend() {
    const box = this.find(".legend");
    box.classList.toggle("many", this.data.methods.length > 12);
    this.entries = this.data.methods.map((method, index) => {
      const value = make("output");
      const entry = make("button", {type: "button", class: "entry", "aria-pressed": "true", title: method.name},
        swatch(method), make("b", {}, method.name), value);
      entry.addEventListener("click", () => this.show(index, !this.shown(index)));
      entry.addEventListener("dblclick", () => this.only(new Set([index])));
      for (const [event, focus] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]])
        entry.addEventListener(event, () => this.charts.forEach(chart => chart.focus(focus ? index : null)));
      box.append(entry);
      return {entry, value};
    });
    const tool = (name, indices) => {
      const button = make("button", {type: "button"}, name);
      button.addEventListener("click", () => this.only(new Set(indices)));
      return button;
    };
    this.about = make("span", {class: "note"});
    const tools = [tool("all", this.data.methods.keys()), tool("none", [])];
    box.prepend(make("div", {class: "tools"}, ...(this.data.methods.length > 1 ? tools : []), this.about));
    box.hidden = false;
    this.values();
  }

  show(index, visible) {
    if (visible) this.hidden.delete(index);
    else this.hidden.add(index);
    this.entries[index].entry.setAttribute("aria-pressed", visible);
    this.changed();
  }

  only(indices) {
    this.hidden = new Set([...this.data.methods.keys()].filter(index => !indices.has(index)));
    this.entries.forEach(({entry}, index) => entry.setAttribute("aria-pressed", this.shown(index)));
    this.changed();
  }

  // The values beside the names are the values at the pointer, or the last values without a pointer.
  values(metric = this.data.metrics[0].key, at = null) {
    const quantity = this.data.metrics.find(each => each.key === metric);
    const place = this.across === "round" ? "round " : "";
    this.about.textContent = at == null ? `${quantity.name}, at the end` : `${quantity.name}, at ${place}${text(at)}`;
    this.entries.forEach(({value}, index) => {
      const method = this.data.methods[index], curve = method.y[metric];
      let last = null;
      curve?.[0].forEach((y, i) => { if (y != null && (at == null || method[this.across][i] <= at)) last = y; });
      value.textContent = measured(last, quantity);
    });
  }

  heats() {
    const box = this.find(".heats"), {methods, classes, clients} = this.data;
    const names = methods.map(method => method.name);
    if (classes) {
      new Heat(this, box, "Accuracy by class, %", [], () => ({rows: names, rowName: "", columns: classes.names,
        columnName: "class ", values: classes.rows, ...percent(classes.rows), methods: true}));
      const with_ = names.map((name, i) => [String(i), name]).filter(([i]) => classes.confusion[i]);
      if (with_.length) new Heat(this, box, "Confusion matrix, % of the true class", [with_], chosen => {
        const counts = classes.confusion[chosen];
        const shares = counts.map(row => {
          const sum = row.reduce((a, b) => a + b, 0);
          return row.map(count => sum ? 100 * count / sum : null);
        });
        return {rows: classes.names, rowName: "class ", columns: classes.names, columnName: "predicted as ",
          values: shares, low: 0, high: 100, silent: 0, note: "Rows are true classes, columns are predicted classes."};
      });
    }
    if (clients.length) {
      const options = clients.map((map, i) => [String(i), clientsName(map)]);
      new Heat(this, box, "By client", [options], chosen => {
        const map = clients[chosen], scale = map.percent ? 100 : 1;
        const values = map.rows.map(row => row?.map(value => value == null ? null : value * scale));
        const every = values.flat().filter(value => value != null); // A method without a table has no values.
        const first = `${names.length > 1 ? "mean " : ""}${clients[0].column}${names.length > 1 ? " over the methods" : ""}`;
        return {rows: names, rowName: "", columns: map.clients.map(String), columnName: "client ", values, methods: true,
          ...(map.percent ? percent(values) : {low: 0, high: Math.max(...every, 0)}),
          note: `Clients are sorted by ${first}, from the lowest to the highest.` +
            (map.of > map.clients.length ? ` ${map.clients.length} of ${map.of} clients are shown, evenly spaced.` : "")};
      }, "full");
    }
    function percent(values) { // The scale begins at the multiple of ten below the lowest value.
      const lowest = Math.min(...values.flat().filter(value => value != null), 90);
      return {low: Math.floor(lowest / 10) * 10, high: 100};
    }
    function clientsName(map) {
      const what = map.column === "heard" ? "round of the last used reply" : map.column + (map.percent ? ", %" : "");
      return clients.some(each => each.seed !== map.seed) ? `${what}, ${map.seed}` : what;
    }
  }

  strips() {
    const box = this.find(".fates"), {methods, fates, fate_names: names} = this.data;
    const sum = row => row.reduce((a, b) => a + b, 0);
    this.strip(box, fates, run => {
      const words = counts => counts.map((count, i) => [count, names[i]]).filter(([count]) => count);
      const total = words(run.counts.map(sum)), percents = shares(total.map(([count]) => count));
      const bars = run.counts[0].length, base = new Array(bars).fill(0);
      const sums = base.map((_, bar) => sum(run.counts.map(row => row[bar])));
      const paths = run.counts.map((row, fate) => [`fate${fate}`, row.map((count, bar) => {
        if (!count) return "";
        const height = count / sums[bar], top = base[bar] += height;
        return `M${bar} ${(1 - top).toFixed(3)}h1v${height.toFixed(3)}h-1z`;
      })]);
      return {
        bars, paths, height: 1,
        told: total.map(([, name], i) => `${percents[i] || "<1"} % ${name}`).join(", "),
        tell: bar => words(run.counts.map(row => row[bar])).map(([count, name]) => `${count} ${name}`).join(", "),
      };
    });
    const absences = this.data.absences;
    if (absences) this.strip(this.find(".absences"), absences.runs, run => {
      const levels = [1, 2, 3, 4].map(level => [`level${level}`, run.rows.map((row, place) =>
        [...row].map((digit, bar) => Number(digit) === level ? `M${bar} ${place}h1v1h-1z` : "").join(""))]);
      return {
        bars: run.rows[0].length, paths: levels, height: run.rows.length,
        told: `a class was absent in ${run.some} of ${run.rounds} rounds`,
        tell: bar => {
          const absent = absences.names.filter((_, place) => Number(run.rows[place][bar]));
          return absent.length ? `absent: ${absent.join(", ")}` : "all classes were present";
        },
      };
    });
  }

  // Draw a strip of bars over the rounds for each run. A text describes the bar that the pointer or the arrow keys select.
  strip(box, runs, drawing) {
    const {methods} = this.data, readout = make("output", {class: "readout"});
    const longest = Math.max(...runs.flat().map(run => run?.rounds ?? 0), 1);
    const groups = new Map(); // Dropouts depend only on the seed, so many methods have the same strip.
    runs.forEach((members, index) => members.filter(Boolean).forEach(run => {
      const key = JSON.stringify(run);
      groups.set(key, {run, of: [...(groups.get(key)?.of ?? []), index]});
    }));
    for (const {run, of} of groups.values()) {
      const {bars, paths, height, told, tell} = drawing(run);
      const members = of.map(index => methods[index].name);
      const who = methods.length === 1 ? "" : of.length === methods.length ? "all methods"
        : members.slice(0, 3).join(", ") + (of.length > 3 ? ` and ${of.length - 3} more` : "");
      const whose = [who, methods.length === 1 || runs.some(each => each.length > 1) ? run.run : ""].filter(Boolean).join(", ");
      const wide = Math.max(longest / run.each, 1);
      const picture = make("svg", {viewBox: `0 0 ${wide} ${height}`, preserveAspectRatio: "none", tabindex: 0,
        role: "img", "aria-label": `${whose}: ${told || "nothing recorded"}`, "shape-rendering": "crispEdges"});
      if (height > 1) picture.style.height = `${Math.max(15, 4 * height)}px`;
      for (const [name, parts] of paths) {
        const d = parts.join("");
        if (d) picture.append(make("path", {d, class: name}));
      }
      const show = bar => {
        const first = bar * run.each + 1, last = Math.min(first + run.each - 1, run.rounds);
        readout.textContent = `${whose}, round ${first === last ? first : `${first} to ${last}`}: ${tell(bar)}`;
      };
      picture.addEventListener("mousemove", event => {
        const place = picture.getBoundingClientRect();
        const bar = Math.floor((event.clientX - place.left) / place.width * wide);
        if (bar < bars) show(bar);
      });
      let at = -1;
      picture.addEventListener("keydown", event => {
        const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
        if (!step || !bars) return;
        event.preventDefault();
        show(at = Math.min(Math.max(at + step, 0), bars - 1));
      });
      const line = make("div", {class: "row"}, make("b", {title: members.join(", ")}, whose), picture, make("output", {}, told));
      box.append(line);
      this.listeners.push(() => { line.hidden = !of.some(index => this.shown(index)); });
    }
    box.append(readout);
  }
}

// Return whole percentages that add up to 100.
function shares(counts) {
  const sum = counts.reduce((a, b) => a + b, 0);
  const exact = counts.map(count => 100 * count / sum), whole = exact.map(Math.floor);
  const order = [...counts.keys()].sort((a, b) => exact[b] - whole[b] - exact[a] + whole[a]);
  for (const i of order.slice(0, 100 - whole.reduce((a, b) => a + b, 0))) whole[i]++;
  return whole;
}

function swatch(method) {
  return make("svg", {class: "swatch", width: 24, height: 4, "aria-hidden": "true"}, make("path", {d: "M0 2h24",
    stroke: `var(--${method.colour})`, "stroke-width": 3, "stroke-dasharray": method.dash.join(" ")}));
}

// Format a value of a metric; percentages have one digit after the decimal point.
const measured = (value, metric) => value != null && metric.high === 100 ? value.toFixed(1) : text(value);
const shortened = (name, length) => name.length > length ? name.slice(0, length - 1) + "…" : name;

// Draw text with a halo, so that it can be read on lines.
function haloed(ctx, name, left, top) {
  ctx.strokeStyle = colour("paper");
  ctx.lineWidth = 4 * devicePixelRatio;
  ctx.lineJoin = "round";
  ctx.strokeText(name, left, top);
  ctx.fillText(name, left, top);
}

// Charts of curves. The band over seeds is drawn only for the method in focus.

class Chart {
  constructor(block, box, metric) {
    Object.assign(this, {block, metric});
    const {metrics} = block.data, select = make("select", {class: "quantity"});
    for (const [title, own] of [["evaluation", false], ["recorded by methods", true]]) {
      const group = make("optgroup", {label: title});
      for (const each of metrics.filter(each => each.own === own))
        group.append(make("option", {value: each.key, selected: each.key === metric}, each.name));
      if (group.children.length) select.append(group);
    }
    select.setAttribute("aria-label", "Quantity to draw");
    select.addEventListener("change", () => { this.metric = select.value; this.draw(); });
    this.plot = make("div", {class: "plot", role: "img"});
    this.figure = make("figure", {class: "chart"}, make("div", {class: "chart-head"}, select), this.plot);
    box.append(this.figure);
    watchWidth(this);
    block.listeners.push(() => this.draw()); // The axes span only the curves that are shown.
  }

  points(index) { // Return x, y and the deviation at each point at which the method has values.
    const {across, log, data} = this.block, method = data.methods[index], [mean, sd] = method.y[this.metric] ?? [[]];
    const kept = mean.map((y, i) => i).filter(i => mean[i] != null && (!log || method[across][i] > 0));
    return {x: kept.map(i => method[across][i]), y: kept.map(i => mean[i]), sd: sd && kept.map(i => sd[i])};
  }

  draw() {
    const {block} = this, {methods, axes: names, metrics} = block.data;
    const axis = names.find(each => each.key === block.across), metric = metrics.find(each => each.key === this.metric);
    this.quantity = metric;
    this.of = methods.map((_, index) => this.points(index));
    this.drawn = [...methods.keys()].filter(index => block.shown(index) && this.of[index].x.length);
    this.u?.destroy();
    this.u = null;
    const last = index => this.of[index].y.at(-1);
    const ends = this.drawn.slice(0, 8).map(index => `${methods[index].name} ${measured(last(index), metric)}`).join(", ");
    this.plot.setAttribute("aria-label", `${metric.name} over ${axis.name}, of ${methods.length} methods; at the end: ${ends || "none"}`);
    if (this.drawn.every(index => this.of[index].x.length === 1)) { // A line needs two points.
      const percent = metric.high === 100 ? " %" : "";
      this.plot.replaceChildren(make("div", {class: "only"}, ...this.drawn.map(index => make("p", {},
        `${methods.length > 1 ? `${methods[index].name}, one` : "one"} evaluation: ${measured(last(index), metric)}${percent}`))));
      return;
    }
    this.plot.replaceChildren();
    // Curves that coincide are drawn once, with the names of all their methods.
    const same = new Map();
    for (const index of this.drawn) {
      const key = JSON.stringify([this.of[index].x, this.of[index].y]);
      same.set(key, [...(same.get(key) ?? []), index]);
    }
    this.all = this.drawn.length > 1 && same.size === 1;
    this.names = new Map([...same.values()].map(group => [group[0],
      this.all ? "all methods" : group.map(index => methods[index].name).join(", ")]));
    // Two rounds of a method may have the same cost, but a table needs sorted and distinct positions.
    // Grey lines are drawn first, so that they do not hide coloured lines.
    this.order = [...methods.keys()].sort((a, b) => (methods[b].colour === "other") - (methods[a].colour === "other"));
    const tables = this.order.map(index => {
      const {x, y} = this.of[index];
      if (!block.shown(index)) return [[], []];
      const places = new Map(x.map((place, i) => [place, y[i]]));
      return [[...places.keys()], [...places.values()]];
    });
    const longest = Math.max(...this.of.map(({x}) => x.length)), end = Math.max(...this.of.map(({x}) => x.at(-1) ?? 0));
    const series = this.order.map(index => [index, methods[index]]).map(([index, method]) => ({
      show: block.shown(index) && !(this.all && index !== this.drawn[0]),
      stroke: () => colour(this.all ? "ink" : method.colour === "other" && index === this.focused ? "soft" : method.colour),
      dash: this.all ? [] : method.dash, spanGaps: true,
      width: method.colour === "other" ? 1 : 1.8,
      points: {show: longest <= 25 || this.of[index].x.length === 1, size: 5, fill: colour(this.all ? "ink" : method.colour)},
    }));
    const width = widthOf(this.plot), labels = width > 380 && methods.length > 1;
    this.u = new uPlot({
      width, height: HEIGHT, legend: {show: false}, focus: {alpha: 0.25},
      padding: [null, labels ? Math.max(...[...this.names.values()].map(name => shortened(name, 18).length)) * 6.6 + 12 : null, null, null],
      cursor: {y: false, points: {show: false}, focus: {prox: 16}},
      scales: {
        x: {time: false, distr: block.log ? 3 : 1, range: (_, low, high) =>
          padded(block.last && low < end / 2 ? end / 2 : low, high, block.log)},
        y: {range: u => this.span(u)},
      },
      axes: axes(axis.name + (block.log ? " (logarithmic)" : ""), block.log, block.across === "round" && !block.log),
      series: [{}, ...series],
      hooks: {
        drawAxes: [u => this.bands(u)],
        draw: [u => labels && this.ends(u)],
        setCursor: [u => this.point(u)],
        setSeries: [(_, index) => { this.focused = index == null ? null : this.order[index - 1]; }],
      },
    }, uPlot.join(tables), this.plot);
  }

  point(u) {
    const over = u.cursor.left >= 0;
    if (over || this.pointed) this.block.values(this.metric, over ? u.posToVal(u.cursor.left, "x") : null);
    this.pointed = over;
  }

  // Return the range of the visible curves. The worst tenth of the values, from the beginning of runs, is cut off, but the end of a curve is not.
  span(u) {
    const [first, last] = u.series[0].idxs.map(i => u.data[0][i]); // The scale of x is not set yet.
    const {low: least, high: most, better} = this.quantity, seen = [], ends = [];
    this.of.forEach(({x, y}, index) => {
      if (!this.block.shown(index)) return;
      const inside = y.filter((_, i) => x[i] >= first && x[i] <= last && !(this.block.last && x[i] < last / 2));
      seen.push(...inside);
      ends.push(...inside.slice(-1));
    });
    seen.sort((a, b) => a - b);
    const at = share => seen[Math.round(share * (seen.length - 1))];
    const from = better > 0 ? Math.min(at(0.1), ...ends) : seen[0], to = better < 0 ? Math.max(at(0.9), ...ends) : seen.at(-1);
    const [low, high] = padded(from, to, false);
    return [Math.max(low, least ?? -Infinity), Math.min(high, most ?? Infinity)];
  }

  bands(u) {
    const index = this.drawn.length === 1 ? this.drawn[0] : this.all ? null : this.focused;
    const {x, y, sd} = this.of[index] ?? {};
    if (!sd || !this.block.shown(index)) return;
    const {ctx} = u, {left, top, width, height} = u.bbox;
    const at = (i, side) => [u.valToPos(x[i], "x", true), u.valToPos(y[i] + side * sd[i], "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.globalAlpha = 0.12;
    ctx.beginPath();
    for (let i = 0; i < x.length; i++) ctx.lineTo(...at(i, 1));
    for (let i = x.length - 1; i >= 0; i--) ctx.lineTo(...at(i, -1));
    ctx.fillStyle = colour(this.block.data.methods[index].colour);
    ctx.fill();
    ctx.restore();
  }

  ends(u) { // Write names at the ends of the lines if they do not overlap; the method in focus comes first.
    const {ctx} = u, {methods} = this.block.data, high = 13 * devicePixelRatio, places = [];
    ctx.save();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const index of [this.focused, ...this.names.keys()]) {
      const {x, y} = this.of[index] ?? {};
      if (!x?.length || !this.block.shown(index) || (methods[index].colour === "other" && index !== this.focused && !this.all)) continue;
      const top = u.valToPos(y.at(-1), "y", true), left = u.valToPos(x.at(-1), "x", true) + 7 * devicePixelRatio;
      if (places.some(place => Math.abs(place - top) < high) || top < u.bbox.top || top > u.bbox.top + u.bbox.height) continue;
      places.push(top);
      ctx.fillStyle = colour(this.all ? "ink" : methods[index].colour === "other" ? "soft" : methods[index].colour);
      haloed(ctx, shortened(this.names.get(index) ?? methods[index].name, 18), left, top);
    }
    ctx.restore();
  }

  focus(index) { this.u?.setSeries(index == null ? null : this.order.indexOf(index) + 1, {focus: index != null}); }
}

// A chart of the final primary metric over its cost. Marked methods are on the Pareto front: no method is both cheaper
// and better than a marked method.

class Pareto {
  constructor(block, box) {
    this.block = block;
    const costs = block.data.axes.filter(axis => axis.key !== "round");
    this.cost = costs.some(axis => axis.key === "bytes") ? "bytes" : costs[0].key;
    const select = choice(costs.map(axis => [axis.key, axis.name]), this.cost);
    select.setAttribute("aria-label", "Cost");
    select.addEventListener("change", () => { this.cost = select.value; this.draw(); });
    this.plot = make("div", {class: "plot", role: "img", "aria-label": `${block.data.primary.final}, against cost`});
    this.note = make("figcaption", {class: "front", "aria-live": "polite"});
    this.figure = make("figure", {class: "chart"},
      make("div", {class: "chart-head"}, `${block.data.primary.final}, over `, select), this.plot, this.note);
    box.append(this.figure);
    watchWidth(this);
    block.listeners.push(() => this.draw());
  }

  draw() {
    const {block} = this, {methods} = block.data, sign = block.data.primary.lower ? -1 : 1;
    const points = methods.map((method, index) => ({index, x: method.ends[this.cost], y: method.final[0], sd: method.final[1]}))
      .filter(({index, x, y}) => block.shown(index) && y != null && x > 0).sort((a, b) => a.x - b.x || sign * (b.y - a.y));
    let best = -Infinity;
    const front = points.filter(point => sign * point.y > best && ((best = sign * point.y), true));
    const list = indices => indices.map(index => methods[index].name).join(", ");
    const free = [...methods.keys()].filter(index => block.shown(index) && !methods[index].ends[this.cost]);
    this.note.textContent = (points.length
      ? `Pareto front (no other method shown is both cheaper and better): ${list(front.map(({index}) => index))}.`
      : "No method is shown.") + (free.length ? ` Not drawn, because this cost is zero: ${list(free)}.` : "");
    const data = [points.map(point => point.x), ...points.map((_, i) => points.map((each, j) => i === j ? each.y : null)),
      points.map(point => front.includes(point) ? point.y : null)];
    this.points = points;
    const {low: least, high: most} = block.data.metrics.find(metric => metric.key === block.data.primary.key) ?? {};
    this.plot.setAttribute("aria-label", `${block.data.primary.final}, against cost: ` +
      points.slice(0, 8).map(({index, x, y}) => `${methods[index].name} ${text(y)} for ${text(x)}`).join(", "));
    this.u?.destroy();
    const name = block.data.axes.find(axis => axis.key === this.cost).name;
    this.u = new uPlot({
      width: widthOf(this.plot), height: HEIGHT, legend: {show: false}, cursor: {show: false},
      scales: {
        x: {time: false, distr: 3, range: (_, low, high) => low == null ? [1, 10] : [low / (high / low) ** 0.06 / 1.1, high * (high / low) ** 0.06 * 1.1]},
        y: {range: () => {
          const [low, high] = padded(Math.min(...points.map(p => p.y - (p.sd ?? 0))), Math.max(...points.map(p => p.y + (p.sd ?? 0))));
          return [Math.max(low, least ?? -Infinity), Math.min(high, most ?? Infinity)];
        }},
      },
      axes: axes(`${name} (logarithmic)`, true, false),
      series: [{}, ...points.map(point => ({
        stroke: colour(methods[point.index].colour), width: 2, points: {show: true, size: front.includes(point) ? 11 : 8, width: 2,
          fill: front.includes(point) ? colour(methods[point.index].colour) : colour("paper")},
      })), {stroke: colour("soft"), dash: [3, 3], width: 1, spanGaps: true, points: {show: false}, paths: uPlot.paths.stepped({align: 1})}],
      hooks: {drawAxes: [u => this.errors(u)], draw: [u => this.names(u, front)]},
    }, data, this.plot);
  }

  errors(u) {
    u.ctx.save();
    u.ctx.lineWidth = devicePixelRatio;
    for (const {index, x, y, sd} of this.points) {
      if (!sd) continue;
      u.ctx.strokeStyle = colour(this.block.data.methods[index].colour);
      u.ctx.beginPath();
      const across = u.valToPos(x, "x", true), cap = 4 * devicePixelRatio;
      const [low, high] = [-1, 1].map(side => u.valToPos(y + side * sd, "y", true));
      for (const [from, to] of [[[across, low], [across, high]], ...[low, high].map(end => [[across - cap, end], [across + cap, end]])]) {
        u.ctx.moveTo(...from);
        u.ctx.lineTo(...to);
      }
      u.ctx.stroke();
    }
    u.ctx.restore();
  }

  names(u, front) { // Write all names if there are few; otherwise, write only the names of the Pareto front.
    const {ctx} = u, near = 8 * devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.fillStyle = colour("ink");
    ctx.textAlign = "left";
    const places = [];
    for (const {index, x, y} of [...front, ...(this.points.length <= 10 ? this.points.filter(p => !front.includes(p)) : [])]) {
      const name = shortened(this.block.data.methods[index].name, 22), wide = ctx.measureText(name).width;
      const at = u.valToPos(x, "x", true), middle = u.valToPos(y, "y", true);
      // Try right or left of the point, above or below the middle of the error bar, until no other name is hidden.
      const place = [[near, -near * 0.6], [near, near * 1.6], [-near - wide, -near * 0.6], [-near - wide, near * 1.6]]
        .map(([right, down]) => ({left: at + right, top: middle + down, wide}))
        .find(({left, top}) => left >= u.bbox.left && left + wide < u.bbox.left + u.bbox.width &&
          !places.some(other => Math.abs(other.top - top) < 12 * devicePixelRatio && other.left < left + wide && left < other.left + other.wide));
      if (!place) continue;
      places.push(place);
      haloed(ctx, name, place.left, place.top);
    }
    ctx.restore();
  }

  focus() {}
}

function watchWidth(chart) {
  let width = 0;
  new ResizeObserver(() => {
    const now = widthOf(chart.plot);
    if (now !== width && !printing) chart.u?.setSize({width: now, height: HEIGHT});
    width = now;
  }).observe(chart.plot);
}

// Heat maps, which have one path for each shade.

const opacity = shade => 0.06 + 0.94 * shade;

// Return black or white, whichever has more contrast to the colour of the scale with this opacity.
function onShade(alpha) {
  const parts = name => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
  const ground = parts("panel"), linear = parts("heat").map((part, i) => {
    const mixed = (part * alpha + ground[i] * (1 - alpha)) / 255;
    return mixed <= 0.04045 ? mixed / 12.92 : ((mixed + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return light > 0.179 ? "black" : "white";
}

class Heat {
  constructor(block, box, title, selects, of, width) {
    Object.assign(this, {block, of, columns: width === "full" ? 2 : 1});
    const head = make("div", {class: "chart-head"}, title);
    this.selects = selects.map(options => {
      const select = choice(options, options[0][0]);
      select.setAttribute("aria-label", title);
      select.addEventListener("change", () => this.draw());
      if (options.length > 1) head.append(select);
      return select;
    });
    this.box = make("div", {class: "wide", tabindex: 0, role: "region", "aria-label": title});
    this.readout = make("output", {class: "readout"});
    this.note = make("figcaption");
    box.append(make("figure", {class: `heat ${width ?? ""}`}, head, this.box, this.readout, this.note));
    this.draw();
    if (this.map.methods) block.listeners.push(() => this.draw());
    repaints.push(() => this.draw());
    new ResizeObserver(() => { if (this.box.clientWidth !== this.width) this.draw(); }).observe(this.box);
  }

  draw() {
    const map = this.map = this.of(...this.selects.map(select => select.value));
    this.width = this.box.clientWidth;
    const rows = map.rows.map((_, i) => i).filter(i => map.values[i] && (!map.methods || this.block.shown(i)));
    const left = Math.min(Math.max(...rows.map(i => map.rows[i].length), 3), 16) * 6.6 + 10;
    const widest = Math.min(Math.max(...map.columns.map(name => name.length)), 12);
    const annotated = map.columns.length <= 30;
    const room = printing ? this.columns * COLUMN : Math.max(this.width, 280);
    const fit = (room - left - 2) / map.columns.length;
    const wide = annotated ? Math.min(Math.max(fit, 30), 64) : Math.max(fit, 3);
    const high = rows.length > 30 ? 14 : 22;
    const turned = annotated && widest * 6.6 > wide;
    const top = annotated ? (turned ? widest * 4.7 + 14 : 18) : 4;
    const size = {w: left + wide * map.columns.length + (turned ? widest * 4 : 2), h: top + high * rows.length + 2};
    const svg = make("svg", {width: size.w, height: size.h, viewBox: `0 0 ${size.w} ${size.h}`, role: "img", tabindex: 0, "shape-rendering": "crispEdges",
      "aria-label": `${rows.length} rows and ${map.columns.length} columns, from ${text(map.low)} to ${text(map.high)}`});
    const shades = new Map(), numbers = [];
    const edge = column => Math.round(left + wide * column); // Round to whole pixels, because seams would otherwise show between cells.
    svg.append(make("rect", {class: "frame", x: edge(0), y: Math.round(top), width: edge(map.columns.length) - edge(0), height: high * rows.length}));
    rows.forEach((row, down) => {
      const label = make("text", {x: left - 6, y: top + high * (down + 0.5) + 4, "text-anchor": "end"}, shortened(map.rows[row], 16));
      label.append(make("title", {}, map.rows[row]));
      svg.append(label);
      map.values[row].forEach((value, column) => {
        if (value == null) return;
        const shade = Math.round(24 * Math.min(Math.max((value - map.low) / (map.high - map.low || 1), 0), 1)) / 24;
        const x = edge(column), y = Math.round(top) + high * down;
        shades.set(shade, (shades.get(shade) ?? "") + `M${x} ${y}H${edge(column + 1)}v${high}H${x}z`);
        if (annotated && high > 14 && value !== map.silent) numbers.push(make("text",
          {x: x + wide / 2, y: y + high / 2 + 4, class: "in on", style: `--on: ${onShade(opacity(shade))}`}, value < 10 ? String(Number(value.toFixed(map.high <= 2 ? 2 : 1))) : Math.round(value)));
      });
    });
    for (const [shade, d] of shades) svg.append(make("path", {d, class: "cells", "fill-opacity": opacity(shade).toFixed(2)}));
    svg.append(...numbers);
    if (annotated) map.columns.forEach((name, column) => {
      const x = left + wide * (column + 0.5), y = top - 5;
      const place = turned ? {transform: `translate(${x} ${y}) rotate(-45)`} : {x, y, class: "in"};
      svg.append(make("text", place, shortened(name, 12)));
    });
    const tell = (row, column) => {
      this.readout.textContent = `${map.rowName}${map.rows[row]}, ${map.columnName}${map.columns[column]}: ${text(map.values[row][column])}`;
    };
    svg.addEventListener("mousemove", event => {
      const place = svg.getBoundingClientRect();
      const column = Math.floor((event.clientX - place.left - left) / wide);
      const row = rows[Math.floor((event.clientY - place.top - top) / high)];
      if (row != null && column in map.columns) tell(row, column);
    });
    const here = [0, -1], frame = make("rect", {class: "here", width: wide, height: high, visibility: "hidden"});
    svg.append(frame);
    svg.addEventListener("keydown", event => {
      const step = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0]}[event.key];
      if (!step || !rows.length) return;
      event.preventDefault();
      [rows.length, map.columns.length].forEach((count, i) => { here[i] = Math.min(Math.max(here[i] + step[i], 0), count - 1); });
      for (const [name, value] of [["x", edge(here[1])], ["y", Math.round(top) + high * here[0]], ["visibility", "visible"]])
        frame.setAttribute(name, value);
      tell(rows[here[0]], here[1]);
    });
    this.box.replaceChildren(svg);
    this.note.replaceChildren(text(map.low), make("span", {class: "scale"}), text(map.high), map.note ? ` · ${map.note}` : "");
  }
}

// Sort tables. The first click sorts from the highest value, the second from the lowest, and the third restores the order.

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const words = column === 0, steps = words ? ["ascending", "descending", null] : ["descending", "ascending", null];
    const order = steps[(steps.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
    heads.forEach(each => each.removeAttribute("aria-sort"));
    if (order) head.setAttribute("aria-sort", order);
    const sign = order === "descending" ? -1 : 1;
    const value = row => row.cells[column].dataset.value;
    const compared = (a, b) => {
      if (words) return sign * a.cells[0].textContent.localeCompare(b.cells[0].textContent, "en", {numeric: true});
      if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === ""); // Missing values come last.
      return sign * (Number(value(a)) - Number(value(b)));
    };
    body.append(...(order ? [...original].sort(compared) : original));
  }));
}

// Copy a spec.

for (const button of document.querySelectorAll(".copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const pre = button.nextElementSibling;
    getSelection().selectAllChildren(pre); // If the page may not use the clipboard, users can copy the selection with one key.
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "selected: press Ctrl+C to copy";
    }
  });
}

// Switch between light and dark colours.

const theme = document.getElementById("theme");
function repaint() {
  for (const each of repaints) each();
}
function setTheme(name) {
  if (name === "auto") delete root.dataset.theme;
  else root.dataset.theme = name;
  theme.textContent = `theme: ${name}`;
}
let chosen = "auto";
try {
  chosen = localStorage.getItem("fedstrata-theme") ?? "auto";
} catch { /* Some browsers do not allow a page to store settings. */ }
setTheme(chosen);
theme.hidden = false;
theme.addEventListener("click", () => {
  chosen = {auto: "light", light: "dark", dark: "auto"}[chosen] ?? "auto";
  setTheme(chosen);
  try {
    localStorage.setItem("fedstrata-theme", chosen);
  } catch { /* Some browsers do not allow a page to store settings. */ }
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
followPrint(repaint);

for (const section of document.querySelectorAll("[data-block]")) new Block(section, blocks[section.dataset.block]);
// uPlot paints in a microtask, so all charts are painted before the next task.
setTimeout(() => { root.dataset.drawn = Math.round(performance.now()); });
})();
