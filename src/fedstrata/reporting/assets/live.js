// The page of a running experiment, which requests the run's status every two seconds and shows the changes.
"use strict";
(() => {
const EVERY = 2000, STALE = 10;
const NAMES = {loss: "loss", train_loss: "training loss", returned: "clients that replied"};
const find = id => document.getElementById(id);
const charts = new Map();
let last = null, missed = 0;

const duration = seconds => {
  if (seconds == null) return null;
  const all = Math.round(seconds), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${all % 60} s` : `${all} s`;
};
const amount = count => {
  if (count == null) return null;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6]]) if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  return `${(count / 1e3).toFixed(1)} kB`;
};

const isShare = name => name.endsWith("accuracy"); // Accuracies are shown in percent.
const value = (name, number) => number == null ? null : isShare(name) ? `${(100 * number).toFixed(1)} %` : text(number);

function result(status) {
  const {primary, best, best_round: round} = status, ended = Boolean(status.over);
  return [[primary, value(primary, status.value)],
    [ended ? "best" : "best so far", best == null ? null : `${value(primary, best)} in round ${round}`],
    ["targets reached", Object.entries(status.reached).map(([target, round]) => `${target} in round ${round}`).join(", ") || "none"],
    ...["accuracy", "loss", "train_loss"].filter(name => name !== primary).map(name => [NAMES[name] ?? name, value(name, status[name])])];
}

function show(status) {
  last = status;
  const away = status?.away, waiting = status?.waiting;
  const nothing = status == null || away != null || waiting != null;
  const site = !nothing && status.sites == null; // A site does not know the status of other sites.
  const age = status?.at == null ? 0 : status.now - status.at;
  find("title").textContent = status == null ? "No run is active" : away != null ? "The server cannot be reached"
    : waiting != null ? "A run is waiting"
    : site ? "Status of this site"
    : status.title || "Run";
  const rounds = nothing || site ? "" : `round ${status.round} of ${status.rounds}`;
  document.title = `${[find("title").textContent, rounds].filter(Boolean).join(", ")} – fedstrata`;
  find("setup").textContent = nothing || site ? "" : [status.run, status.setting].filter(Boolean).join(" · ");
  find("round").textContent = rounds;
  find("facts-head").textContent = status?.over ? "Result" : "Progress";
  find("state").textContent = nothing ? away ?? waiting ?? "" : status.over ? `ended: ${status.over}`
    : age > STALE ? `last contact ${duration(age)} ago`
    : site ? (status.working ? "working" : "waiting for the next request") : "running";
  find("report").hidden = !status?.report;
  find("done").hidden = nothing || site;
  find("facts-head").hidden = nothing && !charts.size; // Existing curves stay visible.
  find("done").value = status?.rounds ? status.round / status.rounds : 0;
  sites(Object.entries(status?.sites ?? {}));
  const facts = nothing ? [] : site
    ? [["requests", text(status.questions)], ["bytes in", amount(status.bytes_in)],
      ["bytes out", amount(status.bytes_out)], ["refused", status.refused || null]]
    : [...(status.primary ? result(status) : []),
      ["clients in the last round", ["returned", "dropped", "late", "failed"].filter(key => status[key])
        .map(key => `${status[key]} ${key}`).join(", ") || null],
      ["sent up", amount(status.bytes_up)], ["sent down", amount(status.bytes_down)],
      ["duration", duration(status.seconds)], ["time left", duration(status.seconds_left)]];
  find("facts").replaceChildren(...facts.filter(([, value]) => value != null)
    .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  for (const [name, [rounds, values]] of Object.entries(status?.curves ?? {})) draw(name, rounds, values);
}

function sites(rows) {
  find("sites-head").hidden = !rows.length;
  find("sites").replaceChildren(...rows.map(([name, [state, why]]) => make("tr", {},
    make("th", {scope: "row"}, name),
    make("td", {}, make("i", {class: `dot ${state === "in" ? "fate0" : state === "late" ? "fate1" : "fate3"}`}), state),
    make("td", {class: "long"}, why))));
}

function draw(name, rounds, values) {
  const title = (NAMES[name] ?? name) + (isShare(name) ? ", %" : "");
  if (!charts.has(name)) {
    const plot = make("div", {class: "plot", role: "img"});
    find("charts").append(make("figure", {class: "chart"}, make("div", {class: "chart-head"}, title), plot));
    charts.set(name, {plot, whole: name === "returned", share: isShare(name)});
  }
  const chart = charts.get(name);
  chart.plot.setAttribute("aria-label", `${title} over rounds, ${text(values.at(-1) * (chart.share ? 100 : 1))} in round ${rounds.at(-1)}`);
  chart.data = [rounds, chart.share ? values.map(share => 100 * share) : values];
  if (chart.u) chart.u.setData(chart.data);
  else paint(chart);
}

function paint(chart) {
  chart.u?.destroy();
  const [across, up] = axes("round", false, true);
  if (chart.whole) up.incrs = across.incrs;
  chart.u = new uPlot({
    width: widthOf(chart.plot), height: HEIGHT, legend: {show: false}, cursor: {show: false},
    scales: {x: {time: false, range: (_, low, high) => padded(low, high, false)},
      y: {range: (_, low, high) => {
        const [from, to] = padded(chart.whole ? 0 : low, high, false);
        return chart.share ? [Math.max(from, 0), Math.min(to, 100)] : [from, to];
      }}},
    axes: [across, up],
    series: [{}, {stroke: colour("heat"), width: 2, points: {show: chart.data[0].length <= 25, size: 5}}],
  }, chart.data, chart.plot);
}

async function look() {
  try {
    const answer = await fetch("status.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    show(await answer.json());
    missed = 0;
  } catch {
    missed++; // The command that serves this page may have ended.
    if (missed > 1) find("state").textContent = "the command that serves this page does not respond";
  }
  document.documentElement.dataset.drawn = "yes";
  setTimeout(look, EVERY);
}

function repaint() {
  for (const chart of charts.values()) paint(chart);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("resize", repaint);
followPrint(repaint);
look();
})();
