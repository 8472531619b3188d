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

/** Seconds at a place across a canvas. */
export function secondsAt(axis, area, x) {
  const { left, width } = area;
  return axis.start + (Math.min(Math.max(0, x - left), width) / width) * (axis.end - axis.start);
}

/**
 * Drag selects a part of the step, with Shift it moves; Ctrl and the wheel zoom, Shift and the wheel
 * move; W, A, S, D, plus, minus and arrows do so, too. clicked(event) is told of what was no drag.
 */
export function navigable(canvas, axis, area, clicked = () => {}) {
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    hold(canvas, axis, area, event, clicked);
  });
  canvas.addEventListener("wheel", (event) => {
    const { left, width } = area();
    const across = event.deltaX || (event.shiftKey ? event.deltaY : 0);
    if (!event.ctrlKey && !across) return; // the page scrolls
    event.preventDefault();
    if (event.ctrlKey) axis.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.offsetX - left) / width);
    else axis.pan(across / width);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const [back, on, nearer, further] = [() => axis.pan(-0.1), () => axis.pan(0.1), () => axis.zoom(0.8), () => axis.zoom(1.25)];
    const moves = {
      ArrowLeft: back, a: back, ArrowRight: on, d: on, "+": nearer, "=": nearer, w: nearer, "-": further, s: further,
      0: () => axis.set(0, axis.length),
    };
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (event.ctrlKey || event.metaKey || event.altKey || !moves[key]) return;
    event.preventDefault();
    moves[key]();
  });
}

const LEAST_DRAG = 4;

/** From a press to its release. A finger moves the step; a mouse selects, and moves with Shift. */
function hold(canvas, axis, area, pressed, clicked) {
  const isMove = pressed.shiftKey || pressed.pointerType === "touch";
  const first = pressed.offsetX;
  let last = pressed.clientX;
  const band = document.createElement("div");
  band.className = "selected";
  const held = new AbortController();
  const { signal } = held;
  canvas.setPointerCapture(pressed.pointerId);
  const ends = (x) => [Math.min(first, x), Math.max(first, x)];
  canvas.addEventListener("pointermove", (event) => {
    if (isMove) {
      axis.pan((last - event.clientX) / area().width);
      last = event.clientX;
      return;
    }
    const [from, to] = ends(event.offsetX);
    if (to - from < LEAST_DRAG) return;
    if (!band.isConnected) canvas.parentElement.append(band);
    band.style.left = `${from}px`;
    band.style.width = `${to - from}px`;
    band.textContent = time(secondsAt(axis, area(), to) - secondsAt(axis, area(), from));
  }, { signal });
  const release = (event) => {
    held.abort();
    band.remove();
    if (event.type === "pointercancel" || isMove) return;
    const [from, to] = ends(event.offsetX);
    if (to - from < LEAST_DRAG) clicked(event);
    else axis.set(secondsAt(axis, area(), from), secondsAt(axis, area(), to));
  };
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, release, { signal });
}

/** Squares in the colours of a lane's stages; gives how far they reach. */
export function drawStages(context, stages, x, y) {
  stages.slice(0, 4).forEach((stage, place) => {
    context.fillStyle = colour(`hue-${stage % 8}`);
    context.fillRect(x + place * 7, y - 5, 5, 10);
  });
  return x + Math.min(4, stages.length) * 7 + 3;
}
