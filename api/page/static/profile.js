// What each layer of a profile costs.
import { data, say } from "./api.js";
import { Address } from "./address.js";
import { Bars } from "./bars.js";
import { make } from "./dom.js";
import { bytes, percent, time, visible } from "./format.js";
import { sortable } from "./table.js";

const layers = data("profile");
const bars = new Bars(document.getElementById("bars"), { layers, balance: [layers.names.length] }, null);
bars.legend.replaceChildren(make("li", {}, "forward and backward of one micro-batch")); // a profile has no stages
const rows = layers.names.map((name, index) => index);
const column = (title, values, form = String, key = title) => ({ key, title, value: (row) => values[row], text: (row) => form(values[row]) });
const address = new Address();
sortable(document.getElementById("layers"), document.getElementById("more"), [
  { key: "layer", title: "layer", value: (row) => row, text: String },
  { ...column("name", layers.names, visible), isName: true }, column("type", layers.types), column("forward", layers.forward_s, time),
  column("backward", layers.backward_s, time), column("spread", layers.spread_s, time),
  column("weights", layers.parameter_bytes, bytes), column("saved", layers.saved_bytes, bytes),
], rows, address, "sort");
if (document.getElementById("changes")) showChanges(data("changes"));

/** The rows of `stagewright diff`; the last is the sum of all layers. */
function showChanges(changes) {
  const marks = { true: " *", false: "", null: " ?" };
  const change = (row) => {
    const share = changes.relative[row];
    if (share === null) return "new";
    if (share === 0) return "same";
    return `${share > 0 ? "+" : ""}${percent(share)}${marks[changes.significant[row]]}`;
  };
  sortable(document.getElementById("diff"), document.getElementById("diff-more"), [
    { key: "layer", title: "layer", value: (row) => row, text: (row) => visible(changes.names[row]), isName: true },
    column("forward before", changes.forward_before_s, time), column("after", changes.forward_after_s, time, "forward after"),
    column("backward before", changes.backward_before_s, time), column("after", changes.backward_after_s, time, "backward after"),
    { key: "both", title: "both", value: (row) => changes.relative[row] ?? Infinity, text: change },
  ], changes.names.map((name, row) => row), address, "diff");
}
say(address.refused.join(" "));
addEventListener("resize", () => bars.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => bars.draw());
