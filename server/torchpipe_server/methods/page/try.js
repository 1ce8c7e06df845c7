"use strict";

const byId = (id) => document.getElementById(id);
const models = JSON.parse(document.body.dataset.models);
const samples = JSON.parse(document.body.dataset.samples);
let image = null; // the File that was chosen last
let told = null; // what the service said of it
let asked = 0; // questions so far: an answer to an earlier one comes too late
let isJsonChosen = false; // whether the reader opened or closed the JSON

/** An element with properties and children; texts are never read as HTML. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

const ms = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(1)} ms`;
const model = () => models[byId("model").selectedIndex];

/** The parameters that have a value, as numbers where they are such. */
function parameters() {
  const given = [...byId("parameters").querySelectorAll("input")].filter((input) => input.value.trim());
  return Object.fromEntries(given.map(({ name, value }) => [name, /^-?[\d.]+$/.test(value.trim()) ? Number(value) : value.trim()]));
}

function query() {
  const all = { ...(model().node_name ? { node_name: model().node_name } : {}), ...parameters() };
  const parts = Object.entries(all).map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`);
  return parts.length ? `?${parts.join("&")}` : "";
}

// -- asking ---------------------------------------------------------------------------------------------------------

function choose(file) {
  if (!file) return;
  image = file;
  URL.revokeObjectURL(byId("picture").src);
  byId("picture").src = URL.createObjectURL(file);
  byId("stage").hidden = false;
  byId("again").disabled = false;
  draw([], ["", 1, 1]); // the boxes are of another image
  ask();
}

async function ask() {
  const number = ++asked;
  say("asking …");
  byId("outcome").classList.add("stale");
  try {
    const answer = await fetch(`/try${query()}`, { method: "POST", body: image, headers: { "Content-Type": "application/octet-stream" } });
    const body = await answer.json();
    if (number !== asked) return;
    told = answer.ok ? body : { status: answer.status, answer: body, nodes: [], ms: 0 };
    inPlace(show);
  } catch (error) {
    if (number === asked) say(`no answer: ${error.message}`, true);
  }
}

/** Changes the page; the first heading in view stays where it is. */
function inPlace(change) {
  const seen = [...document.querySelectorAll("main h2")].find((heading) => heading.getBoundingClientRect().bottom > 0);
  const before = seen?.getBoundingClientRect().top;
  const room = byId("outcome").parentElement;
  room.style.minHeight = `${room.offsetHeight}px`; // a shorter answer leaves the room: nothing below it moves
  change();
  if (seen) scrollBy(0, seen.getBoundingClientRect().top - before);
}

function say(text, isBad = false) {
  byId("state").textContent = text;
  byId("state").classList.toggle("bad", isBad);
}

// -- the answer -----------------------------------------------------------------------------------------------------

function show() {
  const { answer, status, nodes } = told;
  const isGood = status === 200;
  say(isGood ? `answered in ${ms(told.ms)}` : `${answer.code}: ${answer.error}`, !isGood);
  byId("outcome").hidden = false;
  byId("outcome").classList.remove("stale");
  byId("empty").hidden = true;
  byId("json").textContent = JSON.stringify(answer, null, 1).slice(0, 100000);
  const boxes = isGood ? boxesOf(answer) : [];
  const labels = isGood ? labelsOf(answer) : [];
  const rows = [...labels, ...boxes.filter((box) => box.label)].slice(0, 100);
  byId("labels").replaceChildren(...rows.flatMap(labelRow), ...(isGood ? Object.entries(answer).flatMap(arrayRow) : []));
  const meanings = [rows.some(({ score }) => Number.isFinite(score)) ? "score: how sure the model is, from 0 to 1" : "",
    boxes.length ? "box: left, top, right and bottom, in pixels" : ""].filter(Boolean);
  byId("meaning").hidden = !meanings.length;
  byId("meaning").textContent = meanings.join("; ");
  if (!isJsonChosen) byId("json-box").open = !byId("labels").childElementCount;
  const images = nodes.filter((node) => node.image);
  const spaces = [["the image as it was sent", 0, 0], ...images.map(({ node, image: { width, height } }) =>
    [`${node}: ${width} × ${height}`, width, height])];
  const chosen = Math.max(0, spaces.findIndex(([text]) => text === byId("space").value)); // as for the answer before
  byId("space").replaceChildren(...spaces.map(([text]) => make("option", { textContent: text })));
  byId("space").selectedIndex = chosen;
  byId("space").onchange = () => draw(boxes, spaces[byId("space").selectedIndex]);
  byId("space-line").hidden = !boxes.length;
  draw(boxes, spaces[chosen]);
  byId("total").textContent = `total ${ms(told.ms)}: from the request's arrival to its answer, without the network`;
  byId("nodes").replaceChildren(...nodes.map(nodeRow));
  byId("images").replaceChildren(...(images.length ? images.map(figureOf) : [make("p", { className: "key",
    textContent: "No node ends with an image: each backend of a Sequential is inside its node." })]));
}

