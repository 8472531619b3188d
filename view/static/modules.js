// The boxes of the model: what is in each, out of the rows of the view and its layers.

/**
 * All boxes that can be seen, by name, facts and place; what is in one is found when it is opened.
 * A box: {name, first, count, repeats, row, isOpen, time, weights}; row is -1 for a single layer.
 */
export class Modules {
  constructor(view) {
    this.graph = view.graph;
    this.layers = view.layers;
    this.rowsIn = new Map();
    view.graph.parents.forEach((parent, row) => {
      if (!this.rowsIn.has(parent)) this.rowsIn.set(parent, []);
      this.rowsIn.get(parent).push(row);
    });
  }

  /** The boxes in a row of the view. */
  within(row) {
    const { first_layers: firsts, num_layers: counts } = this.graph;
    return this.between(row, firsts[row], firsts[row] + counts[row]);
  }

  /** The boxes of some layers that are directly in a row, -1 for those of a stage. */
  between(parent, first, last) {
    const { first_layers: firsts } = this.graph;
    const rows = (this.rowsIn.get(parent) ?? []).filter((row) => firsts[row] >= first && firsts[row] < last);
    const found = [];
    for (let layer = first; layer < last; layer += found.at(-1).count) {
      found.push(rows.length && firsts[rows[0]] === layer ? this.box(rows.shift()) : this.layer(layer));
    }
    return found;
  }

  box(row) {
    const { graph } = this;
    return {
      name: graph.names[row], first: graph.first_layers[row], count: graph.num_layers[row],
      repeats: graph.repeats[row], isOpen: graph.is_open[row], row,
      time: graph.time_s[row], weights: graph.parameter_bytes[row],
    };
  }

  layer(index) {
    const { layers } = this;
    const isKnown = layers.forward_s.length > 0;
    return {
      name: layers.names[index], first: index, count: 1, repeats: 1, isOpen: false, row: -1,
      time: isKnown ? layers.forward_s[index] + layers.backward_s[index] : undefined,
      weights: isKnown ? layers.parameter_bytes[index] : undefined,
    };
  }
}
