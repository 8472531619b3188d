// Several plans' steps on one time axis.
import { ask } from "./api.js";
import { Axis } from "./chart.js";
import { Gantt } from "./gantt.js";

const boxes = [...document.querySelectorAll("[data-view]")];
const views = await Promise.all(boxes.map(async (box) => (await ask(box.dataset.view))[0]));
const axis = new Axis(Math.max(...views.map((view) => view.header.step_time_s), 1e-9));
const charts = views.map((view, index) => new Gantt(boxes[index], view, axis));
const draw = () => charts.forEach((chart) => chart.draw());
axis.onchange(draw);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.body.dataset.drawn = String(charts.length);
