// What a view shows stands in its address: it can be sent, loaded again and gone back to.
import { paced } from "./dom.js";

const WAIT_MS = 100; // browsers ignore who writes more than some times a second

/** Parameters behind "?" on pages of a server, behind "#" in a file. */
export class Address {
  constructor(part = "search") {
    this.part = part;
    this.values = new URLSearchParams(location[part].slice(1));
    this.refused = [];
    this.write = paced(WAIT_MS, () => history.replaceState(null, "", this.text()));
  }

  /** The text of a parameter; `null` if it is not there. */
  get(name) {
    return this.values.get(name);
  }

  /** Sets some, and leaves out those that are `null`. */
  set(changes) {
    const before = this.values.toString();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null) this.values.delete(name);
      else this.values.set(name, value);
    }
    if (this.values.toString() !== before) this.write();
  }

  /** Notes that parameters say what cannot be, and what is shown instead; they are left out. */
  refuse(names, shown) {
    const given = names.filter((name) => this.values.has(name)).map((name) => `${name}=${this.values.get(name)}`);
    this.refused.push(`${given.join("&")} is not possible here; ${shown} is shown.`);
    this.set(Object.fromEntries(names.map((name) => [name, null])));
  }

  text() {
    const values = this.values.toString().replaceAll("%2C", ",");
    if (this.part === "search") return `${location.pathname}${values && `?${values}`}${location.hash}`;
    return `${location.pathname}${location.search}${values && `#${values}`}`;
  }
}

/** Which of a page's details are open stands in its address, too, by their names. */
export function keepOpen(address) {
  const all = [...document.querySelectorAll("details[id]")];
  const wanted = address.get("open")?.split(",") ?? [];
  if (wanted.some((name) => !all.some((one) => one.id === name))) address.refuse(["open"], "nothing unfolded");
  for (const one of all) {
    one.open = address.get("open") !== null && wanted.includes(one.id);
    one.addEventListener("toggle", () => {
      address.set({ open: all.filter((each) => each.open).map((each) => each.id).join(",") || null });
    });
  }
}
