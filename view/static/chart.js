// The time axis that the charts of one step share: what part of the step is seen.
import { colour } from "./dom.js";
import { time } from "./format.js";

/** A window [start, end] of seconds, moved and zoomed by all charts together. */
export class Axis {
  constructor(length) {
    this.length = length;
    this.start = 0;
    this.end = length;
    this.listeners = [];
  }

  onchange(listener) {
    this.listeners.push(listener);
  }

  /** Listeners draw once a frame, however often it changes. */
  changed() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const listener of this.listeners) listener();
    });
  }

  set(start, end) {
    const least = this.length / 1e5;
    const width = Math.min(this.length, Math.max(least, end - start));
    this.start = Math.min(Math.max(0, start), this.length - width);
    this.end = this.start + width;
    this.changed();
  }

  /** What is seen, to be compared with what was. */
  get seen() {
    return `${this.start} ${this.end} ${this.length}`;
  }

  get isWhole() {
    return this.start === 0 && this.end === this.length;
  }

  resize(length) {
    const { isWhole } = this;
    this.length = length;
    if (isWhole) this.set(0, length);
    else this.set(this.start, this.end);
  }

  /** Shows what the address says, and from now on has it say what is shown. */
  keep(address) {
    const names = ["from", "to"];
    if (names.some((name) => address.get(name) !== null)) {
      const [from, to] = names.map((name) => Number(address.get(name) || NaN));
      const fits = from >= 0 && from < to && to <= this.length * (1 + 1e-6);
      if (fits) this.set(from, to);
      else address.refuse(names, "the whole step");
    }
    const text = (seconds) => (this.isWhole ? null : String(Number(seconds.toPrecision(9))));
    this.onchange(() => address.set({ from: text(this.start), to: text(this.end) }));
  }

  zoom(factor, share = 0.5) {
    const width = (this.end - this.start) * factor;
    const fixed = this.start + (this.end - this.start) * share;
    this.set(fixed - width * share, fixed + width * (1 - share));
  }

  pan(share) {
    const move = (this.end - this.start) * share;
    this.set(this.start + move, this.end + move);
  }
}

/** The first place in an ascending list whose value is at least so much. */
export function firstAt(length, valueAt, least) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) < least) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The next of 1, 2, 5 times a power of ten. */
export function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= least);
}

/** A line with ticks at round times. */
export function drawAxis(context, axis, left, width, y) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  context.textBaseline = "top";
  context.beginPath();
  context.moveTo(left, y + 0.5);
  context.lineTo(left + width, y + 0.5);
  const span = axis.end - axis.start;
  if (!(span > 0)) return;
  const step = roundStep(span / Math.max(2, Math.floor(width / 90)));
  for (let tick = Math.ceil(axis.start / step); tick * step <= axis.end; tick += 1) {
    const x = left + ((tick * step - axis.start) / span) * width;
    context.moveTo(x, y);
    context.lineTo(x, y + 5);
    const label = tick ? time(Number((tick * step).toPrecision(12))) : "0";
    const half = context.measureText(label).width / 2;
    context.fillText(label, Math.min(x, left + width + 8 - half), y + 8); // the last stays inside
  }
  context.stroke();
}

/** Pan by dragging, zoom by wheel with Ctrl, keys for both. */
export function navigable(canvas, axis, area) {
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    from = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from === null) return;
    axis.pan((from - event.clientX) / area().width);
    from = event.clientX;
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => { from = null; });
  }
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const { left, width } = area();
    axis.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.offsetX - left) / width);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const moves = {
      ArrowLeft: () => axis.pan(-0.1),
      ArrowRight: () => axis.pan(0.1),
      "+": () => axis.zoom(0.8),
      "=": () => axis.zoom(0.8),
      "-": () => axis.zoom(1.25),
      0: () => axis.set(0, axis.length),
    };
    if (event.ctrlKey || event.metaKey || !moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  });
}
