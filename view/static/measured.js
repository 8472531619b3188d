// A measured step beside the planned one: on the same axis, and stage by stage.
import { make } from "./dom.js";
import { fixed, time } from "./format.js";
import { Gantt } from "./gantt.js";
import { markScrolling } from "./scrolling.js";

const BACKWARD_PARTS = new Set(["B", "I", "W", "R"]);
const NOTICEABLE = 0.1;

/** The middle of some numbers, as Python's statistics.median. */
function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** A timeline's events field by field, as the view has them. */
function boxesOf(timeline) {
  const { events } = timeline;
  return {
    ranks: events.map((event) => event.rank),
    stages: events.map((event) => event.stage),
    kinds: events.map((event) => event.kind),
    microbatches: events.map((event) => event.microbatch),
    start_s: events.map((event) => event.start_s),
    end_s: events.map((event) => event.end_s),
  };
}

/** What each stage was to take and took, a micro-batch: [words, planned, measured]. */
export function compared(view, timeline) {
  const rows = [["step", view.header.step_time_s, timeline.step_time_s]];
  view.stages.forEach((stage, index) => {
    const mine = timeline.events.filter((event) => event.stage === index);
    const forwards = mine.filter((event) => event.kind === "F").map((event) => event.end_s - event.start_s);
    const backwards = new Map();
    for (const event of mine) {
      if (!BACKWARD_PARTS.has(event.kind)) continue;
      const length = event.end_s - event.start_s;
      backwards.set(event.microbatch, (backwards.get(event.microbatch) ?? 0) + length);
    }
    rows.push([`stage ${index} forward`, stage.forward_time_s, forwards.length ? median(forwards) : null]);
    rows.push([`stage ${index} backward`, stage.backward_time_s, backwards.size ? median(backwards.values()) : null]);
  });
  return rows;
}

/** Whether a file's JSON is a step of a plan like this one; says why not. */
function refusal(view, timeline) {
  if (timeline?.schema_version !== "stagewright.timeline/1") {
    return "This is no recorded step. Write one with trace.timeline().write(\"step.json\") after " +
      "'with stagewright.record(pipeline) as trace:'.";
  }
  const stages = new Set(timeline.events.map((event) => event.stage)).size;
  const batches = new Set(timeline.events.map((event) => event.microbatch)).size;
  if (stages !== view.stages.length || batches !== view.header.num_microbatches
    || timeline.num_ranks !== view.lanes.length) {
    return `The step has ${stages} stages, ${batches} micro-batches and ${timeline.num_ranks} ranks; the plan `
      + `${view.stages.length}, ${view.header.num_microbatches} and ${view.lanes.length}. Record a step of this plan.`;
  }
  return "";
}

function table(rows) {
  const cells = rows.map(([words, planned, found]) => {
    const off = found === null || !planned ? null : found / planned - 1;
    const marked = off !== null && Math.abs(off) > NOTICEABLE;
    const text = off === null ? "not seen" : `${off > 0 ? "+" : ""}${fixed(off * 100, 1)} %`;
    return make("tr", marked ? { class: "off" } : {}, make("th", { scope: "row" }, words),
      make("td", {}, time(planned)), make("td", {}, found === null ? "not seen" : time(found)),
      make("td", {}, marked ? `${text} ${off > 0 ? "slower" : "faster"} than planned` : text));
  });
  const heads = ["", "planned", "measured", "off by"].map((text) => make("th", { scope: "col" }, text));
  const region = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Planned and measured" };
  return make("div", region, make("table", { id: "off" }, make("caption", {}, "Planned and measured, a micro-batch"),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...cells)));
}

/** Reads a file that somebody chose, and shows it under the planned step. */
export async function showMeasured(file, view, axis, place) {
  let timeline = null;
  try {
    timeline = JSON.parse(await file.text());
  } catch {
    timeline = null;
  }
  const why = refusal(view, timeline);
  if (why) {
    place.replaceChildren(make("p", { class: "notice bad", role: "alert" }, why));
    return null;
  }
  const chart = make("div", { class: "chart" });
  const words = timeline.source === "measured" ? "As measured" : "As in the file";
  const numbers = table(compared(view, timeline));
  place.replaceChildren(make("h3", {}, words), chart, numbers);
  markScrolling(numbers);
  axis.resize(Math.max(axis.length, timeline.step_time_s));
  // The plan's collectives are not the file's.
  const stages = view.stages.map((stage) => ({ ...stage, collective_forward_s: null, collective_backward_s: null }));
  return new Gantt(chart, { ...view, stages, boxes: boxesOf(timeline) }, axis);
}
