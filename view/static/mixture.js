// Boxes narrower than two pixels: each pixel is filled as high as the share of its time that each kind takes.

export class Mixture {
  /** For pixels from left on; kinds in the order they are stacked. */
  constructor(left, width, kinds) {
    this.left = Math.floor(left);
    this.width = Math.ceil(width) + 1;
    this.kinds = kinds;
    this.shares = null;
  }

  /** A box from x on, so many pixels wide. */
  add(kind, x, w) {
    this.shares ??= new Float32Array(this.width * this.kinds.length);
    const row = this.kinds.indexOf(kind) * this.width;
    for (let pixel = Math.floor(x); pixel < x + w; pixel += 1) {
      const place = pixel - this.left;
      if (place < 0 || place >= this.width) continue;
      this.shares[row + place] += Math.min(pixel + 1, x + w) - Math.max(pixel, x);
    }
  }

  /** Fills what was added; what is left of a pixel is idle. */
  fill(context, y, height, paint) {
    if (!this.shares) return;
    const tops = new Float32Array(this.width).fill(y);
    this.kinds.forEach((kind, index) => {
      const shares = this.shares.subarray(index * this.width, (index + 1) * this.width);
      context.fillStyle = paint[kind];
      context.beginPath(); // one path a kind: many times faster than as many rectangles
      shares.forEach((share, place) => {
        const part = Math.min(share * height, y + height - tops[place]);
        if (part < 0.02) return;
        context.rect(this.left + place, tops[place], 1, part);
        tops[place] += part;
      });
      context.fill();
    });
  }
}
