// A bar a layer in its stage's colour, and cuts between stages that can be moved.
import { colour, fitted, make } from "./dom.js";
import { roundStep } from "./chart.js";
import { bytes, time, visible } from "./format.js";
import { hoverable } from "./tip.js";

const HEIGHT = 170;
const HUES = 8;
const MOST_NAMED = 8;

export class Bars {
  /** moved(balance) is called while a cut moves; without it cuts stand still. */
  constructor(parent, view, moved) {
    this.moved = moved;
    this.canvas = make("canvas", { role: "img", "aria-label": "Time of each layer, coloured by stage" });
    this.handles = make("div", { class: "cuts" });
    this.told = make("p", { class: "told" }, "\u00a0");
    this.box = make("div", { class: "canvas bars" }, this.canvas, this.handles);
    this.legend = make("ul", { class: "legend" });
    this.ends = make("p", { class: "ends" });
    parent.replaceChildren(this.legend, this.box, this.ends, this.told);
    hoverable(this.canvas, (event) => this.words(event));
    this.layers = view.layers;
    this.show(view.balance);
  }

  show(balance, ghost = null) {
    this.balance = [...balance];
    this.ghost = ghost;
    this.explain();
    this.draw();
    this.place();
  }

  /** The stages' colours above the bars, the first and the last layer below them. */
  explain() {
    const count = this.layers.names.length;
    const stages = this.balance.slice(0, MOST_NAMED).map((size, stage) =>
      make("li", {}, make("span", { class: `dot hue-${stage % HUES}` }), `stage ${stage}: ${size} ${size === 1 ? "layer" : "layers"}`));
    if (this.balance.length > MOST_NAMED) stages.push(make("li", {}, `… ${this.balance.length} stages in all, the colours again from the ninth on`));
    this.legend.replaceChildren(...stages);
    this.ends.replaceChildren(make("span", {}, "layer 0"), make("span", {}, "layers in the order they run"), make("span", {}, `layer ${count - 1}`));
  }

  /** Index of the first layer of each stage but the first. */
  cuts() {
    let sum = 0;
    return this.balance.slice(0, -1).map((count) => { sum += count; return sum; });
  }

  costs() {
    const { forward_s: forward, backward_s: backward, names } = this.layers;
    return forward.length ? forward.map((value, index) => value + backward[index]) : names.map(() => 1);
  }

  draw() {
    const [context, width] = fitted(this.canvas, HEIGHT);
    const costs = this.costs();
    const count = costs.length;
    const { spread_s: spread = [] } = this.layers;
    const most = costs.reduce((highest, cost, index) => Math.max(highest, cost + (spread[index] ?? 0) / 2), 1e-12);
    const each = width / count;
    const hues = Array.from({ length: HUES }, (_, index) => colour(`hue-${index}`));
    let stage = 0;
    let left = this.balance[0];
    let pixel = -1;
    let highest = 0;
    for (let index = 0; index < count; index += 1) {
      while (left === 0 && stage + 1 < this.balance.length) {
        stage += 1;
        left = this.balance[stage];
      }
      left -= 1;
      const height = Math.max(1.5, (costs[index] / most) * (HEIGHT - 14));
      const x = index * each;
      if (each < 1) { // several layers share a pixel: the highest is seen
        if (Math.floor(x) === pixel && height <= highest) continue;
        highest = Math.floor(x) === pixel ? Math.max(height, highest) : height;
        pixel = Math.floor(x);
      }
      context.fillStyle = hues[stage % HUES];
      context.fillRect(x, HEIGHT - height, Math.max(1, each - (each > 4 ? 1 : 0)), height);
      if (each > 4 && spread[index]) this.drawSpread(context, x + (each - 1) / 2, height, ((spread[index] / most) * (HEIGHT - 14)) / 2);
    }
    this.drawGhost(context, each);
    if (this.layers.forward_s.length) this.drawScale(context, most, width);
  }

  /** Lines at round times, with their values on the left. */
  drawScale(context, most, width) {
    context.textAlign = "left";
    context.textBaseline = "bottom";
    const step = roundStep(most / 3);
    for (let value = step; value < most * 1.02; value += step) {
      const y = Math.round(HEIGHT - (value / most) * (HEIGHT - 14)) + 0.5;
      context.globalAlpha = 0.5;
      context.strokeStyle = colour("soft");
      context.setLineDash([1, 3]);
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
      context.setLineDash([]);
      const words = time(Number(value.toPrecision(12)));
      context.globalAlpha = 0.8;
      context.fillStyle = colour("back");
      context.fillRect(0, y - 15, context.measureText(words).width + 6, 14);
      context.globalAlpha = 1;
      context.fillStyle = colour("text");
      context.fillText(words, 3, y - 1);
    }
  }

  /** A line from a quarter of the repeats to three quarters of them. */
  drawSpread(context, x, height, half) {
    context.fillStyle = colour("text");
    context.fillRect(x - 0.5, HEIGHT - height - half, 1, 2 * half);
    for (const end of [-half, half]) context.fillRect(x - 2, HEIGHT - height + end - 0.5, 4, 1);
  }