const isArray = (value) => value && Array.isArray(value.shape) && Array.isArray(value.data);

/** `{label, score}` of a classifier, or pairs of a ranking. */
function labelsOf(answer) {
  if (typeof answer.label === "string") return [answer];
  const pairs = Array.isArray(answer.result) ? answer.result : [];
  const isPair = (pair) => Array.isArray(pair) && pair.length === 2 && typeof pair[0] === "string" && Number.isFinite(pair[1]);
  return pairs.length && pairs.every(isPair) ? pairs.map(([label, score]) => ({ label, score })) : [];
}

/** Dicts with a `box`, or arrays of rows of four numbers and perhaps a score: x1, y1, x2, y2. */
function boxesOf(value, found = []) {
  const add = (numbers, more = {}) => {
    if (found.length < 300 && numbers.length >= 4 && numbers.slice(0, 4).every(Number.isFinite)) {
      found.push({ box: numbers.slice(0, 4), ...more });
    }
  };
  if (isArray(value)) {
    const [rows, columns] = value.shape;
    if (value.shape.length === 2 && columns >= 4 && columns <= 6) {
      for (let row = 0; row < rows; row += 1) add(value.data.slice(row * columns, (row + 1) * columns));
    }
  } else if (Array.isArray(value)) {
    value.forEach((item) => boxesOf(item, found));
  } else if (value && typeof value === "object") {
    const box = value.box ?? value.bbox;
    const numbers = isArray(box) ? box.data : box;
    if (Array.isArray(numbers)) {
      const { score, class: number, keypoints = [], mask = null } = value;
      add(numbers, { label: String(value.label ?? number ?? ""), score, number, keypoints, mask });
    }
    else Object.values(value).forEach((item) => boxesOf(item, found));
  }
  return found;
}

function labelRow({ label, score, box }) {
  const share = Number.isFinite(score) ? Math.min(1, Math.max(0, score)) : 0;
  const bar = make("span", { className: "compute" });
  bar.style.width = `${100 * share}%`;
  const row = make("div", { className: "row" }, make("b", { textContent: label }), make("span", { className: "track" }, bar),
    make("small", { textContent: Number.isFinite(score) ? `score ${score.toPrecision(3)}` : "" }));
  return box ? [row, make("small", { textContent: `box ${box.map((side) => Math.round(side)).join(", ")}` })] : [row];
}

/** The size and range of an array in the answer. */
function arrayRow([name, value]) {
  const numbers = isArray(value) ? value.data.flat(Infinity).filter(Number.isFinite) : [];
  if (!numbers.length) return [];
  const [low, high] = numbers.reduce(([least, most], number) => [Math.min(least, number), Math.max(most, number)], [Infinity, -Infinity]);
  const text = `${value.shape.join(" × ") || "1"} numbers, from ${low.toPrecision(3)} to ${high.toPrecision(3)}`;
  return [make("div", {}, make("b", { textContent: name }), ` ${text}`)];
}

const COLORS = ["#ff3d7f", "#3ccf4e", "#3d8bff", "#ffb020", "#b45cff", "#00c2c7", "#ff6a3d"];
const LEAST_POINT_SCORE = 0.25;
const colorOf = (number) => COLORS[(Number.isInteger(number) && number > 0 ? number : 0) % COLORS.length];

