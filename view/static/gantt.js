// The pipeline's step: a lane a device, true widths, only what is seen is drawn.
import { colour, fitted, FONT, make } from "./dom.js";
import { drawAxis, drawStages, firstAt, navigable, secondsAt } from "./chart.js";
import { describe, exchanged, listCollectives } from "./collectives.js";
import { criticalPath, sumPath } from "./critical-path.js";
import { time, visible } from "./format.js";
import { Mixture } from "./mixture.js";
import { hoverable } from "./tip.js";

export const KINDS = {
  F: ["forward", "forward"],
  B: ["backward", "backward"],
  I: ["backward-input", "backward, inputs"],
  W: ["backward-weight", "backward, weights"],
  R: ["recompute", "recomputed forward"],
  send_forward: ["send", "activations sent"],
  send_backward: ["send", "gradients sent"],
  sync: ["reduce", "gradient all-reduce of replicas"],
  reduce: ["reduce", "gradient all-reduce of tied weights"],
};
const STRIP = 5;
const WORK = new Set(["F", "B", "I", "W", "R", "reduce"]);
const COLLECTIVE = new Set(["sync", "reduce"]);
const FAINT = 0.25;
const LEAST_FONT = 7;

/** What the legend calls a kind. */
const brief = (kind) => ({ send: "sent", reduce: "gradient all-reduce" })[KINDS[kind][0]] ?? KINDS[kind][1];

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
      "aria-label": "What each device does in a step. A and D or arrow keys move, W and S or plus and minus zoom, 0 shows all.",
    });
    this.told = make("p", { class: "told", role: "status" }, "\u00a0");
    this.followed = null;
    this.path = null;
    const button = (text, label, act) =>
      make("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.legend = make("ul", { class: "legend" });
    this.critical = make("input", { type: "checkbox", oninput: () => this.showPath() });
    parent.replaceChildren(
      make("div", { class: "tools" }, this.legend, make("span", { class: "zoom" },
        make("label", { class: "inline" }, this.critical, "Critical path"),
        button("−", "Zoom out", () => axis.zoom(1.6)),
        button("+", "Zoom in", () => axis.zoom(0.625)),
        button("All", "Show the whole step", () => axis.set(0, axis.length)))),
      make("div", { class: "canvas" }, this.canvas), this.told);
    navigable(this.canvas, axis, () => this.area(), (event) => this.follow(this.found(event)));
    this.canvas.addEventListener("keydown", (event) => { if (event.key === "Escape") this.follow(undefined); });
    hoverable(this.canvas, (event) => this.words(event));
    this.ghost = null;
    this.show(view);
  }

  show(view, ghost = null) {
    this.view = view;
    this.followed = null;
    this.told.textContent = "\u00a0";
    this.lanes = view.boxes ? laneIndex(view.boxes, view.lanes.length) : [];
    this.ghost = ghost && ghost.boxes
      ? { boxes: ghost.boxes, stages: ghost.stages, lanes: laneIndex(ghost.boxes, ghost.lanes.length),
        end: ghost.header.step_time_s }
      : null;
    const kinds = new Set(view.boxes?.kinds ?? []);
    const entries = new Map(Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(
      ([kind, [name]]) => [name, brief(kind)]));
    const collectives = listCollectives(view);
    if (collectives.length) entries.set("reduce", `collectives: ${collectives.join(", ")}`);
    this.legend.replaceChildren(...[...entries].map(([name, words]) =>
      make("li", {}, make("span", { class: `swatch ${name}` }), words)),
      make("li", {}, make("span", { class: "swatch idle" }), "idle"),
      ...(this.ghost ? [make("li", {}, make("span", { class: "swatch ghost-swatch" }), "the stored plan")] : []));
    this.showPath();
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
        context, this.ghost, lane, rank * row + row - STRIP - 2, STRIP, left, scale, paint, false));
      context.globalAlpha = 1;
    }
    const height = row - 4 - (this.ghost ? STRIP + 1 : 0);
    this.lanes.forEach((lane, rank) => this.drawBoxes(
      context, view, lane, rank * row + 2, height, left, scale, paint, true));
    context.restore();
    if (this.path) this.drawPath(context, left, width, row, scale);
    if (this.ghost) this.drawEnd(context, left, width, scale, row);
    drawAxis(context, axis, left, width, view.lanes.length * row + 4);
  }

  /** A frame around each box of the critical path, and lines from one to the next. */
  drawPath(context, left, width, row, scale) {
    const { ranks, kinds, start_s: starts, end_s: ends } = this.view.boxes;
    context.save();
    context.beginPath();
    context.rect(left, 0, width, this.view.lanes.length * row + 2);
    context.clip();
    context.strokeStyle = colour("text");
    context.lineWidth = 1.5;
    const x = (seconds) => left + (seconds - this.axis.start) * scale;
    let before = null;
    context.beginPath();
    for (const index of this.path) {
      if (!WORK.has(kinds[index])) continue;
      const y = ranks[index] * row + 2;
      if (before !== null && before.y !== y) {
        context.moveTo(before.x, before.y + (row - 4) / 2);
        context.lineTo(x(starts[index]), y + (row - 4) / 2);
      }
      context.rect(x(starts[index]) + 0.5, y + 0.5, Math.max(0.5, (ends[index] - starts[index]) * scale - 1.5), row - 5);
      before = { x: x(ends[index]), y };
    }
    context.stroke();
    context.restore();
  }

  showPath() {
    const { boxes } = this.view;
    this.path = this.critical.checked && boxes ? criticalPath(boxes) : null;
    this.say();
    this.draw();
  }

  /** Follows the micro-batch of a box through the step, or none. */
  follow(index) {
    const batch = index === undefined ? null : this.view.boxes.microbatches[index];
    this.followed = batch === this.followed ? null : batch;
    this.say();
    this.draw();
  }

  /** Words below the drawing: the micro-batch that is followed, the critical path. */
  say() {
    const { boxes } = this.view;
    const words = [];
    if (this.followed !== null) {
      const mine = boxes.microbatches.map((batch, index) => index).filter(
        (index) => boxes.microbatches[index] === this.followed && WORK.has(boxes.kinds[index]) && boxes.kinds[index] !== "reduce");
      const start = Math.min(...mine.map((index) => boxes.start_s[index]));
      const end = Math.max(...mine.map((index) => boxes.end_s[index]));
      const busy = mine.reduce((sum, index) => sum + boxes.end_s[index] - boxes.start_s[index], 0);
      words.push(`Micro-batch ${this.followed}: ${time(start)} to ${time(end)}, ${time(busy)} of work on all devices. Click it again or press Escape to leave it.`);
    }
    if (this.path) {
      words.push(`Critical path: ${sumPath(boxes, this.path, brief).map(([name, seconds]) => `${name} ${time(seconds)}`).join(", ")}.`);
    }
    this.told.textContent = words.join(" ") || "\u00a0";
  }

  drawLanes(context, left, width, row) {
    const narrow = left < 100;
    context.textAlign = "left";
    context.textBaseline = "middle";
    this.view.lanes.forEach((lane, rank) => {
      context.fillStyle = colour("idle");
      context.fillRect(left, rank * row + 2, width, row - 4);
      if (row < 12) return;
      const stages = lane.stages.join("+");
      const text = narrow ? stages : `${stages}  ${visible(lane.device)}`;
      const x = narrow ? 2 : drawStages(context, lane.stages, 2, rank * row + row / 2);
      context.fillStyle = colour("text");
      const most = narrow ? 4 : 19 - Math.min(4, lane.stages.length);
      context.fillText(text.length > most ? `${text.slice(0, most - 1)}…` : text, x, rank * row + row / 2);
    });
  }

  drawBoxes(context, view, lane, y, height, left, scale, paint, numbers) {
    const { start, end } = this.axis;
    const { start_s: starts, end_s: ends, kinds, microbatches } = view.boxes;
    const white = colour("on-work");
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
      const isFaint = numbers && this.followed !== null && microbatches[index] !== this.followed;
      const inside = isWork ? exchanged(view, index) / (ends[index] - starts[index] || 1) : 0;
      if (isWork && w < 2 && !isFaint) {
        mixture.add(kind, x, w * (1 - inside));
        if (inside) mixture.add("reduce", x, w * inside);
        continue;
      }
      context.globalAlpha = isFaint ? FAINT : numbers ? 1 : context.globalAlpha;
      context.fillStyle = paint[kind];
      // Throughout the box, as every layer exchanges: as high as its share of the time.
      const band = inside && Math.max(Math.min(2, height / 3), inside * height);
      if (isWork) {
        const gap = w > 4 ? 1 : 0;
        context.fillRect(x, y, w - gap, height);
        if (band) {
          context.fillStyle = paint.reduce;
          context.fillRect(x, y + height - band, w - gap, band);
        }
      } else {
        const thick = kind === "sync" ? Math.max(3, height / 3) : 3;
        context.fillRect(x, y + height - thick, Math.max(height > 12 ? 0.6 : 0, w), thick);
      }
      const label = String(microbatches[index]);
      const room = height - band > LEAST_FONT ? height - band : height;
      const size = Math.min(12, room, (w - 2) / (0.6 * label.length)); // as large as there is room for
      if (numbers && isWork && kind !== "reduce" && size >= LEAST_FONT) {
        context.font = `${size}px system-ui, sans-serif`;
        context.fillStyle = white;
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(label, x + w / 2, y + room / 2);
      }
    }
    if (numbers) context.globalAlpha = 1;
    context.font = FONT;
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

  /** The box under the pointer. */
  found(event) {
    const { boxes } = this.view;
    if (!boxes) return undefined;
    const at = secondsAt(this.axis, this.area(), event.offsetX);
    const here = (this.lanes[Math.floor(event.offsetY / this.rowHeight())] ?? []).filter(
      (index) => boxes.start_s[index] <= at && at < boxes.end_s[index]);
    return here.find((index) => WORK.has(boxes.kinds[index])) ?? here.find((index) => boxes.kinds[index] === "sync");
  }

  /** What is said beside the pointer. */
  words(event) {
    const { boxes, lanes } = this.view;
    const lane = lanes[Math.floor(event.offsetY / this.rowHeight())];
    if (!boxes || !lane) return "";
    const at = time(secondsAt(this.axis, this.area(), event.offsetX));
    const found = this.found(event);
    if (found === undefined) return `${visible(lane.device)}: idle at ${at}`;
    const [start, end] = [boxes.start_s[found], boxes.end_s[found]];
    const kind = boxes.kinds[found];
    const batch = COLLECTIVE.has(kind) ? "" : `micro-batch ${boxes.microbatches[found]}, `;
    const words = `${KINDS[kind][1]}, ${batch}${time(start)} to ${time(end)} (${time(end - start)})`;
    return `${visible(lane.device)}: stage ${boxes.stages[found]}, ${describe(this.view, found, words)}`;
  }
}
