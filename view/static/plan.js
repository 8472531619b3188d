// The plan page: draws what is in the data block, and prices changes where there is a server.
import { Address, keepOpen } from "./address.js";
import { at, make, settled } from "./dom.js";
import { bytes, shown, time, visible } from "./format.js";
import { sortable } from "./table.js";
import { Axis } from "./chart.js";
import { Gantt } from "./gantt.js";
import { Memory } from "./memory.js";
import { Bars } from "./bars.js";
import { Graph } from "./graph.js";
import { showMeshes } from "./meshes.js";
import { markScrolling } from "./scrolling.js";
import { showMeasured } from "./measured.js";

/** A row of the layer table for each layer. */
function layerRows(view) {
  const { layers } = view;
  return layers.names.map((name, index) => ({
    index,
    name,
    stage: layers.stages[index],
    type: layers.types[index] ?? "",
    forward: layers.forward_s[index],
    backward: layers.backward_s[index],
    parameters: layers.parameter_bytes[index],
    saved: layers.saved_bytes[index],
    cut: layers.cut_bytes[index],
    reason: layers.cut_reasons[index] ?? "",
  }));
}

function layerColumns(known) {
  const column = (title, key, form = String) => ({ key, title, value: (row) => row[key], text: (row) => form(row[key]) });
  const first = [column("layer", "index"), { ...column("name", "name", visible), isName: true }, column("stage", "stage")];
  if (!known) return first;
  return [
    ...first, column("type", "type", visible), column("forward", "forward", time), column("backward", "backward", time),
    column("weights", "parameters", bytes), column("saved", "saved", bytes),
    { key: "cut", title: "a cut behind it sends, both ways", value: (row) => (row.reason ? -1 : row.cut),
      text: (row) => (row.reason ? `none: ${visible(row.reason)}` : bytes(row.cut)) },
  ];
}

/** Writes values into the elements that name them. */
export function fill(root, view, ghost) {
  for (const element of root.querySelectorAll("[data-value]")) {
    const text = shown(at(view, element.dataset.value), element.dataset.form);
    if (element.textContent === text) continue; // most stay as they are, and need no new layout
    element.textContent = text;
    if (element.dataset.form === "name") element.title = text;
  }
  for (const element of root.querySelectorAll("[data-ghost]")) {
    const before = ghost ? shown(at(ghost, element.dataset.ghost), element.dataset.form) : "";
    const now = shown(at(view, element.dataset.ghost), element.dataset.form);
    element.textContent = ghost && before !== now ? `was ${before}` : "";
  }
  for (const element of root.querySelectorAll("[data-devices]")) {
    const { devices } = view.stages[element.dataset.devices];
    element.textContent = visible(devices.length < 3 ? devices.join(", ") : `${devices[0]} … ${devices.at(-1)}`);
  }
  for (const element of root.querySelectorAll("[data-of-stored]")) element.hidden = !ghost;
  for (const element of root.querySelectorAll("[data-list]")) {
    element.replaceChildren(...at(view, element.dataset.list).map((line) => {
      const item = document.createElement("li");
      item.textContent = visible(line);
      return item;
    }));
  }
}

/** The table of devices: other schedules may put several stages on one. */
function laneRows({ lanes, boxes }) {
  const held = (rank, name) => make("td", {}, make("span", { "data-value": `lanes.${rank}.${name}`, "data-form": "bytes" }, shown(lanes[rank][name], "bytes")));
  const busy = (lane, rank) => (boxes ? make("span", { "data-value": `lanes.${rank}.busy_s`, "data-form": "time" }, time(lane.busy_s))
    : "not simulated");
  document.querySelector("#lanes tbody").replaceChildren(...lanes.map((lane, rank) => make("tr", {},
    make("th", { scope: "row" }, ...lane.stages.slice(0, 4).map((stage) => make("span", { class: `dot hue-${stage % 8}` })), String(rank)),
    make("td", {}, visible(lane.device)), make("td", {}, lane.stages.join(", ")),
    held(rank, "memory_bytes"), held(rank, "memory_limit_bytes"), make("td", {}, busy(lane, rank)))));
}

