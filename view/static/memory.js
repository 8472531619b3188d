// What each device holds over the step: what stays, activations on it, the limit above.
import { colour, fitted, make } from "./dom.js";
import { drawAxis, drawStages, firstAt, navigable, secondsAt } from "./chart.js";
import { bytes, time, visible } from "./format.js";
import { hoverable } from "./tip.js";

const FAR = 3;

/** One size, or the least and the largest. */
function range(sizes) {
  const [least, most] = [bytes(sizes.reduce((a, b) => Math.min(a, b))), bytes(sizes.reduce((a, b) => Math.max(a, b)))];
  return least === most ? least : `${least} to ${most}`;
}

export class Memory {
  constructor(parent, view, axis) {
    this.axis = axis;
    this.canvas = make("canvas", {
      tabindex: 0, role: "img",
      "aria-label": "Memory of each device over the step. A and D or arrow keys move, W and S or plus and minus zoom, 0 shows all.",
    });
    this.note = make("p", { class: "told" });
    this.legend = make("ul", { class: "legend" });
    parent.replaceChildren(this.legend, make("div", { class: "canvas" }, this.canvas), this.note);
    navigable(this.canvas, axis, () => this.area());
    hoverable(this.canvas, (event) => this.words(event));
    this.show(view);
  }

  show(view, ghost = null) {
    this.view = view;
    this.ghost = ghost;
    this.explain();
    this.draw();
  }

  explain() {
    const swatch = (name, words) => make("li", {}, make("span", { class: `swatch ${name}` }), words);
    const isLimited = this.view.memory.some((curve) => curve.limit_bytes !== null);
    this.legend.replaceChildren(swatch("fixed", "weights, gradients, optimizer, buffers"), swatch("held", "activations"),
      ...(isLimited ? [swatch("limit", "limit")] : []));
  }

  area() {
    const left = this.canvas.clientWidth < 500 ? 34 : 150;
    return { left, width: this.canvas.clientWidth - left - 8 };
  }

  draw() {
    const curves = this.view.memory;
    const row = this.rowHeight();
    const [context] = fitted(this.canvas, curves.length * row + 34);
    const { left, width } = this.area();
    const peaks = [...curves, ...(this.ghost?.memory ?? [])].map((curve) => curve.peak_bytes);
    const most = Math.max(...peaks, 1) * 1.15;
    const limits = curves.map((curve) => curve.limit_bytes).filter((limit) => limit !== null);
    const near = limits.filter((limit) => limit <= FAR * most);
    const far = limits.filter((limit) => limit > FAR * most);
    const top = near.reduce((highest, limit) => Math.max(highest, limit * 1.05), most);
    const band = far.length ? Math.round(row / 5) : 0; // above the break
    this.note.textContent = !limits.length ? "No limit is set."
      : far.length ? `The limit of ${far.length === curves.length ? "each device" : `${far.length} devices`}, `
        + `${range(far)}, is far above what is held: its line stands over a break in the scale.` : "";
    curves.forEach((curve, rank) => {
      const base = rank * row + row - 4;
      const scale = (row - 8 - band) / top;
      this.drawLane(context, rank, curve, left, width, row);
      const before = this.ghost?.memory[rank];
      this.drawCurve(context, curve, left, width, base, scale, before);
      if (curve.limit_bytes > FAR * most) this.drawFarLimit(context, curve, left, width, rank * row, band);
      else if (curve.limit_bytes !== null) {
        context.fillStyle = colour("limit");
        context.fillRect(left, base - curve.limit_bytes * scale - 1, width, 2);
      }
    });
    if (row > 20) this.drawScale(context, top, left, row, band);
    drawAxis(context, this.axis, left, width, curves.length * row + 4);
  }

  /** What the upper edge of the first lane stands for; all lanes have one scale. */
  drawScale(context, top, left, row, band) {
    const words = `↕ 0 to ${bytes(top)}`;
    const { width } = context.measureText(words);
    context.textAlign = "left";
    context.textBaseline = "top";
    context.globalAlpha = 0.8;
    context.fillStyle = colour("back");
    context.fillRect(left + 2, band + 3, width + 6, 15);
    context.globalAlpha = 1;
    context.fillStyle = colour("text");
    context.fillText(words, left + 5, band + 5);
  }

