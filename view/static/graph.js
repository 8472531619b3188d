// The model as a tree, a column a stage: boxes open into what they are made of, and close again.
import { make } from "./dom.js";
import { bytes, time, visible } from "./format.js";
import { Modules } from "./modules.js";
import { drawEdges } from "./graph-edges.js";
import { markScrolling } from "./scrolling.js";

const NUM_HUES = 8;
const TO = " … "; // between the names of the first and the last of many neighbours
const counted = (count) => `${count} layer${count === 1 ? "" : "s"}`;

export class Graph {
  constructor(parent, view, address) {
    this.view = view;
    this.address = address;
    this.modules = new Modules(view);
    this.toggled = this.rowsOf(address); // rows that are not as the view has them: open or closed
    this.parent = parent;
    this.boxes = new WeakMap(); // of each item of the tree what it stands for
    this.edges = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.edges.setAttribute("class", "edges");
    this.edges.setAttribute("aria-hidden", "true");
    this.tree = make("div", { class: "columns", role: "tree", "aria-label": "The model, a column a stage" });
    let first = 0;
    view.balance.forEach((count, stage) => {
      this.tree.append(this.column(stage, first, count));
      first += count;
    });
    this.told = make("p", { class: "told" });
    parent.replaceChildren(this.tree);
    this.tree.append(this.edges);
    parent.after(this.told);
    this.current = this.tree.querySelector("[role=treeitem]");
    this.current.tabIndex = 0;
    this.tree.addEventListener("click", (event) => this.click(event));
    this.tree.addEventListener("keydown", (event) => this.key(event));
    this.tree.addEventListener("focusin", (event) => this.become(event.target));
    markScrolling(parent, () => this.tell());
    this.draw();
  }

  /** The rows that the address names. */
  rowsOf(address) {
    const text = address.get("boxes");
    const rows = text === null ? [] : text.split(",").map((one) => (/^\d+$/.test(one) ? Number(one) : -1));
    if (rows.every((row) => row >= 0 && row < this.view.graph.names.length)) return new Set(rows);
    address.refuse(["boxes"], "the model as it folds by itself");
    return new Set();
  }

  column(stage, first, count) {
    const words = `stage ${stage}, ${counted(count)}`;
    const parts = make("div", { class: "parts", role: "group" },
      ...this.modules.between(-1, first, first + count).map((box) => this.item(box, "")));
    return make("div", { class: `column hue-${stage % NUM_HUES}`, role: "treeitem", "aria-label": words, tabindex: -1 },
      make("p", { class: "heading" }, words), parts);
  }

  /** A box; what opens is a module's, its path without that of the module it is in. */
  item(box, inside) {
    const facts = box.row < 0 && box.time !== undefined ? [] : [counted(box.count)];
    if (box.time !== undefined) facts.push(time(box.time));
    if (box.weights) facts.push(bytes(box.weights));
    const name = visible(box.name);
    const short = box.name.split(TO).map((one) => (inside && one.startsWith(`${inside}.`) ? one.slice(inside.length + 1) : one)).join(TO);
    const head = make("div", { class: "head", title: name },
      make("span", { class: "name" }, visible(short)), make("span", { class: "costs" }, facts.join(", ")));
    const item = make("div", {
      class: box.repeats > 1 ? "box stack" : "box", role: "treeitem", tabindex: -1,
      "aria-label": [name, ...facts].join(", "), "aria-expanded": box.row < 0 ? null : "false",
    }, head);
    this.boxes.set(item, { ...box, inside });
    if (box.isOpen !== this.toggled.has(box.row)) this.open(item);
    return item;
  }

  /** The boxes in one are made when it opens and gone when it closes. */
  open(item) {
    const box = this.boxes.get(item);
    const isModule = box.repeats === 1 && !box.name.includes(TO);
    const inside = isModule ? box.name : box.inside;
    item.append(make("div", { class: "parts", role: "group" },
      ...this.modules.within(box.row).map((part) => this.item(part, inside))));
    item.setAttribute("aria-expanded", "true");
  }

  close(item) {
    item.lastElementChild.remove();
    item.setAttribute("aria-expanded", "false");
  }

  toggle(item) {
    if (item.ariaExpanded === null) return;
    if (item.ariaExpanded === "true") this.close(item);
    else this.open(item);
    const { row } = this.boxes.get(item);
    if (!this.toggled.delete(row)) this.toggled.add(row);
    this.address.set({ boxes: [...this.toggled].sort((a, b) => a - b).join(",") || null });
    this.focus(item);
    this.draw();
  }

  click(event) {
    const item = event.target.closest(".head")?.parentElement;
    if (item) this.toggle(item);
  }

  /** As trees are moved through; see the ARIA Authoring Practices, "Tree View". */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const item = event.target.closest("[role=treeitem]");
    const inner = item.querySelector("[role=treeitem]");
    const outer = item.parentElement.closest("[role=treeitem]");
    const all = [...this.tree.querySelectorAll("[role=treeitem]")];
    const place = all.indexOf(item);
    const isClosed = item.ariaExpanded === "false";
    const isOpened = item.ariaExpanded === "true";
    const moves = {
      Enter: () => this.toggle(item),
      " ": () => this.toggle(item),
      ArrowRight: () => (isClosed ? this.toggle(item) : this.focus(inner)),
      ArrowLeft: () => (isOpened ? this.toggle(item) : this.focus(outer)),
      ArrowDown: () => this.focus(all[place + 1]),
      ArrowUp: () => this.focus(all[place - 1]),
      Home: () => this.focus(all[0]),
      End: () => this.focus(all.at(-1)),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  focus(item) {
    item?.focus();
    item?.firstElementChild.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** One box of the tree is reached by Tab, the others by arrows. */
  become(item) {
    if (item === this.current) return;
    this.current.tabIndex = -1;
    item.tabIndex = 0;
    this.current = item;
  }

  draw() {
    this.undrawn = drawEdges(this.edges, this.tree, this.boxes, this.view);
    this.tell();
  }

  /** Which stages are in sight, where not all are, and lines that are not drawn. */
  tell() {
    const place = this.parent.getBoundingClientRect();
    const columns = [...this.tree.querySelectorAll(".column")];
    const seen = columns.map((column) => column.getBoundingClientRect())
      .flatMap((box, stage) => (box.right > place.left + 20 && box.left < place.right - 20 ? [stage] : []));
    const sight = seen.length === columns.length || !seen.length ? ""
      : `${seen.length > 1 ? "Stages" : "Stage"} ${seen.length > 1 ? `${seen[0]} to ` : ""}${seen.at(-1)} of ${columns.length} in view; scroll sideways for the others.`;
    const lines = this.undrawn ? ` Of the lines past boxes ${this.undrawn} more are not drawn.` : "";
    this.told.textContent = (sight + lines).trim();
  }
}