/** The charts and tables of one plan, and what shows another in their place. */
export class PlanPage {
  /** moved(balance) is called while a cut moves; without it cuts stand still. */
  constructor(view, address, moved) {
    this.stored = view;
    this.shown = view;
    this.cuts = null;
    this.address = address;
    this.lanes = view.lanes;
    this.axis = new Axis(view.header.step_time_s);
    const find = (id) => document.getElementById(id);
    this.bars = new Bars(find("bars"), view, moved);
    this.gantt = new Gantt(find("gantt"), view, this.axis);
    this.memory = new Memory(find("memory"), view, this.axis);
    const known = view.layers.forward_s.length > 0;
    this.table = sortable(find("layers"), find("more"), layerColumns(known), layerRows(view), address, "sort");
    this.graph = new Graph(find("graph"), view, address);
    showMeshes(find("meshes"), view);
    keepOpen(address);
    for (const table of document.querySelectorAll(".scroll:not(#graph)")) markScrolling(table);
    this.inTable = view.balance.join();
    this.measured = null;
    const redraw = () => { this.bars.draw(); this.drawStep(); };
    this.seen = this.axis.seen;
    this.axis.onchange(() => { if (this.axis.seen !== this.seen) this.drawStep(); });
    find("measured-file").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (file) this.measured = await showMeasured(file, this.stored, this.axis, find("measured"));
    });
    new ResizeObserver(settled(50, redraw)).observe(document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  drawStep() {
    for (const chart of [this.gantt, this.memory, this.measured]) chart?.draw();
    this.seen = this.axis.seen;
  }

  /** Shows the part of the step that the address names: once the step of its changes is known. */
  zoom() {
    this.axis.keep(this.address);
  }

  /**
   * Shows a plan; the stored one stands behind it unless it is the same.
   * balance: where the cuts are, if they have been moved on since.
   */
  show(view, balance = null) {
    const ghost = view === this.stored ? null : this.stored;
    this.axis.resize(Math.max(view.header.step_time_s, ghost?.header.step_time_s ?? 0));
    this.lanes = view.lanes;
    laneRows(view);
    this.showNumbers(view, balance);
    this.gantt.show(view, ghost);
    this.memory.show(view, ghost);
    this.measured?.draw();
    this.seen = this.axis.seen;
    this.shown = view;
    this.cuts = balance;
  }

  /** Takes the stored plan with its step, which was still to come. */
  complete(view) {
    const shown = this.shown === this.stored ? view : this.shown;
    this.stored = view;
    if (shown) this.show(shown, this.cuts);
  }

  /** Everything but the step, which takes longer to simulate. */
  showNumbers(view, balance = null) {
    const ghost = view === this.stored ? null : this.stored;
    this.shown = null;
    this.bars.show(balance ?? view.balance, ghost?.balance);
    this.showStages(view.balance);
    showMeshes(document.getElementById("meshes"), view);
    fill(document, { ...view, lanes: this.lanes }, ghost);
  }

  /** The layers' stages in their table, unless they are as they were. */
  showStages(balance) {
    if (balance.join() === this.inTable) return;
    this.inTable = balance.join();
    const stages = balance.flatMap((count, stage) => Array(count).fill(stage));
    this.table.update(layerRows({ layers: { ...this.stored.layers, stages } }));
  }
}

const block = document.getElementById("view");
/** The page of the plan in this document, if there is one; a live page takes it from here. */
export const storedView = block ? JSON.parse(block.textContent) : null;
if (storedView && !document.body.dataset.plan) {
  const address = new Address("hash");
  new PlanPage(storedView, address, null).zoom();
  document.getElementById("message").textContent = address.refused.join(" ");
}
