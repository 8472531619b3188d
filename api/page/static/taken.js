// What an estimate takes the devices of a cluster for, by the rules of profiler/estimates/for_cluster.py.

const NEAR = 0.1; // of the memory that is asked for

const named = (catalogue, kind) => {
  const name = kind.toLowerCase();
  return catalogue.find((one) => [one.name.toLowerCase(), ...(one.aliases ?? [])].includes(name))
    ?? catalogue.find((one) => new RegExp(one.pattern).test(name));
};

/** Devices of the catalogue with about that much memory, the nearest first. */
function withMemory(catalogue, size) {
  const distance = (one) => Math.abs(one.memory_bytes - size);
  return catalogue.filter((one) => one.memory_bytes && distance(one) <= NEAR * size).sort((one, other) => distance(one) - distance(other));
}

/** In words, what is taken for what; what cannot be is `unknown`. */
export function takenFor(catalogue, devices) {
  const words = [];
  const unknown = [];
  for (const [kind, [{ memory_bytes: memory }]] of Map.groupBy(devices, (device) => device.kind)) {
    if (named(catalogue, kind)) continue;
    const [found, ...others] = memory ? withMemory(catalogue, memory) : [];
    if (!found) unknown.push(kind);
    else words.push(`${kind}: estimated as ${found.name}${others.length ? `, but could also be ${others.map((one) => one.name).join(" or ")}` : ""}.`);
  }
  return { words: words.join(" "), unknown };
}
