// The live page: fetches `stats` once a second and shows how two snapshots differ.
"use strict";

const POLL_MS = 1000, ANSWER_MS = 5000;
const HISTORY_S = 180, GAP_S = 5;
const CHART = { width: 600, height: 60, edge: 2 };
const MOST_BARS = 8, MANY_INSTANCES = 12;
const HIGH_SHARE = 0.9;
const MOST_METRIC_ROWS = 200;
const NONE = "–";

// -- figures: functions of snapshots, without the page --------------------------------------------------------------

/** All counters of a snapshot that only grow while the same processes run. */
function totalsOf(stats) {
  const keys = ["requests", "batches", "failed", "expired", "shed", "batch_sizes", "queue_ms", "batch_wait_ms",
    "compute_ms", "instance_compute_ms", "histograms"];
  const nodes = Object.entries(stats.nodes).map(([name, node]) => [name, keys.map((key) => [key, node[key]])]);
  return {
    methods: runs(stats.requests.by_method),
    latency: stats.requests.histograms.latency,
    models: Object.fromEntries(Object.entries(stats.requests.by_model).map(([name, methods]) =>
      [name, modelTotals(methods)])),
    nodes: Object.fromEntries(nodes.map(([name, pairs]) => [name, Object.fromEntries(pairs)])),
  };
}

/** Events by outcome, and the histogram of latencies, of a model's requests over all methods. */
function modelTotals(methods) {
  const all = Object.values(runs(methods));
  const latency = all.map((one) => one.latency ?? []).reduce((some, more) =>
    Array.from({ length: Math.max(some.length, more.length) }, (_, index) => (some[index] ?? 0) + (more[index] ?? 0)),
  []);
  return { outcomes: byCode(all.map((one) => one.outcomes ?? {})), latency };
}

/** `now - old`, number by number; what is only in `now` began at 0. */
function minus(now, old) {
  if (typeof now === "number") return now - (old ?? 0);
  if (Array.isArray(now)) return now.map((value, index) => minus(value, old?.[index]));
  return Object.fromEntries(Object.entries(now).map(([key, value]) => [key, minus(value, old?.[key])]));
}

/** Whether a counter of `old` is smaller or missing in `now`; rounding does not count. */
function hasFallen(now, old) {
  if (typeof old === "number") return !(now >= old - 1e-6 * Math.abs(old));
  return Object.entries(old).some(([key, value]) => now?.[key] === undefined || hasFallen(now[key], value));
}

/** Name and figures of each worker and engine process. */
function processesOf(stats) {
  return [
    ...stats.workers.map((worker) => [String(worker.index), worker]),
    ...stats.engines.map((engine) => [`engine ${engine.index}`, engine]),
  ];
}

/** Which processes the counters are of. */
function countersOf(stats) {
  return JSON.stringify([stats.pid, processesOf(stats).map(([name, { pid, responding }]) => [name, pid, responding])]);
}

