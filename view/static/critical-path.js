// The chain of work and messages that a step's length comes from, found backwards from its end.

const BEFORE = new Set(["F", "B", "I", "W", "R"]);

/** Indices of the boxes of the critical path, first to last.
 *
 * Each box begins when the last thing that it waits for has ended: the work before it on its device,
 * or what it is sent of its micro-batch. So from the last box on, the one that ends where this one
 * begins is its reason; where none does, the device waited, and the nearest earlier end goes on.
 */
export function criticalPath(boxes) {
  const { ranks, stages, kinds, microbatches, start_s: starts, end_s: ends } = boxes;
  if (!ends.length) return [];
  const byRank = group(ranks);
  const byBatch = group(microbatches);
  let at = ends.reduce((last, end, index) => (end > ends[last] ? index : last), 0);
  const found = [at];
  const slack = ends[at] * 1e-9;
  while (starts[at] > slack) {
    const isSent = !BEFORE.has(kinds[at]) && kinds[at].startsWith("send");
    // A message waits for its own micro-batch; work for that, or for the device.
    const others = kinds[at] === "reduce" ? ends.map((_, index) => index)
      : isSent ? byBatch.get(microbatches[at]).filter((one) => stages[one] === stages[at])
      : [...byRank.get(ranks[at]).filter((one) => !kinds[one].startsWith("send")), ...byBatch.get(microbatches[at])];
    let best = -1;
    for (const one of others) {
      if (one === at || ends[one] > starts[at] + slack || starts[one] >= starts[at]) continue;
      if (best < 0 || ends[one] > ends[best]) best = one;
    }
    if (best < 0) break;
    at = best;
    found.push(at);
  }
  return found.reverse();
}

/** Seconds of a path by what goes on in them: [name, seconds], waiting last. */
export function sumPath(boxes, path, nameOf) {
  const sums = new Map();
  let waited = 0;
  path.forEach((index, place) => {
    const name = nameOf(boxes.kinds[index]);
    sums.set(name, (sums.get(name) ?? 0) + boxes.end_s[index] - boxes.start_s[index]);
    waited += boxes.start_s[index] - (place ? boxes.end_s[path[place - 1]] : 0);
  });
  if (waited > 1e-6 * boxes.end_s[path.at(-1)]) sums.set("waiting", waited);
  return [...sums];
}

function group(keys) {
  const found = new Map();
  keys.forEach((key, index) => {
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(index);
  });
  return found;
}
