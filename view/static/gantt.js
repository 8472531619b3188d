// The pipeline's step: a lane a device, true widths, only what is seen is drawn.
import { colour, fitted, make } from "./dom.js";
import { drawAxis, firstAt, navigable } from "./chart.js";
import { time, visible } from "./format.js";
import { Mixture } from "./mixture.js";

export const KINDS = {
  F: ["forward", "forward"],
  B: ["backward", "backward"],
  I: ["backward-input", "backward, inputs"],
  W: ["backward-weight", "backward, weights"],
  R: ["recompute", "recomputed forward"],
  send_forward: ["send", "activations sent"],
  send_backward: ["send", "gradients sent"],
  sync: ["reduce", "gradients summed over replicas"],
  reduce: ["reduce", "gradients of tied weights summed"],
};
const STRIP = 5;
const WORK = new Set(["F", "B", "I", "W", "R", "reduce"]);

/** Boxes of each lane in the order of their start, and the longest of them. */
function laneIndex(boxes, numLanes) {
  const lanes = Array.from({ length: numLanes }, () => []);
  boxes.ranks.forEach((rank, index) => lanes[rank].push(index));
  for (const lane of lanes) {
    lane.sort((a, b) => boxes.start_s[a] - boxes.start_s[b]);
    lane.longest = lane.reduce((most, index) => Math.max(most, boxes.end_s[index] - boxes.start_s[index]), 0);
  }
  return lanes;
}

