// A search for the best plan: the time it has taken so far, and a way to stop it.
import { askForPlan, placeOf, say } from "./api.js";
import { Elapsed } from "./elapsed.js";

/** What to say of a search that made no plan: the words, and whether something is wrong. */
export function wordsOf(error) {
  if (error.name === "AbortError") return ["Search stopped. No plan was stored unless the search had just finished.", false];
  const isLate = (error.document?.type ?? "").endsWith("deadline-exceeded");
  return [isLate ? `${error.message} Use fewer micro-batches, or plan with the library, which has no time limit.` : error.message, true];
}

/** Asks for a plan on a button's behalf and goes to it; where(signal) gives the request's body. */
export class Search {
  constructor(button, stop, timer, body) {
    this.elapsed = new Elapsed(button, stop, timer);
    this.body = body;
    button.addEventListener("click", () => this.run());
  }

  async run() {
    const signal = this.elapsed.start();
    say("Searching for the best cuts …");
    try {
      const body = await this.body(signal);
      const [, response] = await askForPlan({ body, signal });
      location.assign(placeOf(response));
    } catch (error) {
      say(...wordsOf(error));
    } finally {
      this.elapsed.end();
    }
  }
}
