// A stored plan, its cuts and sliders; every change is priced by the service.
import { Address } from "./address.js";
import { ask, data, say } from "./api.js";
import { Controls } from "./controls.js";
import { PlanPage, storedView } from "./plan.js";
import { Search } from "./search.js";

const REST_MS = 400;
const SLOW_MS = 300;

const request = data("request");
/** Large steps take longer to simulate than numbers may: they follow when all rests. */
const isLarge = request.step !== "here";
const find = (id) => document.getElementById(id);
const address = new Address();
let balance = null;
let isAsking = false;
let isStale = false;
let isZoomed = false;
/** Aborted by the next change. */
let calm = new AbortController();

const page = new PlanPage({ ...storedView, follows: request.step === "follows" }, address, (moved) => { balance = moved; changed(); });
const controls = new Controls(find, request, storedView, () => changed());

const isMoved = () => balance !== null && balance.join() !== storedView.balance.join();
const isChanged = () => isMoved() || controls.isChanged;

/** The cuts that the address names, if they are some of this plan's stages and layers. */
function cutsOf(text) {
  if (text === null) return null;
  const counts = /^\d{1,9}(,\d{1,9})*$/.test(text) ? text.split(",").map(Number) : [];
  const sum = counts.reduce((all, count) => all + count, 0);
  const fits = counts.length === storedView.balance.length && Math.min(...counts) > 0 && sum === storedView.layers.names.length;
  if (fits) return counts;
  address.refuse(["balance"], storedView.balance.join(","));
  return null;
}

function toAddress() {
  address.set({ ...controls.forAddress(), balance: isMoved() ? balance.join(",") : null });
}

/** Shows an answer, and gives what there is to say. One that says no leaves the numbers as they are. */
function show(found) {
  if (found.status === "simulated") {
    if (found.view.boxes === null && isLarge) page.showNumbers(found.view, balance);
    else page.show(found.view, balance);
    return ["", false];
  }
  const why = (found.infeasible?.message ?? found.refused).replace(/\.$/, "");
  page.bars.show(balance ?? storedView.balance, storedView.balance);
  return [`Not possible: ${why}. The numbers shown are unchanged.`, true];
}

/** The part of the step in the address, as soon as that step is shown. */
function zoom() {
  if (!isZoomed) page.zoom();
  isZoomed = true;
}

/** Asks once what is set now, and shows the answer if it is still wanted; whether it could be used. */
async function once(step, signal) {
  const body = { plan_id: request.plan_id, options: controls.options(), layers: false, step };
  if (isMoved()) body.balance = balance;
  if (controls.factor !== 1) body.cluster = controls.cluster();
  const slow = setTimeout(() => {
    if (isChanged()) say(step && isLarge ? "Drawing the step …" : "Pricing …");
  }, SLOW_MS);
  try {
    const [found] = await ask("/v1/views", { method: "POST", body, signal });
    if (!isChanged()) return false; // the stored plan is shown again
    const [text, isBad] = show(found);
    zoom();
    say(text || address.refused.join(" "), isBad);
    if (!text) controls.moved = []; // told
    return found.status === "simulated";
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
    return false;
  } finally {
    clearTimeout(slow);
  }
}

/** After a while, or at the next change. */
const rested = (signal) => new Promise((resolve) => {
  setTimeout(resolve, REST_MS);
  signal.addEventListener("abort", resolve);
});

/** Prices what is set, then what has been set meanwhile: one request at a time. */
async function price() {
  isStale = true;
  if (isAsking) return;
  isAsking = true;
  document.body.setAttribute("aria-busy", "true");
  while (isStale && isChanged()) {
    isStale = false;
    calm = new AbortController();
    const { signal } = calm;
    if (await once(!isLarge) && isLarge) {
      await rested(signal);
      if (!signal.aborted) await once(true, signal);
    }
    document.body.dataset.priced = String(Number(document.body.dataset.priced ?? 0) + 1);
  }
  isAsking = false;
  document.body.removeAttribute("aria-busy");
}

function changed() {
  address.refused = controls.moved;
  calm.abort();
  if (isChanged()) price();
  else {
    page.show(page.stored);
    zoom();
    say(address.refused.join(" "));
  }
  toAddress();
}

/** The stored plan's step, asked for when all else is seen. */
async function bringStep() {
  try {
    page.complete((await ask(`/v1/plans/${request.plan_id}/view`))[0]);
    document.body.dataset.whole = "yes";
  } catch (error) {
    say(error.message, true);
  }
}

find("reset").addEventListener("click", () => {
  controls.reset();
  balance = null;
  changed();
});
new Search(find("again"), find("stop"), find("timer"), async (signal) => ({
  profile_id: request.profile_id,
  cluster: controls.cluster() ?? (await ask(`/v1/plans/${request.plan_id}`, { signal }))[0].cluster,
  options: controls.options(),
}));

controls.fromAddress(address);
balance = cutsOf(address.get("balance"));
toAddress();
if (isChanged()) {
  page.bars.show(balance ?? storedView.balance, storedView.balance);
  price();
} else {
  zoom();
  say(address.refused.join(" "));
}
if (request.step === "follows") requestAnimationFrame(() => setTimeout(bringStep));
