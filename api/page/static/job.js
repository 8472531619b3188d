// One job as it goes on, told by the server's events.
import { ask, say } from "./api.js";
import { make } from "./dom.js";
import { visible } from "./format.js";

const id = document.body.dataset.job;
const path = `/v1/jobs/${encodeURIComponent(id)}`;
const find = (name) => document.getElementById(name);
const KINDS = ["queued", "started", "progress", "requeued", "succeeded", "failed", "cancelled"];
const ENDED = new Set(["succeeded", "failed", "cancelled"]);

const SAID = new Set(["at", "attempt", "step", "done", "total", "layer"]);
const STEPS = {
  measuring: ({ layer, done }) => `measuring ${layer}, ${done} times a layer so far`,
  planning: () => "searching for the plan",
};
/** The share that is done never falls, though more is measured where times vary. */
let share = 0;

/** What happened, in words; what this page has no words for is told as it is. */
function describe(found) {
  const words = found.step ? [STEPS[found.step]?.(found) ?? found.step] : [];
  if (found.attempt > 1) words.push(`attempt ${found.attempt}`);
  const others = Object.entries(found).filter(([name, value]) => !SAID.has(name) && value !== null && typeof value !== "object");
  return visible([...words, ...others.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`)].join(", "));
}

/** A cell with the time of day, as whoever reads it writes it; the date is its title. */
function moment(text) {
  const at = new Date(text);
  return make("td", { title: at.toLocaleDateString([], { dateStyle: "medium" }) }, at.toLocaleTimeString());
}

async function show() {
  const [job] = await ask(path);
  find("badges").replaceChildren(make("span", { class: `badge ${job.state}` }, job.state));
  const progress = find("progress");
  progress.hidden = job.state !== "running";
  if (job.progress?.total) {
    share = Math.max(share, (job.progress.done ?? 0) / job.progress.total);
    progress.value = share;
  }
  if (job.problem) say(job.problem.detail, true);
  else say(job.message ?? { queued: "Waiting for a worker.", running: job.progress ? "Running." : "Building and capturing the model, before anything is measured.", succeeded: "Done.", cancelled: "Cancelled." }[job.state] ?? "");
  const actions = [];
  if (job.result) actions.push(make("a", { class: "button primary", href: job.result.href.replace("/v1", "") }, `Open the ${job.result.kind}`));
  if (!ENDED.has(job.state)) actions.push(make("button", { type: "button", onclick: cancel }, "Cancel"));
  else if (job.state !== "succeeded") actions.push(make("a", { class: "button", href: "/new" }, "New request"));
  find("actions").replaceChildren(...actions);
  return job;
}

async function cancel() {
  try {
    await ask(`${path}/cancel`, { method: "POST" });
    await show();
  } catch (error) {
    say(error.message, true);
  }
}

function watch() {
  const events = new EventSource(`${path}/events`);
  events.onerror = () => { // browsers ask again by themselves, but not after a refusal
    show().catch((error) => say(error.message, true));
    if (events.readyState === EventSource.CLOSED) setTimeout(watchOn, 5000);
  };
  for (const kind of KINDS) {
    events.addEventListener(kind, (event) => {
      const found = JSON.parse(event.data);
      find("events").append(make("tr", {}, make("th", { scope: "row" }, kind), moment(found.at),
        make("td", { class: "wrap" }, describe(found))));
      if (ENDED.has(kind)) events.close();
      show().catch((error) => say(error.message, true));
    });
  }
}

/** Again from the beginning, if it still goes on. */
async function watchOn() {
  try {
    const job = await show();
    if (ENDED.has(job.state)) return;
    find("events").replaceChildren();
    watch();
  } catch (error) {
    say(error.message, true);
  }
}

show().then(watch, (error) => say(error.message, true));