/** Seconds and counter differences from one snapshot to the next; null where they are not of the same processes. */
function change(old, now) {
  if (!old || !(now.time > old.time) || countersOf(old) !== countersOf(now)) return null;
  const [before, after] = [totalsOf(old), totalsOf(now)];
  return hasFallen(after, before) ? null : { seconds: now.time - old.time, ...minus(after, before) };
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function ratio(part, whole) {
  return whole > 0 ? Math.max(part, 0) / whole : null;
}

/** The value below which `share` of a histogram lies, evenly spread in each bucket; Infinity beyond the last bound. */
function percentile(counts, bounds, share) {
  const wanted = share * sum(counts);
  if (!(wanted > 0)) return null;
  let before = 0;
  for (let index = 0; index < bounds.length; index++) {
    if (before + counts[index] >= wanted) {
      const low = index ? bounds[index - 1] : 0;
      return low + (bounds[index] - low) * (wanted - before) / counts[index];
    }
    before += counts[index];
  }
  return Infinity;
}

/** The methods without those that never run the pipe: probes, metadata, this port's pages. */
function runs(methods) {
  const isOther = /^(GET |HEAD |OPTIONS |ping$|POST \/v2\/repository\/|gRPC ([^M]|Model[^IS]|ModelStat))/;
  return Object.fromEntries(Object.entries(methods).filter(([name]) => !isOther.test(name)));
}

/** Events by outcome over all methods: `{ok: 5, overloaded: 1}`. */
function byCode(methods) {
  const codes = {};
  for (const outcomes of Object.values(methods)) {
    for (const [code, count] of Object.entries(outcomes)) codes[code] = (codes[code] ?? 0) + count;
  }
  return codes;
}

/** Figures of the requests: rates null without a difference. */
function requestFigures(stats, diff) {
  const { ok = 0, ...errors } = byCode(runs(stats.requests.by_method));
  const rates = diff && byCode(diff.methods);
  const rate = (code) => rates && ratio(rates[code] ?? 0, diff.seconds);
  return {
    answers: ok,
    qps: rate("ok"),
    methods: Object.entries(diff?.methods ?? {}).map(([name, codes]) => [name, ratio(codes.ok ?? 0, diff.seconds)]),
    errorRate: rates && sum(Object.keys(errors).map(rate)),
    errors: Object.entries(errors).map(([code, total]) => ({ code, total, rate: rate(code) })),
    p50: diff && percentile(diff.latency, stats.bounds_ms, 0.5),
    p99: diff && percentile(diff.latency, stats.bounds_ms, 0.99),
  };
}

/** Figures of each model, those without requests too: rates null without a difference. */
function modelFigures(stats, diff) {
  const names = new Set([...Object.keys(stats.models), ...Object.keys(stats.requests.by_model)]);
  return [...names].filter((name) => name).sort().map((name) => {
    const { ok = 0, ...errors } = modelTotals(stats.requests.by_model[name] ?? {}).outcomes;
    const of = diff && (diff.models[name] ?? { outcomes: {}, latency: [] });
    const rate = (code) => of && ratio(of.outcomes[code] ?? 0, diff.seconds);
    return {
      name, answers: ok, rate: rate("ok"),
      errors: Object.entries(errors).map(([code, total]) => ({ code, total, rate: rate(code) })),
      p50: of && percentile(of.latency, stats.bounds_ms, 0.5),
      p99: of && percentile(of.latency, stats.bounds_ms, 0.99),
    };
  });
}

/** `{name, help, kind, labels, value}` for each label set of the backends' own metrics; of a histogram also `count`. */
function metricFigures(stats) {
  return Object.entries(stats.metrics).sort(([one], [other]) => (one < other ? -1 : 1)).flatMap(([name, family]) =>
    family.samples.map((sample) => {
      const labels = Object.entries(sample.labels).map(([label, value]) => `${label}=${value}`).join(", ");
      const of = { name, help: family.help, kind: family.kind, labels };
      if (family.kind !== "histogram") return { ...of, value: sample.value };
      const count = sum(sample.counts);
      return { ...of, value: count ? sample.sum / count : null, count };
    }));
}

/** Figures of one node; `diff` is its part of a difference, or undefined. */
function nodeFigures(node, bounds, diff, seconds) {
  const shares = node.instance_compute_ms.map((_, index) =>
    diff ? Math.min(ratio(diff.instance_compute_ms[index], 1000 * seconds), 1) : null);
  const time = (key, divisor) => ({
    mean: diff ? ratio(diff[`${key}_ms`], diff[divisor]) : null,
    p99: diff ? percentile(diff.histograms[key], bounds, 0.99) : null,
  });
  return {
    rate: diff ? ratio(diff.requests, seconds) : null,
    queued: node.queued,
    busyNow: node.busy,
    instances: node.instances,
    shares,
    share: diff ? ratio(sum(shares), shares.length) : null,
    queue: time("queue", "requests"),
    batchWait: time("batch_wait", "requests"),
    compute: time("compute", "batches"),
    batches: batchBars(node.batch_sizes, diff?.batch_sizes),
    failed: { total: node.failed, rate: diff ? ratio(diff.failed, seconds) : null },
    expired: { total: node.expired, rate: diff ? ratio(diff.expired, seconds) : null },
    shed: { total: node.shed, rate: diff ? ratio(diff.shed, seconds) : null },
  };
}

/** `[{label, count}]`: a bar for each size seen, or for each doubling if they are many; counts null if unknown. */
function batchBars(totals, diff) {
  const sizes = Object.keys(totals).map(Number).sort((a, b) => a - b);
  const bars = new Map();
  for (const size of sizes) {
    const last = sizes.length > MOST_BARS ? 2 ** Math.ceil(Math.log2(Math.max(size, 1))) : size;
    const first = sizes.length > MOST_BARS ? Math.floor(last / 2) + 1 : size;
    const label = first < last ? `${first}–${last}` : `${last}`;
    bars.set(label, diff ? (bars.get(label) ?? 0) + (diff[size] ?? 0) : null);
  }
  return [...bars].map(([label, count]) => ({ label, count }));
}

/** All that the page shows of a snapshot and the one before it. */
function figures(old, now) {
  const diff = change(old, now);
  const nodes = Object.entries(now.nodes).map(([name, node]) =>
    [name, nodeFigures(node, now.bounds_ms, diff?.nodes[name], diff?.seconds)]);
  return {
    requests: requestFigures(now, diff), models: modelFigures(now, diff), nodes: new Map(nodes),
    metrics: metricFigures(now), limit: now.bounds_ms.at(-1),
  };
}

/** `points` of the last HISTORY_S seconds and a new one. */
function withPoint(points, point) {
  return [...points.filter((one) => one.time < point.time && one.time >= point.time - HISTORY_S), point];
}

/** The path of a line through `[time, value]`, interrupted where a value is null or nothing was heard for GAP_S. */
function linePath(points, from, to, top) {
  const parts = [];
  let before = null;
  for (const [time, value] of points) {
    if (value === null) {
      before = null;
      continue;
    }
    const x = CHART.width * (time - from) / (to - from);
    const y = CHART.height - CHART.edge - (CHART.height - 2 * CHART.edge) * Math.min(value / top, 1);
    const place = `${x.toFixed(1)} ${y.toFixed(1)}`;
    // A point alone is a line to itself, whose round ends show.
    parts.push(before !== null && time - before <= GAP_S ? `L${place}` : `M${place} L${place}`);
    before = time;
  }
  return parts.join(" ");
}

/** The least of 1, 2, 5, 10, 20, … that is not below `value`. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value) ?? 10 * power;
}

// -- figures as text ------------------------------------------------------------------------------------------------

function rateText(value) {
  if (value === null || value === undefined) return NONE;
  if (value > 0 && value < 0.05) return "<0.1";
  if (value < 9.95) return String(Number(value.toFixed(1)));
  if (value < 9999.5) return countText(Math.round(value));
  return value < 999950 ? `${(value / 1e3).toFixed(1)}k` : `${(value / 1e6).toFixed(1)}M`;
}

function countText(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

function numberText(value) {
  if (value === null || Number.isInteger(value)) return countText(value);
  return String(Number(value.toPrecision(6)));
}

/** Milliseconds; beyond the histogram it says only the last bound, `limit`. */
function msText(value, limit) {
  if (value === null || value === undefined) return NONE;
  if (value === Infinity) return `>${msText(limit)}`;
  if (value >= 9999.5) return `${(value / 1000).toFixed(1)} s`;
  if (value > 0 && value < 0.005) return "<0.01";
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

function msUnitText(value, limit) {
  const text = msText(value, limit);
  return text === NONE || text.endsWith("s") ? text : `${text} ms`;
}

function shareText(value) {
  return value === null || value === undefined ? NONE : `${Math.round(100 * value)} %`;
}

function bytesText(value) {
  if (value === null || value === undefined) return NONE;
  return value < 2 ** 30 ? `${(value / 2 ** 20).toFixed(0)} MiB` : `${(value / 2 ** 30).toFixed(1)} GiB`;
}

function durationText(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

function eventsText({ total, rate }) {
  return rate ? `${countText(total)} (${rateText(rate)} /s)` : countText(total);
}

// -- the page -------------------------------------------------------------------------------------------------------

function byId(id) {
  return document.getElementById(id);
}

function html(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Text or an element into a place; untouched if it is there already, so that a selection lasts. */
function put(place, content) {
  if (typeof content === "string") {
    if (place.textContent !== content) place.textContent = content;
  } else if (place.innerHTML !== content.outerHTML) {
    place.replaceChildren(content);
  }
}

/** `rows` are lists of texts and elements, one for each of `heads`; roles are said as narrow pages stack the cells. */
function fillTable(table, heads, rows) {
  if (!table.tHead) {
    const cells = heads.map((head) => html("th", { scope: "col", role: "columnheader" }, head));
    table.append(html("thead", { role: "rowgroup" }, html("tr", { role: "row" }, ...cells)));
    table.append(html("tbody", { role: "rowgroup" }));
  }
  const body = table.tBodies[0];
  rows.forEach((contents, index) => {
    const row = body.rows[index] ?? body.appendChild(emptyRow(heads));
    contents.forEach((content, column) => put(row.cells[column], content));
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}

function emptyRow(heads) {
  const cells = heads.map((head, index) => index
    ? html("td", { role: "cell", "data-head": head })
    : html("th", { role: "rowheader", scope: "row", "data-head": head }));
  return html("tr", { role: "row" }, ...cells);
}

function meter(share, label) {
  const high = share >= HIGH_SHARE ? " high" : "";
  const attributes = { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img" };
  return svg("svg", { ...attributes, "aria-label": label },
    svg("rect", { class: "track", width: 100, height: 8 }),
    svg("rect", { class: `fill${high}`, width: (100 * (share ?? 0)).toFixed(1), height: 8 }));
}

function busyCell(node) {
  const label = `busy by instance: ${node.shares.map(shareText).join(", ")}`;
  const bars = node.shares.map((share) => column(share, share >= HIGH_SHARE ? "fill high" : "fill"));
  const kind = bars.length > MANY_INSTANCES ? "columns many" : "columns";
  return html("div", { class: "busy" },
    html("span", { class: "figure" }, shareText(node.share)),
    html("span", { class: kind, role: "img", "aria-label": label, title: label }, ...bars),
    html("small", {}, `${node.busyNow} of ${node.instances} now`));
}

/** A bar that stands: `share` of its height is filled. */
function column(share, kind) {
  const height = 24 * (share ?? 0);
  return svg("svg", { class: "column", viewBox: "0 0 10 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", width: 10, height: 24 }),
    svg("rect", { class: kind, y: (24 - height).toFixed(1), width: 10, height: height.toFixed(1) }));
}

function batchesCell(node) {
  if (!node.batches.length) return html("span", {}, NONE);
  const most = Math.max(...node.batches.map((bar) => bar.count ?? 0), 1);
  const label = `batches by size: ${node.batches.map((bar) => `${bar.label}: ${countText(bar.count)}`).join(", ")}`;
  const bars = node.batches.map((bar) => html("span", { class: "size" },
    html("span", { class: "count" }, rateText(bar.count)),
    column((bar.count ?? 0) / most, "fill"),
    html("span", { class: "label" }, bar.label)));
  return html("div", { class: "sizes", role: "img", "aria-label": label, title: label }, ...bars);
}

function timeCell(time, limit) {
  return html("div", { class: "time" },
    html("span", { class: "figure" }, msText(time.mean)), html("small", {}, `p99 ${msText(time.p99, limit)}`));
}

const NODE_HEADS = ["node", "rate /s", "queued", "busy", "queue ms", "batch wait ms", "compute ms", "failed", "expired",
  "shed", "batches by size"];

function nodeRows({ nodes, limit }) {
  return [...nodes].map(([name, node]) => [
    name, rateText(node.rate), countText(node.queued), busyCell(node), timeCell(node.queue, limit),
    timeCell(node.batchWait, limit), timeCell(node.compute, limit), eventsText(node.failed),
    eventsText(node.expired), eventsText(node.shed), batchesCell(node),
  ]);
}

const MODEL_HEADS = ["model", "answers /s", "p50 ms", "p99 ms", "answers", "errors"];

function modelRows({ models, limit }) {
  return models.map((model) => [
    model.name, rateText(model.rate), msText(model.p50, limit), msText(model.p99, limit), countText(model.answers),
    model.errors.map(({ code, total, rate }) => `${code} ${eventsText({ total, rate })}`).join(", ") || "0",
  ]);
}

const METRIC_HEADS = ["metric", "what it is", "labels", "kind", "value"];

function metricRows({ metrics }) {
  return metrics.slice(0, MOST_METRIC_ROWS).map(({ name, help, kind, labels, value, count }) => [
    name, help, labels || NONE, kind,
    kind === "histogram" ? `mean ${numberText(value)} of ${countText(count)}` : numberText(value),
  ]);
}

function metricNote({ metrics }) {
  const rest = metrics.length - MOST_METRIC_ROWS;
  return `Sums over all instances${rest > 0 ? `; ${countText(rest)} more are in /metrics` : ""}.`;
}

const WORKER_HEADS = ["worker", "pid", "state", "responding", "connections", "in flight", "restarts", "uptime",
  "memory"];

function workerRows(stats) {
  return processesOf(stats).map(([name, worker]) => [
    name, String(worker.pid ?? NONE), stateMark(worker.state), worker.responding ? "yes" : "no",
    countText(worker.connections), countText(worker.inflight), countText(worker.restarts),
    durationText(worker.uptime_s), bytesText(worker.rss_bytes),
  ]);
}

const GPU_HEADS = ["GPU", "name", "memory", "used"];

function gpuRows(stats) {
  return stats.gpus.map((gpu) => {
    const share = ratio(gpu.used_bytes, gpu.total_bytes);
    const used = html("div", { class: "used" }, meter(share, `${shareText(share)} used`), shareText(share));
    return [String(gpu.index), gpu.name, `${bytesText(gpu.used_bytes)} of ${bytesText(gpu.total_bytes)}`, used];
  });
}

const OUTCOMES = ["ok", "error", "dropped", "stale", "skipped"];
const STREAM_HEADS = ["stream", "state", "frames /s", "age ms", ...OUTCOMES, "reconnects", "worker", "last problem"];

function streamRows(streams) {
  return Object.entries(streams).map(([name, stream]) => [
    html("a", { href: `streams/${encodeURIComponent(name)}/snapshot.jpg` }, name), stateMark(stream.state),
    rateText(stream.fps), msText(stream.age_ms), ...OUTCOMES.map((outcome) => countText(stream.frames[outcome])),
    countText(stream.reconnects), String(stream.worker ?? NONE), stream.last_error || NONE,
  ]);
}

function stateMark(state) {
  return html("span", { class: "state", "data-state": state }, state);
}

function showHeader(stats) {
  document.title = `${stats.config} · ${stats.state}`;
  put(byId("config"), stats.config);
  put(byId("state"), stats.state);
  byId("state").dataset.state = stats.state;
  const ready = stats.ready ? "" : ", not ready for requests";
  byId("try").hidden = !stats.page_port;
  byId("try").href = `http://${location.hostname}:${stats.page_port}/`;
  put(byId("about"), `up ${durationText(stats.uptime_s)}${ready} · version ${stats.version} · pid ${stats.pid}`);
}

/** Name, figure, what stands below it, and whether that is a reason to look. */
function totals(stats, { requests, limit }) {
  const errors = requests.errors.map((one) => `${one.code} ${rateText(one.rate)} /s (${countText(one.total)})`);
  const methods = requests.methods.length > 1 ? requests.methods : [];
  const { open, max, accepted, refused } = stats.connections;
  return [
    ["QPS", rateText(requests.qps), methods.map(([name, rate]) => `${name} ${rateText(rate)}`).join("\n")
      || `${countText(requests.answers)} answers`, false],
    ["errors /s", rateText(requests.errorRate), errors.join("\n") || "none so far", requests.errorRate > 0],
    ["in flight", countText(stats.requests.inflight), "requests", false],
    ["latency p50", msUnitText(requests.p50, limit), "last interval", false],
    ["latency p99", msUnitText(requests.p99, limit), "last interval", false],
    ["connections", countText(open),
      `of ${countText(max)}\n${countText(accepted)} accepted, ${countText(refused)} refused`, open >= max],
    ["restarts", countText(stats.restarts), "of workers", stats.restarts > 0],
  ];
}

function showTotals(rows) {
  const list = byId("totals");
  rows.forEach(([name, figure, note, look], index) => {
    const tile = list.children[index] ?? list.appendChild(
      html("div", {}, html("dt", {}, name), html("dd", { class: "figure" }), html("dd", { class: "note" })));
    put(tile.children[1], figure);
    put(tile.children[2], note);
    tile.classList.toggle("look", look);
  });
}

/** `points` as `[time, value]`; `text` writes a value. */
function showChart(id, points, now, text) {
  const values = points.map(([, value]) => value).filter((value) => value !== null);
  const top = roundUp(Math.max(...values, 0));
  const path = linePath(points, now - HISTORY_S, now, top);
  put(byId(`${id}-scale`), values.length ? `0 to ${text(top)}` : "nothing yet");
  byId(`${id}-chart`).setAttribute("aria-label",
    values.length ? `last ${text(values.at(-1))}, highest ${text(Math.max(...values))}` : "nothing yet");
  byId(`${id}-chart`).replaceChildren(svg("path", { d: path }));
}

function showGraphFigures({ nodes }) {
  for (const box of byId("graph").querySelectorAll("g[data-node]")) {
    const room = box.querySelector("rect.live"), node = nodes.get(box.dataset.node);
    const group = box.querySelector("g.figures") ?? svg("g", { class: "figures" });
    if (room && node) fillRoom(box.appendChild(group), room, node);
  }
}

/** Rate and queue in one line, the busy share as a bar below. */
function fillRoom(group, room, node) {
  const [x, y, width] = ["x", "y", "width"].map((name) => Number(room.getAttribute(name)));
  const right = x + width, barWidth = width - 44;
  const high = node.share >= HIGH_SHARE ? " high" : "";
  group.replaceChildren(
    svg("path", { class: "rule", d: `M${x} ${y + 5} H${right}` }),
    svg("text", { class: "rate", x, y: y + 21 }, `${rateText(node.rate)} /s`),
    svg("text", { class: "queue", x: right, y: y + 21, "text-anchor": "end" }, `queue ${rateText(node.queued)}`),
    svg("rect", { class: "track", x, y: y + 30, width: barWidth, height: 6, rx: 2 }),
    svg("rect", { class: `fill${high}`, x, y: y + 30, width: barWidth * (node.share ?? 0), height: 6, rx: 2 }),
    svg("text", { class: "share", x: right, y: y + 37, "text-anchor": "end" }, shareText(node.share)));
}

async function fetchText(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
  if (!answer.ok) throw new Error(`${address}: status ${answer.status}`);
  return answer.text();
}

async function loadGraph() {
  const drawing = new DOMParser().parseFromString(await fetchText("graph.svg"), "image/svg+xml").documentElement;
  if (drawing.localName !== "svg") throw new Error("graph.svg is no picture");
  byId("graph").replaceChildren(document.importNode(drawing, true));
}

/** Polls for ever; what a poll must know of those before it is here. */
function start() {
  let last = null, shown = null, graphId = null, points = [], heard = new Date();

  function show(stats) {
    // The same snapshot again says nothing new.
    if (shown === null || stats.time !== last.time || stats.pid !== last.pid) {
      shown = figures(last, stats);
      const { qps, p99 } = shown.requests;
      points = withPoint(points, { time: stats.time, qps, p99: p99 === Infinity ? shown.limit : p99 });
      last = stats;
    }
    showHeader(stats);
    showTotals(totals(stats, shown));
    showChart("qps", points.map((point) => [point.time, point.qps]), stats.time, (value) => `${rateText(value)} /s`);
    showChart("p99", points.map((point) => [point.time, point.p99]), stats.time, msUnitText);
    showGraphFigures(shown);
    byId("model-section").hidden = !shown.models.length;
    fillTable(byId("models"), MODEL_HEADS, modelRows(shown));
    byId("metric-section").hidden = !shown.metrics.length;
    put(byId("metric-note"), metricNote(shown));
    fillTable(byId("metrics"), METRIC_HEADS, metricRows(shown));
    fillTable(byId("nodes"), NODE_HEADS, nodeRows(shown));
    fillTable(byId("workers"), WORKER_HEADS, workerRows(stats));
    byId("stream-section").hidden = !Object.keys(stats.streams).length;
    fillTable(byId("streams"), STREAM_HEADS, streamRows(stats.streams));
    byId("gpu-section").hidden = !stats.gpus.length;
    fillTable(byId("gpus"), GPU_HEADS, gpuRows(stats));
  }

  function showSilence(error) {
    const reason = error.name === "TimeoutError" ? `nothing within ${ANSWER_MS / 1000} s` : error.message;
    // NOTE: the same text each time; a screen reader says what changes.
    put(byId("banner"), `no answer since ${heard.toLocaleTimeString("en-GB")}: ${reason}`);
    byId("banner").hidden = false;
    document.body.classList.add("stale");
  }

  async function poll() {
    let stats;
    try {
      stats = JSON.parse(await fetchText("stats"));
    } catch (error) {
      showSilence(error);
      return;
    }
    heard = new Date();
    byId("banner").hidden = true;
    document.body.classList.remove("stale");
    if (stats.graph_id !== graphId) {
      // Without a picture the figures still come; the next poll tries again.
      await loadGraph().then(() => { graphId = stats.graph_id; }, (error) => console.warn(error));
    }
    show(stats);
  }

  function pollAgain() {
    poll().finally(() => setTimeout(pollAgain, POLL_MS));
  }

  pollAgain();
}

if (document.getElementById("banner")) start();
