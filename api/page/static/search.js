// A search for the best plan: the time it has taken so far, and a way to stop it.
import { ask, placeOf, say } from "./api.js";

/** Asks for a plan on a button's behalf and goes to it; where(signal) gives the request's body. */
export class Search {
  constructor(button, stop, timer, body) {
    Object.assign(this, { button, stop, timer, body });
    button.addEventListener("click", () => this.run());
    stop.addEventListener("click", () => this.stopping.abort());
  }

  async run() {
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    this.show(true);
    say("Searching for the best cuts …");
    try {
      const body = await this.body(signal);
      const [, response] = await ask("/v1/plans", { method: "POST", body, signal });
      location.assign(placeOf(response));
    } catch (error) {
      const isLate = (error.document?.type ?? "").endsWith("deadline-exceeded");
      if (error.name === "AbortError") say("The search was stopped. Unless it had just ended, no plan is kept.");
      else say(isLate ? `${error.message} Ask for fewer micro-batches, or plan with the library, which searches for as long as you allow.` : error.message, true);
    } finally {
      this.show(false);
    }
  }

  /** The seconds are in an element that is not read out whenever it changes. */
  show(isRunning) {
    clearInterval(this.ticking);
    this.button.disabled = isRunning;
    for (const element of [this.stop, this.timer]) element.hidden = !isRunning;
    if (!isRunning) return;
    const started = performance.now();
    const tick = () => { this.timer.textContent = `${Math.floor((performance.now() - started) / 1000)} s`; };
    tick();
    this.ticking = setInterval(tick, 1000);
  }
}
