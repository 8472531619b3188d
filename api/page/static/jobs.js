// The project's jobs, read again every few seconds.
import { ask } from "./api.js";
import { make } from "./dom.js";

const place = document.getElementById("jobs");
const BUSY_MS = 2000;
const QUIET_MS = 8000;
const ENDED = new Set(["succeeded", "failed", "cancelled"]);

function row(job) {
  const link = make("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.kind === "profile" ? "measure a model" : "plan a model");
  return make("tr", {}, make("th", { scope: "row" }, link),
    make("td", {}, make("span", { class: `badge ${job.state}` }, job.state)),
    make("td", { class: "wrap" }, job.problem?.detail ?? job.message ?? ""),
    make("td", {}, job.created_at.slice(0, 19).replace("T", " ")));
}

/** Shows the jobs there are; for how long that will do. */
async function read() {
  try {
    const [{ jobs }] = await ask("/v1/jobs?limit=50");
    if (jobs.length === 0) {
      place.replaceChildren(make("div", { class: "empty" }, make("h2", {}, "No jobs yet"),
        make("p", {}, "A job is made when a model has to be measured."),
        make("p", {}, make("a", { class: "button primary", href: "/new" }, "New plan"))));
      return QUIET_MS;
    }
    const heads = ["job", "state", "message", "created (UTC)"].map((text) => make("th", { scope: "col" }, text));
    place.replaceChildren(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Jobs" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...jobs.map(row)))));
    return jobs.some((job) => !ENDED.has(job.state)) ? BUSY_MS : QUIET_MS;
  } catch (error) {
    place.replaceChildren(make("p", { class: "notice bad", role: "status" }, error.message));
    return QUIET_MS;
  }
}

/** Goes on as long as the page is open: jobs are made elsewhere, and servers come back. */
async function follow() {
  setTimeout(follow, await read());
}

follow();