export class Gantt {
  constructor(parent, view, axis) {
    this.axis = axis;
    this.canvas = make("canvas", {
      tabindex: 0, role: "img",
      "aria-label": "What each device does in a step. Arrow keys move, plus and minus zoom, 0 shows all.",
    });
    this.told = make("p", { class: "told" }, "\u00a0");
    const button = (text, label, act) =>
      make("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.legend = make("ul", { class: "legend" });
    parent.replaceChildren(
      make("div", { class: "tools" }, this.legend, make("span", { class: "zoom" },
        button("−", "Zoom out", () => axis.zoom(1.6)),
        button("+", "Zoom in", () => axis.zoom(0.625)),
        button("All", "Show the whole step", () => axis.set(0, axis.length)))),
      make("div", { class: "canvas" }, this.canvas), this.told);
    navigable(this.canvas, axis, () => this.area());
    this.canvas.addEventListener("pointermove", (event) => this.tell(event));
    this.ghost = null;
    this.show(view);
  }

  show(view, ghost = null) {
    this.view = view;
    this.told.textContent = "\u00a0";
    this.lanes = view.boxes ? laneIndex(view.boxes, view.lanes.length) : [];
    this.ghost = ghost && ghost.boxes
      ? { boxes: ghost.boxes, lanes: laneIndex(ghost.boxes, ghost.lanes.length),
        end: ghost.header.step_time_s }
      : null;
    const kinds = new Set(view.boxes?.kinds ?? []);
    const entries = new Map(Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(
      ([, [name, words]]) => [name, name === "send" ? "sent" : name === "reduce" ? "sums" : words]));
    this.legend.replaceChildren(...[...entries].map(([name, words]) =>
      make("li", {}, make("span", { class: `swatch ${name}` }), words)),
      make("li", {}, make("span", { class: "swatch idle" }), "idle"),
      ...(this.ghost ? [make("li", {}, make("span", { class: "swatch ghost-swatch" }), "the stored plan")] : []));
    this.draw();
  }

  area() {
    const left = this.canvas.clientWidth < 500 ? 34 : 150;
    return { left, width: this.canvas.clientWidth - left - 8 };
  }

  rowHeight() {
    const count = this.view.lanes.length;
    return count <= 12 ? 34 : count <= 32 ? 22 : 13;
  }

  draw() {
    const { view, axis } = this;
    if (!view.boxes) {
      this.told.textContent = view.follows ? "The step is on its way …"
        : "This step has too much in it to be drawn here; the tables have its numbers.";
      return;
    }
    const row = this.rowHeight();
    const [context] = fitted(this.canvas, view.lanes.length * row + 34);
    const { left, width } = this.area();
    const scale = width / (axis.end - axis.start);
    this.drawLanes(context, left, width, row);
    context.save();
    context.beginPath();
    context.rect(left, 0, width, view.lanes.length * row + 4);
    context.clip();
    const paint = Object.fromEntries(
      Object.entries(KINDS).map(([kind, [name]]) => [kind, colour(name)]));
    if (this.ghost) {
      context.globalAlpha = 0.5;
      this.ghost.lanes.forEach((lane, rank) => this.drawBoxes(
        context, this.ghost.boxes, lane, rank * row + row - STRIP - 2, STRIP, left, scale, paint, false));
      context.globalAlpha = 1;
    }
    const height = row - 4 - (this.ghost ? STRIP + 1 : 0);
    this.lanes.forEach((lane, rank) => this.drawBoxes(
      context, view.boxes, lane, rank * row + 2, height, left, scale, paint, true));
    context.restore();
    if (this.ghost) this.drawEnd(context, left, width, scale, row);
    drawAxis(context, axis, left, width, view.lanes.length * row + 4);
  }

  drawLanes(context, left, width, row) {
    const narrow = left < 100;
    context.textAlign = "left";
    context.textBaseline = "middle";
    this.view.lanes.forEach((lane, rank) => {
      context.fillStyle = colour("idle");
      context.fillRect(left, rank * row + 2, width, row - 4);
      if (row < 12) return;
      context.fillStyle = colour("text");
      const stages = lane.stages.join("+");
      const text = narrow ? stages : `${stages}  ${visible(lane.device)}`;
      context.fillText(text.length > 21 ? `${text.slice(0, 20)}…` : text, 2, rank * row + row / 2);
    });
  }

  drawBoxes(context, boxes, lane, y, height, left, scale, paint, numbers) {
    const { start, end } = this.axis;
    const { start_s: starts, end_s: ends, kinds, microbatches } = boxes;
    const mixture = new Mixture(left, (end - start) * scale, [...WORK]);
    const first = firstAt(lane.length, (place) => starts[lane[place]], start - lane.longest);
    for (let place = first; place < lane.length; place += 1) {
      const index = lane[place];
      if (starts[index] > end) break;
      if (ends[index] < start) continue;
      const kind = kinds[index];
      const x = left + (starts[index] - start) * scale;
      const w = (ends[index] - starts[index]) * scale;
      const isWork = WORK.has(kind);
      if (!isWork && !numbers) continue;
      if (isWork && w < 2) {
        mixture.add(kind, x, w);
        continue;
      }
      context.fillStyle = paint[kind];
      if (isWork) {
        const gap = w > 4 ? 1 : 0;
        context.fillRect(x, y, w - gap, height);
      } else {
        context.fillRect(x, y + height - 3, Math.max(height > 12 ? 0.6 : 0, w), 3);
      }
      const label = String(microbatches[index]);
      if (numbers && isWork && kind !== "reduce" && height > 12 && w > 7 * label.length + 4) {
        context.fillStyle = colour("on-work");
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(label, x + w / 2, y + height / 2);
      }
    }
    mixture.fill(context, y, height, paint);
  }

  drawEnd(context, left, width, scale, row) {
    const x = left + (this.ghost.end - this.axis.start) * scale;
    if (x < left || x > left + width + 1) return;
    context.strokeStyle = colour("text");
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, this.view.lanes.length * row + 4);
    context.stroke();
    context.setLineDash([]);
  }

  tell(event) {
    const { left, width } = this.area();
    const { boxes } = this.view;
    if (!boxes) return;
    const rank = Math.floor(event.offsetY / this.rowHeight());
    const at = this.axis.start + ((event.offsetX - left) / width) * (this.axis.end - this.axis.start);
    const found = (this.lanes[rank] ?? []).find(
      (index) => WORK.has(boxes.kinds[index]) && boxes.start_s[index] <= at && at < boxes.end_s[index]);
    const lane = this.view.lanes[rank];
    if (found === undefined) this.told.textContent = lane ? `${visible(lane.device)}: idle` : "\u00a0";
    else {
      const [start, end] = [boxes.start_s[found], boxes.end_s[found]];
      this.told.textContent = `${visible(lane.device)}: stage ${boxes.stages[found]}, `
        + `${KINDS[boxes.kinds[found]][1]}, micro-batch ${boxes.microbatches[found]}, `
        + `${time(start)} to ${time(end)} (${time(end - start)})`;
    }
  }
}
