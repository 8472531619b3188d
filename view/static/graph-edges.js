// Lines between boxes of different stages, and past boxes; neighbours in a column have their arrow by style.
import { bytes } from "./format.js";

const MOST = 600;
const BEND = 34;

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** The boxes that are seen and closed, in the order of their layers, and where each is. */
function places(tree, boxes) {
  const from = tree.getBoundingClientRect();
  return [...tree.querySelectorAll(".box")].filter((item) => item.ariaExpanded !== "true").map((item) => {
    const { left, right, top, bottom } = item.firstElementChild.getBoundingClientRect();
    const { first, count } = boxes.get(item);
    return { first, count, left: left - from.left, right: right - from.left, y: (top + bottom) / 2 - from.top };
  });
}

/** From layers to boxes: [source, target] of what skips boxes, each pair once. */
function skips(graph, seen, numLayers) {
  const owner = new Int32Array(numLayers);
  seen.forEach(({ first, count }, index) => owner.fill(index, first, first + count));
  const pairs = new Map();
  graph.skip_sources.forEach((source, index) => {
    const [from, to] = [owner[source], owner[graph.skip_targets[index]]];
    if (to > from + 1) pairs.set(from * seen.length + to, [from, to]);
  });
  return [...pairs.values()];
}

function curve(from, to) {
  if (from.right === to.right) {
    const out = from.right + 20;
    return `M${from.right} ${from.y} C${out} ${from.y} ${out} ${to.y} ${to.right + 2} ${to.y}`;
  }
  return `M${from.right} ${from.y} C${from.right + BEND} ${from.y} ${to.left - BEND} ${to.y} ${to.left - 2} ${to.y}`;
}

/** Draws the lines of what is seen; gives how many lines past boxes are too many to be drawn. */
export function drawEdges(svg, tree, boxes, view) {
  const seen = places(tree, boxes);
  svg.setAttribute("width", tree.scrollWidth);
  svg.setAttribute("height", tree.scrollHeight);
  const arrow = element("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
  arrow.append(element("path", { class: "tip", d: "M0 0 8 4 0 8z" }));
  const line = (from, to, kind) => element("path", { class: `edge ${kind}`, d: curve(from, to), "marker-end": "url(#arrow)" });
  const past = skips(view.graph, seen, view.layers.names.length);
  const far = past.slice(0, MOST).map(([from, to]) => line(seen[from], seen[to], "far"));
  const cuts = [];
  let layer = 0;
  view.graph.cut_bytes.forEach((size, stage) => {
    layer += view.balance[stage];
    const index = seen.findIndex(({ first }) => first === layer);
    const [from, to] = [seen[index - 1], seen[index]];
    cuts.push(line(from, to, "cut"));
    if (size) cuts.push(element("text", { class: "sent", x: to.left - 44, y: to.y + 22 }, bytes(size)));
  });
  const marks = element("defs", {});
  marks.append(arrow);
  svg.replaceChildren(marks, ...far, ...cuts);
  return past.length - far.length;
}