/** Boxes over the picture; `width` and `height` are of the image whose pixels they count, 0 of the one that was sent. */
function draw(boxes, [, width, height]) {
  const picture = byId("picture");
  const svg = (tag, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  const [w, h] = [width || picture.naturalWidth, height || picture.naturalHeight];
  if (!w) {
    picture.onload = () => draw(boxes, ["", width, height]);
    return;
  }
  byId("boxes").setAttribute("viewBox", `0 0 ${w} ${h}`);
  byId("boxes").setAttribute("preserveAspectRatio", "none");
  byId("boxes").replaceChildren(
    ...boxes.filter(({ mask }) => isPolygons(mask)).map(({ mask, number }) => svg("path", { d: mask.map(outline).join(""), fill: colorOf(number) })),
    ...boxes.flatMap(({ box: [x1, y1, x2, y2], label = "", number, keypoints = [] }) => [
      svg("rect", { x: Math.min(x1, x2), y: Math.min(y1, y2), width: Math.abs(x2 - x1), height: Math.abs(y2 - y1), stroke: colorOf(number) }),
      svg("text", { x: x1, y: Math.max(y1, h / 20), "font-size": h / 20 }, label),
      ...keypoints.filter((point) => Array.isArray(point) && point.every(Number.isFinite) && point[2] >= LEAST_POINT_SCORE)
        .map(([x, y]) => svg("circle", { cx: x, cy: y, r: h / 120, fill: colorOf(number) })),
    ]));
  drawMasks(boxes);
}

// -- masks: polygons are drawn as paths, others on a canvas of their size ---------------------------------------------

const isPolygons = (mask) => Array.isArray(mask);
const outline = (polygon) => `M${polygon.map(([x, y]) => `${Number(x)} ${Number(y)}`).join("L")}Z`;
let drawnMasks = 0; // of the latest drawing: an earlier one ends when it sees another number

async function drawMasks(boxes) {
  const number = ++drawnMasks;
  const canvas = byId("masks");
  canvas.width = 0;
  for (const { mask, number: kind } of boxes) {
    if (mask && !isPolygons(mask)) {
      try {
        const layer = await maskLayer(mask, colorOf(kind));
        if (number !== drawnMasks) return;
        if (!canvas.width) [canvas.width, canvas.height] = [layer.width, layer.height];
        canvas.getContext("2d").drawImage(layer, 0, 0, canvas.width, canvas.height);
      } catch {
        continue; // a mask that cannot be read is left out
      }
    }
  }
}

/** A canvas with the pixels of a mask in this color: a PNG file, or COCO's run lengths. */
async function maskLayer(mask, color) {
  const canvas = document.createElement("canvas");
  let inside;
  if (mask.b64 !== undefined) {
    const bytes = Uint8Array.from(atob(mask.b64), (character) => character.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
    const context = canvas.getContext("2d");
    context.drawImage(bitmap, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    inside = (index) => data[4 * index] > 0;
  } else {
    [canvas.height, canvas.width] = mask.size;
    const columns = fromRunLengths(mask);
    inside = (index) => columns[(index % canvas.width) * canvas.height + Math.floor(index / canvas.width)];
  }
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(canvas.width, canvas.height);
  const channels = [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
  for (let index = 0; index < canvas.width * canvas.height; index += 1) {
    if (inside(index)) pixels.data.set([...channels, 255], 4 * index);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Each pixel of COCO's run lengths, column by column: runs outside and inside in turns, as numbers or as its text. */
function fromRunLengths({ size: [height, width], counts }) {
  const pixels = new Uint8Array(height * width);
  let start = 0;
  (typeof counts === "string" ? numbersOf(counts) : counts).forEach((count, index) => {
    if (index % 2) pixels.fill(1, start, start + count);
    start += count;
  });
  return pixels;
}

/** The numbers in COCO's text: five bits a character, from the third on differences to the one before the last. */
function numbersOf(text) {
  const counts = [];
  let [number, shift] = [0, 0];
  for (const character of text) {
    const bits = character.charCodeAt(0) - 48;
    number += (bits & 31) * 2 ** shift;
    shift += 5;
    if (!(bits & 32)) {
      if (bits & 16) number -= 2 ** shift;
      counts.push(number + (counts.length > 2 ? counts[counts.length - 2] : 0));
      [number, shift] = [0, 0];
    }
  }
  return counts;
}

/** A bar from when the request came to the node until it left; its text says the same. */
function nodeRow(node) {
  const track = make("span", { className: "track" });
  const parts = [["queue", node.queue_ms], ["wait", node.batch_wait_ms], ["compute", node.compute_ms]];
  let start = node.start_ms;
  for (const [name, time] of parts) {
    const bar = make("span", { className: name });
    bar.style.left = `${(100 * start) / told.ms}%`;
    bar.style.width = `${(100 * time) / told.ms}%`;
    if (time > 0) track.append(bar);
    start += time;
  }
  const [queue, wait, compute] = parts.map(([, time]) => ms(time));
  const text = `queue ${queue}, batch wait ${wait}, compute ${compute}, batch of ${node.batch}`;
  return make("li", {}, make("div", { className: "row" }, make("b", { textContent: node.node }), track,
    make("small", { textContent: compute })), make("small", { textContent: text }));
}

function figureOf({ node, image: { src, width, height } }) {
  return make("figure", {}, make("img", { src, width, height, alt: `the image after ${node}` }),
    make("figcaption", {}, make("small", { textContent: `${node}: ${width} × ${height}` })));
}

// -- the same from a program ----------------------------------------------------------------------------------------

function showCode() {
  const { name, version, node_name: root } = model();
  const given = parameters();
  const sent = Object.keys(given).length ? `, parameters=${JSON.stringify(given)}` : "";
  const named = (root ? `, node_name=${JSON.stringify(root)}` : "") + sent;
  const host = location.host.includes(":") ? location.host : `${location.host}:80`;
  const read = "Path(\"image.jpg\").read_bytes()";
  const codes = {
    curl: `curl --data-binary @image.jpg '${location.origin}/infer${query()}'`,
    Python: `from pathlib import Path\nfrom torchpipe_client import Client\n\nwith Client("${host}") as client:\n`
      + `    print(client.infer({"data": ${read}}${named}))`,
    tritonclient: "from pathlib import Path\nimport numpy as np\nimport tritonclient.http as triton\n\n"
      + `with triton.InferenceServerClient("${host}") as client:\n    data = triton.InferInput("data", [1], "BYTES")\n`
      + `    data.set_data_from_numpy(np.array([${read}], object))\n`
      + `    print(client.infer(${JSON.stringify(name)}, [data], model_version="${version}"${sent}).get_response())`,
  };
  byId("code").replaceChildren(...Object.entries(codes).map(([title, text]) => {
    const copy = make("button", { type: "button", textContent: `Copy ${title}` });
    copy.onclick = async () => {
      try {
        await navigator.clipboard.writeText(text); // which is there for https and for this machine only
        say(`${title}: copied`);
      } catch {
        say("select the text to copy it", true);
      }
    };
    return make("div", {}, copy, make("pre", { textContent: text, tabIndex: 0 }));
  }));
}

// -- start ----------------------------------------------------------------------------------------------------------

byId("model").append(...models.map(({ name, version }) => make("option", { textContent: `${name} ${version}` })));

function showParameters() {
  byId("parameters").hidden = !model().parameters.length;
  byId("parameters").replaceChildren(...model().parameters.map((name) => {
    const input = make("input", { name, type: "text", placeholder: "default", autocomplete: "off" });
    input.onchange = () => {
      showCode();
      if (image) ask();
    };
    return make("label", {}, `${name} `, input);
  }));
}

/** A file of a sample, whose bytes are in the page. */
function fileOf({ name, type, data }) {
  return new File([Uint8Array.from(atob(data), (character) => character.charCodeAt(0))], name, { type });
}

byId("samples").append(...samples.map((sample) => {
  const { name, type, data } = sample;
  const button = make("button", { type: "button", title: name }, make("img", { src: `data:${type};base64,${data}`, alt: name }));
  button.onclick = () => choose(fileOf(sample));
  return button;
}));
byId("json-box").firstElementChild.onclick = () => { isJsonChosen = true; };
window.addEventListener("resize", () => { byId("outcome").parentElement.style.minHeight = ""; });

byId("model").onchange = () => {
  showParameters();
  showCode();
  if (image) ask();
};
byId("file").onchange = () => choose(byId("file").files[0]);
byId("again").onclick = ask;
const imageIn = (transfer) => [...(transfer?.files ?? [])][0];
document.addEventListener("paste", (event) => choose(imageIn(event.clipboardData)));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
document.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  choose(imageIn(event.dataTransfer));
});
const port = document.body.dataset.monitoring;
byId("live").hidden = port === "0";
byId("live").href = `http://${location.hostname}:${port}/`;
showParameters();
showCode();
