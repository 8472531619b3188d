// Several plans' steps on one time axis.
import { Address } from "./address.js";
import { ask, say } from "./api.js";
import { make } from "./dom.js";
import { Axis } from "./chart.js";
import { Gantt } from "./gantt.js";

const boxes = [...document.querySelectorAll("[data-view]")];
const found = await Promise.all(boxes.map(async (box) => {
  try {
    return [box, (await ask(box.dataset.view))[0]];
  } catch (error) {
    box.replaceChildren(make("p", { class: "notice bad" }, error.message));
    return null;
  }
}));
const drawn = found.filter((one) => one !== null);
const views = drawn.map(([, view]) => view);
const axis = new Axis(Math.max(...views.map((view) => view.header.step_time_s), 1e-9));
const charts = views.map((view, index) => new Gantt(drawn[index][0], view, axis));
const draw = () => charts.forEach((chart) => chart.draw());
axis.onchange(draw);
const address = new Address();
if (charts.length) axis.keep(address);
say(address.refused.join(" "));
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.body.dataset.drawn = String(charts.length);
