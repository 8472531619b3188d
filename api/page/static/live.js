// A stored plan, its cuts and sliders; every change is priced by the service.
import { ask, data, placeOf, say } from "./api.js";
import { settled } from "./dom.js";
import { PlanPage, storedView } from "./plan.js";

const request = data("request");
const find = (id) => document.getElementById(id);
const stored = request.options;
const inputs = { m: find("m"), link: find("link"), share: find("share"), recompute: find("recompute"), schedule: find("schedule") };
const started = {
  m: String(storedView.header.num_microbatches), link: "0",
  share: String(Math.round(stored.memory_fraction * 100)),
  recompute: stored.recompute, schedule: stored.schedule,
};
const LARGE = 20000;
/** Steps of so many boxes take longer to simulate than numbers may: they follow when all rests. */
const isLarge = (storedView.boxes?.kinds.length ?? Infinity) > LARGE;
const REST_MS = 400;
let balance = null;
let asking = null;

inputs.m.max = Math.max(64, 4 * storedView.header.num_microbatches);
inputs.m.disabled = stored.batch_size !== null;
inputs.link.disabled = !request.cluster || request.cluster.levels.length === 0;
inputs.share.disabled = storedView.stages.every((stage) => stage.memory_limit_bytes === null);

const page = new PlanPage(storedView, (moved) => { balance = moved; changed(); });

/** Puts the sliders where the address says, or where the stored plan has them. */
function fromAddress() {
  const query = new URLSearchParams(location.search);
  for (const [name, input] of Object.entries(inputs)) input.value = query.get(name) ?? started[name];
  const cuts = query.get("balance");
  balance = cuts && /^\d+(,\d+)*$/.test(cuts) ? cuts.split(",").map(Number) : null;
}

function toAddress() {
  const query = new URLSearchParams();
  for (const [name, input] of Object.entries(inputs)) {
    if (input.value !== started[name]) query.set(name, input.value);
  }
  if (isMoved()) query.set("balance", balance.join(","));
  const text = query.toString().replaceAll("%2C", ",");
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

const isMoved = () => balance !== null && balance.join() !== storedView.balance.join();
const isChanged = () => isMoved() || Object.entries(inputs).some(([name, input]) => input.value !== started[name]);
const factor = () => 2 ** Number(inputs.link.value);

/** After a while in which nothing else was asked. */
const rested = (signal) => new Promise((resolve, reject) => {
  setTimeout(resolve, REST_MS);
  signal.addEventListener("abort", () => reject(signal.reason));
});

function tell() {
  find("m-out").textContent = inputs.m.value;
  find("link-out").textContent = factor() === 1 ? "as they are" : factor() > 1 ? `${factor()} × as fast` : `1/${1 / factor()} as fast`;
  find("memory-out").textContent = `${inputs.share.value} %`;
}

function options() {
  return {
    ...stored,
    num_microbatches: stored.batch_size === null ? Number(inputs.m.value) : stored.num_microbatches,
    memory_fraction: inputs.share.value === started.share ? stored.memory_fraction : Number(inputs.share.value) / 100,
    recompute: inputs.recompute.value,
    schedule: inputs.schedule.value,
  };
}

function cluster() {
  if (!request.cluster || factor() === 1) return request.cluster;
  const faster = (rate) => (rate === null ? null : rate * factor());
  const levels = request.cluster.levels.map((level) => ({
    ...level,
    bandwidth_bytes_per_s: faster(level.bandwidth_bytes_per_s),
    all_reduce_bandwidth_bytes_per_s: faster(level.all_reduce_bandwidth_bytes_per_s),
  }));
  return { ...request.cluster, levels };
}

const price = settled(40, async () => {
  asking?.abort();
  const mine = new AbortController();
  asking = mine;
  const body = { plan_id: request.plan_id, options: options(), layers: false };
  if (isMoved()) body.balance = balance;
  if (factor() !== 1) body.cluster = cluster();
  document.body.setAttribute("aria-busy", "true");
  try {
    const priced = async (step) => (await ask("/v1/views", { method: "POST", body: { ...body, step }, signal: mine.signal }))[0];
    const found = await priced(!isLarge);
    if (found.status === "simulated") {
      say("");
      if (isLarge) {
        page.showNumbers(found.view);
        await rested(mine.signal);
        page.show((await priced(true)).view);
      } else page.show(found.view);
    } else {
      page.bars.show(balance ?? storedView.balance, storedView.balance);
      say(`This cannot be used: ${found.infeasible.message}. The numbers are still those of before.`, true);
    }
    document.body.dataset.priced = String(Number(document.body.dataset.priced ?? 0) + 1);
  } catch (error) {
    if (error.name !== "AbortError") {
      say(error.message, true);
      document.body.dataset.priced = String(Number(document.body.dataset.priced ?? 0) + 1);
    }
  } finally {
    if (asking === mine) document.body.removeAttribute("aria-busy");
  }
});

function changed() {
  tell();
  toAddress();
  if (isChanged()) price();
  else {
    asking?.abort();
    say("");
    page.show(storedView);
  }
}

async function planAgain() {
  const button = find("again");
  button.disabled = true;
  say("Searching …");
  try {
    const where = cluster() ?? (await ask(`/v1/plans/${request.plan_id}`))[0].cluster;
    const body = { profile_id: request.profile_id, cluster: where, options: options() };
    const [, response] = await ask("/v1/plans", { method: "POST", body });
    location.assign(placeOf(response));
  } catch (error) {
    say(error.message, true);
    button.disabled = false;
  }
}

for (const input of Object.values(inputs)) input.addEventListener("input", changed);
find("again").addEventListener("click", planAgain);
find("reset").addEventListener("click", () => {
  for (const [name, input] of Object.entries(inputs)) input.value = started[name];
  balance = null;
  changed();
});
fromAddress();
tell();
if (isChanged()) {
  page.bars.show(balance ?? storedView.balance, storedView.balance);
  price();
}
