// What devices of one stage exchange while they work: the share of a box, and its words.
import { time } from "./format.js";

/** Seconds of a box in which split layers exchange values; 0 where that is not known. */
export function exchanged(view, index) {
  const { kinds, stages, start_s: starts, end_s: ends } = view.boxes;
  const { collective_forward_s: forward, collective_backward_s: backward } = view.stages[stages[index]] ?? {};
  if (!forward && !backward) return 0;
  const kind = kinds[index];
  // Of a backward in two parts, the first makes the gradients that are exchanged.
  const seconds = kind === "F" || kind === "R" ? forward : kind === "B" || kind === "I" ? backward : 0;
  return Math.min(seconds, ends[index] - starts[index]);
}

/** What is said of a box, with the collectives in it. */
export function describe(view, index, words) {
  const stage = view.stages[view.boxes.stages[index]];
  if (view.boxes.kinds[index] === "sync") {
    return stage?.strategy === "fully_shard" ? `${words}: scattered, and weights gathered, priced as one all-reduce` : words;
  }
  const seconds = exchanged(view, index);
  return seconds ? `${words}, of which ${time(seconds)} exchange of layers split over ${stage.tensor}` : words;
}

/** Which collectives a step has, for its legend; none if it has no. */
export function listCollectives(view) {
  const kinds = new Set(view.boxes?.kinds ?? []);
  const stages = view.stages.filter((stage) => stage.collective_forward_s || stage.collective_backward_s);
  const sharded = view.stages.some((stage) => stage.strategy === "fully_shard");
  return [
    ...(kinds.size && stages.length ? ["split layers"] : []),
    ...(kinds.has("sync") || kinds.has("reduce") ? ["gradients"] : []),
    ...(kinds.has("sync") && sharded ? ["shards"] : []),
  ];
}
