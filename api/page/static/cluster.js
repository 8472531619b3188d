// The devices of a request: shorthand, or what it stands for with numbers of one's own.
import { ask } from "./api.js";
import { make } from "./dom.js";

const GIB = 2 ** 30;

/** A field for a number in a unit people know; changed() is told. */
function number(label, value, changed, step = "any") {
  const input = make("input", { type: "number", min: 0, step, placeholder: "no limit" });
  input.value = value ?? "";
  input.addEventListener("input", () => changed(input.value === "" ? null : Number(input.value)));
  return make("label", {}, label, input);
}

/** Fields for a cluster; each change is written into it and told. */
function fields(cluster, changed) {
  const kinds = Map.groupBy(cluster.devices, (device) => device.kind);
  const ofKinds = [...kinds].map(([kind, devices]) => make("fieldset", { class: "columns" },
    make("legend", {}, `${devices.length} × ${kind}`),
    number("memory, GiB", devices[0].memory_bytes === null ? null : Number((devices[0].memory_bytes / GIB).toPrecision(6)), (value) => {
      for (const device of devices) device.memory_bytes = value === null ? null : Math.round(value * GIB);
      changed();
    }),
    number("speed, times the profiled device", devices[0].speed, (value) => {
      for (const device of devices) device.speed = value ?? 1;
      changed();
    })));
  const ofLevels = cluster.levels.map((level) => make("fieldset", { class: "columns" },
    make("legend", {}, `Links among ${level.group_size} devices`),
    number("bandwidth, GB/s each way", level.bandwidth_bytes_per_s / 1e9, (value) => {
      level.bandwidth_bytes_per_s = (value ?? 0) * 1e9;
      changed();
    }),
    number("latency, µs", Number((level.latency_s * 1e6).toPrecision(6)), (value) => {
      level.latency_s = (value ?? 0) / 1e6;
      changed();
    }),
    sharedBox(level, changed)));
  return [...ofKinds, ...ofLevels];
}

function sharedBox(level, changed) {
  const box = make("input", { type: "checkbox" });
  box.checked = level.shared;
  box.addEventListener("input", () => { level.shared = box.checked; changed(); });
  return make("label", { class: "inline" }, box, "one connection for a whole group");
}

/** What is planned for: the text of a field, until numbers are changed below it. */
export class ClusterEditor {
  constructor(text, place, changed) {
    this.text = text;
    this.place = place;
    this.changed = changed;
    this.edited = null;
    text.addEventListener("input", () => { this.edited = null; this.open(); });
    place.closest("details").addEventListener("toggle", () => this.open());
  }

  value() {
    return this.edited ?? this.text.value.trim();
  }

  async open() {
    if (!this.place.closest("details").open || this.edited) return;
    const wanted = this.text.value.trim();
    try {
      const [cluster] = await ask(`/v1/clusters?devices=${encodeURIComponent(wanted)}`);
      if (wanted !== this.text.value.trim()) return;
      const changed = () => { this.edited = cluster; this.changed(); };
      this.place.replaceChildren(...fields(cluster, changed));
    } catch (error) {
      this.place.replaceChildren(make("p", { class: "hint" }, error.message));
    }
  }
}