  rowHeight() {
    const { length } = this.view.memory;
    return length <= 8 ? 64 : length <= 32 ? 30 : 14;
  }

  /** What is said beside the pointer. */
  words(event) {
    const curve = this.view.memory[Math.floor(event.offsetY / this.rowHeight())];
    if (!curve || !curve.time_s.length) return "";
    const at = secondsAt(this.axis, this.area(), event.offsetX);
    const place = firstAt(curve.time_s.length, (index) => curve.time_s[index], at);
    const held = curve.held_bytes[curve.time_s[place] === at ? place : place - 1] ?? 0;
    return `${visible(curve.device)} at ${time(at)}: ${bytes(curve.fixed_bytes + held)}, of which activations ${bytes(held)}`
      + (curve.limit_bytes === null ? "" : `; limit ${bytes(curve.limit_bytes)}`);
  }

  drawLane(context, rank, curve, left, width, row) {
    context.fillStyle = colour("idle");
    context.fillRect(left, rank * row + 2, width, row - 4);
    if (row < 12) return;
    context.fillStyle = colour("text");
    context.textAlign = "left";
    context.textBaseline = "middle";
    const stages = this.view.lanes[rank].stages.join("+");
    const text = left < 100 ? stages : `${stages}  ${visible(curve.device)}`;
    const y = rank * row + row / 2;
    const of = this.view.lanes[rank].stages;
    const x = left < 100 ? 2 : drawStages(context, of, 2, row > 40 ? y - 9 : y);
    const longest = left < 100 ? 4 : 19 - Math.min(4, of.length);
    context.fillStyle = colour("text");
    context.fillText(text.length > longest ? `${text.slice(0, longest - 1)}…` : text, x, row > 40 ? y - 9 : y);
    if (row > 40 && left > 100) {
      context.fillStyle = colour("soft");
      context.fillText(`peak ${bytes(curve.peak_bytes)}`, 2, y + 9);
    }
  }

  /** The limit at the upper edge, a gap in the lane under it, and its value where there is room. */
  drawFarLimit(context, curve, left, width, y, band) {
    context.fillStyle = colour("back");
    context.fillRect(left, y + band + 1, width, 2);
    context.fillStyle = colour("limit");
    context.fillRect(left, y + 2, width, 2);
    if (band < 12) return;
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillStyle = colour("text");
    context.fillText(`limit ${bytes(curve.limit_bytes)}`, left + width - 4, y + 5);
  }

  drawCurve(context, curve, left, width, base, scale, before) {
    context.fillStyle = colour("held");
    for (const [x, w, held] of this.steps(curve, left, width)) {
      const from = Math.floor(x); // whole pixels: no seams between stretches
      context.fillRect(from, base - (curve.fixed_bytes + held) * scale, Math.ceil(x + w) - from, held * scale);
    }
    context.fillStyle = colour("fixed");
    context.fillRect(left, base - curve.fixed_bytes * scale, width, curve.fixed_bytes * scale);
    if (!before) return;
    context.strokeStyle = colour("text");
    context.setLineDash([3, 3]);
    context.beginPath();
    const y = base - before.peak_bytes * scale;
    context.moveTo(left, y);
    context.lineTo(left + width, y);
    context.stroke();
    context.setLineDash([]);
  }

  /** Stretches of the same memory that are seen; the highest of those within a pixel. */
  * steps(curve, left, width) {
    const { start, end } = this.axis;
    const scale = width / (end - start);
    const { time_s: times, held_bytes: held } = curve;
    let open = null;
    const first = Math.max(0, firstAt(times.length, (place) => times[place], start) - 1);
    for (let index = first; index < times.length; index += 1) {
      const until = index + 1 < times.length ? times[index + 1] : this.axis.length;
      if (until < start) continue;
      if (times[index] > end) break;
      const x = left + (Math.max(times[index], start) - start) * scale;
      const to = left + (Math.min(until, end) - start) * scale;
      if (open && to - open[0] < 1) {
        open[1] = to - open[0];
        open[2] = Math.max(open[2], held[index]);
        continue;
      }
      if (open) yield open;
      open = [x, to - x, held[index]];
    }
    if (open) yield open;
  }
}
