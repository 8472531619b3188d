// How long something has been going on, and a way to stop it.

export class Elapsed {
  /** button is closed meanwhile; stop and timer are seen meanwhile. */
  constructor(button, stop, timer) {
    Object.assign(this, { button, stop, timer });
    stop.addEventListener("click", () => this.stopping?.abort());
  }

  /** Begins; what is to be stopped has the signal. */
  start() {
    this.stopping = new AbortController();
    this.show(true);
    return this.stopping.signal;
  }

  end() {
    this.show(false);
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
