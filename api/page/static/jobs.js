// The project's jobs, read again every few seconds while one goes on.
import { ask } from "./api.js";
import { make } from "./dom.js";

const place = document.getElementById("jobs");
const ENDED = new Set(["succeeded", "failed", "cancelled"]);

function row(job) {
  const link = make("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.kind === "profile" ? "measure a model" : "plan a model");
  return make("tr", {}, make("th", { scope: "row" }, link),
    make("td", {}, make("span", { class: `badge ${job.state}` }, job.state)),
    make("td", {}, job.created_at.slice(0, 19).replace("T", " ")),
    make("td", { class: "wrap" }, job.problem?.detail ?? job.message ?? ""));
}

async function read() {
  try {
    const [{ jobs }] = await ask("/v1/jobs?limit=50");
    if (jobs.length === 0) {
      place.replaceChildren(make("div", { class: "empty" }, make("h2", {}, "No jobs yet"),
        make("p", {}, "A job is made when a model has to be measured."),
        make("p", {}, make("a", { class: "button primary", href: "/new" }, "New plan"))));
      return;
    }
    const heads = ["job", "state", "made", "message"].map((text) => make("th", { scope: "col" }, text));
    place.replaceChildren(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Jobs" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...jobs.map(row)))));
    if (jobs.some((job) => !ENDED.has(job.state))) setTimeout(read, 2000);
  } catch (error) {
    place.replaceChildren(make("p", { class: "notice bad" }, error.message));
  }
}

read();
