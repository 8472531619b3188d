// What "What if" is set to: sliders and lists, where they may stand, and the request that means.
import { scaleLevel } from "./cluster.js";

/** The one of ascending numbers that is nearest. */
function nearest(numbers, wanted) {
  return numbers.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
}

export class Controls {
  /** changed() is called after each change that somebody makes. */
  constructor(find, request, view, changed) {
    this.find = find;
    this.request = request;
    this.stored = request.options;
    const names = ["schedule", "m", "link", "share", "recompute"];
    this.inputs = Object.fromEntries(names.map((name) => [name, find(name)]));
    this.started = {
      schedule: this.stored.schedule,
      m: String(view.header.num_microbatches),
      link: "0",
      share: String(Math.round(this.stored.memory_fraction * 100)),
      recompute: this.stored.recompute,
    };
    this.disable(view);
    this.reset();
    for (const [name, input] of Object.entries(this.inputs)) {
      input.addEventListener("input", () => {
        this.settle(name);
        changed();
      });
    }
    const isHeld = (event) => { this.isHeld = event.type === "pointerdown"; };
    for (const type of ["pointerdown", "pointerup", "pointercancel"]) this.inputs.m.addEventListener(type, isHeld);
  }

  /** Closes what has no answer for this plan. */
  disable(view) {
    const { m, link, share, schedule } = this.inputs;
    m.disabled = this.stored.batch_size !== null;
    link.disabled = !this.request.cluster || this.request.cluster.levels.length === 0;
    share.disabled = view.stages.every((stage) => stage.memory_limit_bytes === null);
    share.min = Math.min(Number(share.min), Number(this.started.share));
    for (const option of schedule.options) {
      const { refusal } = this.request.choices[option.value];
      option.disabled = refusal !== "" && option.value !== this.started.schedule;
      option.title = refusal;
    }
  }

  /** Where the stored plan has them. */
  reset() {
    this.set(this.started);
  }

  /** Sets all at once; the schedule first, which says where the others may stand. */
  set(values) {
    this.inputs.schedule.value = values.schedule;
    this.bound();
    for (const [name, input] of Object.entries(this.inputs)) input.value = values[name];
    this.chosen = Number(this.inputs.m.value);
    this.moved = [];
    this.tell();
  }

  /** The ends of the slider of micro-batches. */
  bound() {
    this.inputs.m.min = this.choice.least;
    this.inputs.m.max = this.choice.most;
  }

  get choice() {
    return this.request.choices[this.inputs.schedule.value];
  }

  /** Moves the micro-batches on to a number that the schedule takes. */
  settle(name) {
    const { m, schedule } = this.inputs;
    const { counts } = this.choice;
    this.bound();
    const wanted = Number(m.value);
    const found = counts ? this.next(counts, name === "m" && !this.isHeld ? Math.sign(wanted - this.chosen) : 0) : wanted;
    this.moved = name === "m" || found === this.chosen ? []
      : [`The ${schedule.value} schedule cannot run ${this.chosen} micro-batches here; showing ${found}.`];
    if (found !== wanted) m.value = found;
    this.chosen = found;
    this.tell();
  }

  /** The nearest of some counts; a key moves on in its direction, however far the next one is. */
  next(counts, direction) {
    const found = nearest(counts, Number(this.inputs.m.value));
    const ahead = counts.filter((count) => (count - this.chosen) * direction > 0);
    return direction && found === this.chosen && ahead.length ? nearest(ahead, found) : found;
  }

  /** Takes what the address says; what it cannot be is left as it is stored, and told. */
  fromAddress(address) {
    const values = { ...this.started };
    for (const [name, input] of Object.entries(this.inputs)) {
      const text = address.get(name);
      if (text === null) continue;
      const allowed = this.allowed(name, values.schedule);
      const wanted = input.type === "range" && /^-?\d{1,15}$/.test(text) ? Number(text) : text;
      if (allowed.includes(wanted)) values[name] = text;
      else {
        if (typeof wanted === "number" && !input.disabled) values[name] = String(nearest(allowed, wanted));
        address.refuse([name], values[name]);
      }
    }
    this.set(values);
  }

  /** What an input may be, with a schedule. */
  allowed(name, schedule) {
    const input = this.inputs[name];
    if (input.disabled) return [];
    if (input.type !== "range") return [...input.options].filter((option) => !option.disabled).map((option) => option.value);
    const { counts, least, most } = this.request.choices[schedule];
    if (name === "m" && counts) return counts;
    const [first, last] = name === "m" ? [least, most] : [Number(input.min), Number(input.max)];
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
  }

  /** What the address has to say. */
  forAddress() {
    const changed = ([name, input]) => [name, input.value === this.started[name] ? null : input.value];
    return Object.fromEntries(Object.entries(this.inputs).map(changed));
  }

  get isChanged() {
    return Object.entries(this.inputs).some(([name, input]) => input.value !== this.started[name]);
  }

  get factor() {
    return 2 ** Number(this.inputs.link.value);
  }

  tell() {
    const { factor, inputs, find } = this;
    find("m-out").textContent = inputs.m.value;
    find("link-out").textContent = factor === 1 ? "as they are" : factor > 1 ? `${factor} × as fast` : `1/${1 / factor} as fast`;
    find("memory-out").textContent = `${inputs.share.value} %`;
  }

  options() {
    const { stored, inputs, started, choice } = this;
    return {
      ...stored,
      schedule: inputs.schedule.value,
      chunks: choice.chunks,
      max_extra_in_flight: choice.max_extra_in_flight,
      num_microbatches: stored.batch_size === null ? Number(inputs.m.value) : stored.num_microbatches,
      memory_fraction: inputs.share.value === started.share ? stored.memory_fraction : Number(inputs.share.value) / 100,
      recompute: inputs.recompute.value,
    };
  }

  /** The stored cluster, with links as fast as the slider says; `null` if the page has none. */
  cluster() {
    const { cluster } = this.request;
    if (!cluster || this.factor === 1) return cluster;
    const levels = cluster.levels.map((level) => scaleLevel(level, this.factor));
    return { ...cluster, levels };
  }
}
