// Boxes narrower than two pixels: each pixel is filled as high as the share of its time that each kind takes.

export class Mixture {
  /** For pixels from left on; kinds in the order they are stacked. */
  constructor(left, width, kinds) {
    this.left = Math.floor(left);
    this.width = Math.ceil(width) + 1;
    this.kinds = kinds;
    this.rows = new Map(kinds.map((kind, index) => [kind, index * this.width]));
    this.used = new Set();
    this.shares = null;
  }

  /** A box from x on, so many pixels wide. */
  add(kind, x, w) {
    this.shares ??= new Float32Array(this.width * this.kinds.length);
    const row = this.rows.get(kind);
    this.used.add(kind);
    for (let pixel = Math.floor(x); pixel < x + w; pixel += 1) {
      const place = pixel - this.left;
      if (place < 0 || place >= this.width) continue;
      this.shares[row + place] += Math.min(pixel + 1, x + w) - Math.max(pixel, x);
    }
  }

  /** Fills what was added, to whole pixels; what is left of a pixel is idle. */
  fill(context, y, height, paint) {
    if (!this.shares) return;
    const sums = new Float32Array(this.width);
    for (const kind of this.kinds.filter((one) => this.used.has(one))) {
      const row = this.rows.get(kind);
      context.fillStyle = paint[kind];
      context.beginPath(); // one path a kind, one rectangle for equal neighbours: many times faster
      let open = [0, 0, 0]; // where it begins, and its upper and lower edge
      for (let place = 0; place <= this.width; place += 1) {
        const share = place < this.width ? this.shares[row + place] : 0;
        const top = Math.round(Math.min(1, sums[place]) * height);
        const bottom = Math.round(Math.min(1, sums[place] + share) * height);
        sums[place] += share;
        if (top === open[1] && bottom === open[2]) continue;
        if (open[2] > open[1]) context.rect(this.left + open[0], y + open[1], place - open[0], open[2] - open[1]);
        open = [place, top, bottom];
      }
      context.fill();
    }
  }
}