  drawGhost(context, each) {
    if (!this.ghost) return;
    context.strokeStyle = colour("soft");
    context.setLineDash([4, 4]);
    let sum = 0;
    for (const size of this.ghost.slice(0, -1)) {
      sum += size;
      context.beginPath();
      context.moveTo(sum * each, 0);
      context.lineTo(sum * each, HEIGHT);
      context.stroke();
    }
    context.setLineDash([]);
  }

  /** Handles stay the same elements while they move, so that they keep the focus. */
  place() {
    const cuts = this.cuts();
    while (this.handles.children.length > cuts.length) this.handles.lastChild.remove();
    while (this.handles.children.length < cuts.length) this.handles.append(this.handle(this.handles.children.length));
    const count = this.layers.names.length;
    cuts.forEach((cut, index) => {
      const handle = this.handles.children[index];
      handle.style.left = `${(cut / count) * 100}%`;
      const [least, most] = this.range(index);
      handle.setAttribute("aria-valuemin", least);
      handle.setAttribute("aria-valuemax", most);
      handle.setAttribute("aria-valuenow", cut);
      handle.setAttribute("aria-valuetext", `in front of layer ${cut}, ${visible(this.layers.names[cut])}`);
    });
  }

  handle(index) {
    const handle = make("div", {
      class: "cut", role: "slider", tabindex: this.moved ? 0 : -1,
      "aria-label": `Cut between stages ${index} and ${index + 1}`,
      "aria-disabled": this.moved ? "false" : "true",
    });
    if (!this.moved) return handle;
    handle.addEventListener("keydown", (event) => this.key(event, index));
    handle.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      handle.focus();
      handle.setPointerCapture(event.pointerId);
      const held = new AbortController();
      handle.addEventListener("pointermove", (moving) => this.drag(moving, index), { signal: held.signal });
      for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
        handle.addEventListener(end, () => held.abort(), { signal: held.signal });
      }
    });
    return handle;
  }

  /** Where a cut may be: each stage keeps a layer. */
  range(index) {
    const cuts = [0, ...this.cuts(), this.layers.names.length];
    return [cuts[index] + 1, cuts[index + 2] - 1];
  }

  key(event, index) {
    const [least, most] = this.range(index);
    const cut = this.cuts()[index];
    const steps = {
      ArrowLeft: [cut - 1, -1], ArrowDown: [cut - 1, -1], ArrowRight: [cut + 1, 1], ArrowUp: [cut + 1, 1],
      PageDown: [cut - 10, -1], PageUp: [cut + 10, 1], Home: [least, 1], End: [most, -1],
    };
    if (!steps[event.key]) return;
    event.preventDefault();
    this.move(index, ...steps[event.key]);
  }

  drag(event, index) {
    const box = this.canvas.getBoundingClientRect();
    const wanted = Math.round(((event.clientX - box.left) / box.width) * this.layers.names.length);
    this.move(index, wanted, wanted < this.cuts()[index] ? -1 : 1);
  }

  /** Moves a cut to a place where one is legal, looking on in the direction of the move. */
  move(index, wanted, direction) {
    const [least, most] = this.range(index);
    let cut = Math.min(most, Math.max(least, wanted));
    const reasons = this.layers.cut_reasons;
    let first = "";
    while (reasons.length && reasons[cut - 1] && cut + direction >= least && cut + direction <= most) {
      first ||= reasons[cut - 1];
      cut += direction;
    }
    const before = this.cuts()[index];
    if (reasons.length && reasons[cut - 1]) {
      this.told.textContent = `No cut there: ${visible(reasons[cut - 1])}.`;
      return;
    }
    if (cut === before) return;
    const cuts = [0, ...this.cuts(), this.layers.names.length];
    cuts[index + 1] = cut;
    this.balance = cuts.slice(1).map((end, place) => end - cuts[place]);
    this.told.textContent = `Stage ${index + 1} now begins with layer ${cut}, ${visible(this.layers.names[cut])}`
      + (first ? ` (no cut nearer: ${first}).` : ".");
    this.draw();
    this.place();
    this.moved(this.balance);
  }

  /** What is said beside the pointer. */
  words(event) {
    const { names, forward_s: forward, backward_s: backward, parameter_bytes: parameters } = this.layers;
    const index = Math.floor((event.offsetX / this.canvas.clientWidth) * names.length);
    if (!(index >= 0 && index < names.length)) return "";
    return forward.length
      ? `${index} ${visible(names[index])}: forward ${time(forward[index])}, backward ${time(backward[index])}, `
        + `weights ${bytes(parameters[index])}`
        + (this.layers.spread_s?.[index] ? `, times spread by ${time(this.layers.spread_s[index])}` : "")
      : `${index} ${visible(names[index])}`;
  }
}
