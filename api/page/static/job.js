// One job as it goes on, told by the server's events.
import { ask, say } from "./api.js";
import { make } from "./dom.js";

const id = document.body.dataset.job;
const path = `/v1/jobs/${encodeURIComponent(id)}`;
const find = (name) => document.getElementById(name);
const KINDS = ["queued", "started", "progress", "requeued", "succeeded", "failed", "cancelled"];
const ENDED = new Set(["succeeded", "failed", "cancelled"]);

function describe(kind, found) {
  const words = Object.entries(found ?? {}).filter(([, value]) => value !== null && typeof value !== "object")
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  return words.join(", ");
}

async function show() {
  const [job] = await ask(path);
  find("title").textContent = job.kind === "profile" ? "Measure a model" : "Plan a model";
  find("badges").replaceChildren(make("span", { class: `badge ${job.state}` }, job.state));
  const progress = find("progress");
  progress.hidden = job.state !== "running";
  if (job.progress?.total) {
    progress.max = job.progress.total;
    progress.value = job.progress.done ?? 0;
  }
  if (job.problem) say(job.problem.detail, true);
  else say(job.message ?? { queued: "Waiting for a worker.", running: "Running.", succeeded: "Done.", cancelled: "Cancelled." }[job.state] ?? "");
  const actions = [];
  if (job.result) actions.push(make("a", { class: "button primary", href: job.result.href.replace("/v1", "") }, `Open the ${job.result.kind}`));
  if (!ENDED.has(job.state)) actions.push(make("button", { type: "button", onclick: cancel }, "Cancel"));
  else if (job.state !== "succeeded") actions.push(make("a", { class: "button", href: "/new" }, "Ask again"));
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
      find("events").append(make("tr", {}, make("th", { scope: "row" }, kind), make("td", { class: "wrap" }, describe(kind, JSON.parse(event.data)))));
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
