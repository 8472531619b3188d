// The devices of a request: shorthand, or what it stands for with numbers of one's own.
import { ask } from "./api.js";
import { make, settled } from "./dom.js";
import { put, textOf } from "./fields.js";

const GIB = 2 ** 30;
const REST_MS = 400; // while somebody is typing

/** Whether these are counts alone, to be followed by what is counted. */
export const isUnfinished = (devices) => /^(\d+x)*\d*$/.test(devices);

/** At most six digits of a number, as people read it. */
const brief = (value) => Number(value.toPrecision(6));

/** A field for a number in a unit people know; changed() is told, of an empty one what that means. */
function number(key, label, value, whenEmpty, changed) {
  const input = make("input", { type: "number", min: 0, step: "any", placeholder: whenEmpty ?? "no limit", "data-edit": key });
  input.value = value ?? "";
  input.addEventListener("input", () => changed(input.value === "" ? whenEmpty : Number(input.value)));
  return make("label", {}, label, input);
}

/** Returns a level with all its bandwidths multiplied by a factor. */
export function scaleLevel(level, factor) {
  const { all_reduce_bandwidth_bytes_per_s: summed, all_reduce: figures } = level;
  const scaled = {
    ...level,
    bandwidth_bytes_per_s: level.bandwidth_bytes_per_s * factor,
    all_reduce_bandwidth_bytes_per_s: summed === null ? null : summed * factor,
  };
  if (!figures) return scaled;
  const bandwidth = figures.bandwidth.map(([devices, rate]) => [devices, rate * factor]);
  return { ...scaled, all_reduce: { ...figures, bandwidth } };
}

/** Fields for a cluster; each change is written into it and told. Empty ones are as they were. */
function fields(cluster, changed) {
  const kinds = Map.groupBy(cluster.devices, (device) => device.kind);
  const ofKinds = [...kinds].map(([kind, devices]) => {
    const [{ memory_bytes: memory, speed }] = devices;
    return make("fieldset", { class: "columns" }, make("legend", {}, `${devices.length} × ${kind}`),
      number(`memory.${kind}`, "memory, GiB", memory === null ? null : brief(memory / GIB), null, (value) => {
        for (const device of devices) device.memory_bytes = value === null ? null : Math.round(value * GIB);
        changed();
      }),
      number(`speed.${kind}`, "speed, times the profiled device", speed, speed, (value) => {
        for (const device of devices) device.speed = value;
        changed();
      }));
  });
  const ofLevels = cluster.levels.map((level) => {
    const given = { ...level };
    const [bandwidth, latency] = [level.bandwidth_bytes_per_s / 1e9, brief(level.latency_s * 1e6)];
    const among = level.group_size ? `${level.group_size} devices` : `the devices of one ${level.name}`;
    return make("fieldset", { class: "columns" }, make("legend", {}, `Links among ${among}`),
      number(`bandwidth.${keyOf(level)}`, "bandwidth, GB/s each way", bandwidth, bandwidth, (value) => {
        const rate = value * 1e9;
        const { latency_s, shared } = level;
        const scaled = scaleLevel(given, rate / given.bandwidth_bytes_per_s);
        Object.assign(level, scaled, { bandwidth_bytes_per_s: rate, latency_s, shared });
        changed();
      }),
      number(`latency.${keyOf(level)}`, "latency of messages, µs", latency, latency, (value) => {
        level.latency_s = value / 1e6;
        changed();
      }),
      sharedBox(level, changed));
  });
  return [...ofKinds, ...ofLevels];
}

function keyOf(level) {
  return level.group_size ?? level.name;
}

function sharedBox(level, changed) {
  const box = make("input", { type: "checkbox", "data-edit": `shared.${keyOf(level)}` });
  box.checked = level.shared;
  box.addEventListener("input", () => { level.shared = box.checked; changed(); });
  return make("label", { class: "inline" }, box, "one connection for a whole group");
}

/** What is planned for: the text of a field, until numbers are changed below it. */
export class ClusterEditor {
  constructor(text, place) {
    this.text = text;
    this.place = place;
    this.edited = null;
    this.edits = {};
    const rested = settled(REST_MS, () => this.open());
    text.addEventListener("input", () => {
      this.edited = null;
      this.edits = {};
      this.place.inert = true; // its fields are of what was there before
      rested();
    });
    place.addEventListener("input", ({ target }) => { this.edits[target.dataset.edit] = textOf(target); });
    place.closest("details").addEventListener("toggle", () => this.open());
  }

  value() {
    return this.edited ?? this.text.value.trim();
  }

  /** Writes edits into the fields again; gives the names of those that cannot be. */
  async restore(edits) {
    this.place.closest("details").open = true;
    await this.open();
    return Object.entries(edits).filter(([key, value]) => {
      const input = [...this.place.querySelectorAll("[data-edit]")].find((one) => one.dataset.edit === key);
      if (!input) return true;
      if (!put(input, value)) return true;
      input.dispatchEvent(new Event("input", { bubbles: true }));
      return false;
    }).map(([key]) => key);
  }

  async open() {
    if (!this.place.closest("details").open || this.edited) return;
    const wanted = this.text.value.trim();
    this.place.inert = false;
    if (isUnfinished(wanted)) {
      this.place.replaceChildren(make("p", { class: "hint" }, "Write devices as in 4x24GB."));
      return;
    }
    try {
      const [cluster] = await ask(`/v1/clusters?devices=${encodeURIComponent(wanted)}`);
      if (wanted !== this.text.value.trim() || this.edited) return;
      this.place.replaceChildren(...fields(cluster, () => { this.edited = cluster; }));
    } catch (error) {
      this.place.replaceChildren(make("p", { class: "hint" }, error.message));
    }
  }
}
