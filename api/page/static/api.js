// Asking the service from its own pages; the browser's session says who asks.
import { visible } from "./format.js";

/** A problem the service answered, with its words. */
export class Problem extends Error {
  constructor(document, status) {
    super(document.detail ?? document.title ?? `The server answered ${status}.`);
    this.document = document;
    this.status = status;
  }
}

/** The answer's JSON and the response itself. A session that is over leads to signing in. */
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = body === undefined ? body : JSON.stringify(body);
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  let response;
  try {
    response = await fetch(path, { method, body: sent, headers: { ...type, ...headers }, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ detail: "The server does not respond. Is it still running?" }, 0);
  }
  if (response.status === 401) {
    location.assign(`/sign-in?next=${encodeURIComponent(location.pathname + location.search)}`);
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(found, response.status);
  return [found, response];
}

/** Says something in the page's message line. */
export function say(text, bad = false) {
  const line = document.getElementById("message");
  line.textContent = visible(text);
  line.classList.toggle("bad", bad);
}

const PHASE_MS = 1000;

/** Asks for a plan, and says meanwhile what the service is doing. */
export async function askForPlan({ body, headers = {}, signal }) {
  const id = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  let said = "";
  let isOver = false;
  const asking = setInterval(async () => {
    const [{ text }] = await ask(`/plans/progress?request_id=${id}`).catch(() => [{}]);
    if (isOver || !text || text === said) return;
    said = text;
    say(text);
  }, PHASE_MS);
  try {
    return await ask("/v1/plans", { method: "POST", body, headers: { ...headers, "X-Request-ID": id }, signal });
  } finally {
    isOver = true;
    clearInterval(asking);
  }
}

/** Where the answer to a planning request is to be seen: the plan, or the job that makes it. */
export function placeOf(response) {
  return response.headers.get("Location").replace("/v1", "");
}

/** JSON that the page brought along. */
export function data(id) {
  return JSON.parse(document.getElementById(id).textContent);
}
