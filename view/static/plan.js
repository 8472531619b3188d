// The plan page: draws what is in the data block, and prices changes where there is a server.
import { at, make, settled } from "./dom.js";
import { bytes, shown, time } from "./format.js";
import { sortable } from "./table.js";
import { Axis } from "./chart.js";
import { Gantt } from "./gantt.js";
import { Memory } from "./memory.js";
import { Bars } from "./bars.js";
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
  const plain = (title, name) => ({ title, value: (row) => row[name], text: (row) => String(row[name]) });
  const quantity = (title, name, form) => ({ title, value: (row) => row[name], text: (row) => form(row[name]) });
  const first = [plain("layer", "index"), plain("name", "name"), plain("stage", "stage")];
  if (!known) return first;
  return [
    ...first, plain("type", "type"), quantity("forward", "forward", time),
    quantity("backward", "backward", time), quantity("weights", "parameters", bytes),
    quantity("saved", "saved", bytes),
    { title: "a cut behind it sends", value: (row) => (row.reason ? -1 : row.cut),
      text: (row) => (row.reason ? `none: ${row.reason}` : bytes(row.cut)) },
  ];
}

/** Writes values into the elements that name them. */
export function fill(root, view, ghost) {
  for (const element of root.querySelectorAll("[data-value]")) {
    element.textContent = shown(at(view, element.dataset.value), element.dataset.form);
  }
  for (const element of root.querySelectorAll("[data-ghost]")) {
    const before = ghost ? shown(at(ghost, element.dataset.ghost), element.dataset.form) : "";
    const now = shown(at(view, element.dataset.ghost), element.dataset.form);
    element.textContent = ghost && before !== now ? `was ${before}` : "";
  }
  for (const element of root.querySelectorAll("[data-devices]")) {
    const { devices } = view.stages[element.dataset.devices];
    element.textContent = devices.length < 3 ? devices.join(", ") : `${devices[0]} … ${devices.at(-1)}`;
  }
  for (const element of root.querySelectorAll("[data-of-stored]")) element.hidden = !ghost;
  for (const element of root.querySelectorAll("[data-list]")) {
    element.replaceChildren(...at(view, element.dataset.list).map((line) => {
      const item = document.createElement("li");
      item.textContent = line;
      return item;
    }));
  }
}

/** The table of devices: other schedules may put several stages on one. */
function laneRows(lanes) {
  document.querySelector("#lanes tbody").replaceChildren(...lanes.map((lane, rank) => make("tr", {},
    make("th", { scope: "row" }, String(rank)), make("td", {}, lane.device), make("td", {}, lane.stages.join(", ")),
    make("td", {}, make("span", { "data-value": `lanes.${rank}.busy_s`, "data-form": "time" }, time(lane.busy_s))))));
}

/** The charts and tables of one plan, and what shows another in their place. */
export class PlanPage {
  constructor(view, moved) {
    this.stored = view;
    this.lanes = view.lanes;
    this.axis = new Axis(view.header.step_time_s);
    const find = (id) => document.getElementById(id);
    this.bars = new Bars(find("bars"), view, moved);
    this.gantt = new Gantt(find("gantt"), view, this.axis);
    this.memory = new Memory(find("memory"), view, this.axis);
    const known = view.layers.forward_s.length > 0;
    this.table = sortable(find("layers"), find("more"), layerColumns(known), layerRows(view));
    this.measured = null;
    const drawStep = () => { this.gantt.draw(); this.memory.draw(); this.measured?.draw(); };
    const redraw = () => { this.bars.draw(); drawStep(); };
    this.axis.onchange(drawStep);
    find("measured-file").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (file) this.measured = await showMeasured(file, this.stored, this.axis, find("measured"));
    });
    new ResizeObserver(settled(50, redraw)).observe(document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  /** Shows a plan; the stored one stands behind it unless it is the same. */
  show(view) {
    const ghost = view === this.stored ? null : this.stored;
    this.axis.resize(Math.max(view.header.step_time_s, ghost?.header.step_time_s ?? 0));
    this.showNumbers(view);
    this.gantt.show(view, ghost);
    this.memory.show(view, ghost);
    this.lanes = view.lanes;
    laneRows(view.lanes);
    fill(document, view, ghost);
  }

  /** Everything but the step, which takes longer to simulate. */
  showNumbers(view) {
    const ghost = view === this.stored ? null : this.stored;
    this.bars.show(view.balance, ghost?.balance);
    const stages = view.balance.flatMap((count, stage) => Array(count).fill(stage));
    const layers = { ...this.stored.layers, stages };
    this.table.update(layerRows({ layers }));
    fill(document, { ...view, lanes: this.lanes }, ghost);
  }
}

const block = document.getElementById("view");
/** The page of the plan in this document, if there is one; a live page takes it from here. */
export const storedView = block ? JSON.parse(block.textContent) : null;
if (storedView && !document.body.dataset.plan) new PlanPage(storedView, null);
