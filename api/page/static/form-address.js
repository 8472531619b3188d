// What the form of a new plan says, in the address of its page.
import { put, textOf } from "./fields.js";

/** Parameters and the fields that they are of, in an order in which they can be filled. */
const FIELDS = {
  source: "source", family: "family", preset: "preset", costs: "costs", size: "size", length: "length", as: "as",
  profile_id: "profile-id", devices: "cluster",
  m: "microbatches", schedule: "schedule", objective: "objective", recompute: "recompute", replicas: "replicas",
  cut_at: "cut_at", regular: "regular", robust: "robust",
};
const CONFIG = "config.";
const CLUSTER = "cluster.";

/** What a field says before anybody has touched it. */
const usualOf = (input) => input.type === "checkbox" ? String(input.defaultChecked) : ([...input.options ?? []].find((option) => option.defaultSelected) ?? input.options?.[0])?.value ?? input.defaultValue ?? "";

export class FormAddress {
  /** follow: by parameter, what shows the fields that depend on it. */
  constructor(address, find, follow, cluster) {
    Object.assign(this, { address, find, follow, cluster });
    this.usual = Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, usualOf(find(id))]));
    this.isReading = false;
  }

  /** Fills the form; what does not fit is left as usual and told by the address. */
  async read() {
    const { address } = this;
    this.isReading = true;
    if (address.get("profile_id") && !address.get("source")) address.set({ source: "profile_id" });
    for (const [name, id] of Object.entries(FIELDS)) {
      const text = address.get(name);
      if (text === null) continue;
      const input = this.find(id);
      if (!put(input, text)) {
        put(input, this.usual[name]);
        address.refuse([name], this.usual[name] || "none");
      }
      this.follow[name]?.();
    }
    for (const [name, text] of this.under(CONFIG)) {
      const input = this.config().find((one) => one.name === name);
      if (!input) address.refuse([CONFIG + name], "the usual configuration");
      else if (!put(input, text)) {
        put(input, input.dataset.usual);
        address.refuse([CONFIG + name], input.dataset.usual);
      }
    }
    if (this.under(CONFIG).length) this.find("config").closest("details").open = true;
    const edits = this.under(CLUSTER);
    const unknown = edits.length ? await this.cluster.restore(Object.fromEntries(edits)) : [];
    for (const name of unknown) address.refuse([CLUSTER + name], this.find("cluster").value);
    this.isReading = false;
  }

  /** Keeps what the form says now. */
  write() {
    if (this.isReading) return;
    const changes = {};
    for (const prefix of [CONFIG, CLUSTER]) {
      for (const [name] of this.under(prefix)) changes[prefix + name] = null;
    }
    for (const [name, id] of Object.entries(FIELDS)) {
      const text = textOf(this.find(id));
      changes[name] = text === this.usual[name] ? null : text;
    }
    for (const input of this.config()) {
      if (textOf(input) !== input.dataset.usual) changes[CONFIG + input.name] = textOf(input);
    }
    for (const [name, text] of Object.entries(this.cluster.edits)) changes[CLUSTER + name] = text;
    this.address.set(changes);
  }

  config() {
    return [...this.find("config").querySelectorAll("[name]")];
  }

  /** The parameters whose names begin so, without that beginning. */
  under(prefix) {
    return [...this.address.values].filter(([name]) => name.startsWith(prefix)).map(([name, text]) => [name.slice(prefix.length), text]);
  }
}
