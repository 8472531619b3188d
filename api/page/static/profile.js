// What each layer of a profile costs.
import { data } from "./api.js";
import { Bars } from "./bars.js";
import { bytes, time } from "./format.js";
import { sortable } from "./table.js";

const layers = data("profile");
const bars = new Bars(document.getElementById("bars"), { layers, balance: [layers.names.length] }, null);
const rows = layers.names.map((name, index) => index);
const column = (title, values, form = String) => ({ title, value: (row) => values[row], text: (row) => form(values[row]) });
sortable(document.getElementById("layers"), document.getElementById("more"), [
  { title: "layer", value: (row) => row, text: String },
  column("name", layers.names), column("type", layers.types), column("forward", layers.forward_s, time),
  column("backward", layers.backward_s, time), column("spread", layers.spread_s, time),
  column("weights", layers.parameter_bytes, bytes), column("saved", layers.saved_bytes, bytes),
], rows);
addEventListener("resize", () => bars.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => bars.draw());
