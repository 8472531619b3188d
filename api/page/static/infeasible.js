// Ways out of a request that nothing fits, planned at a click.
import { askForPlan, data, placeOf, say } from "./api.js";

const request = document.getElementById("request") ? data("request") : null;

/** The cluster with so many devices: the first ones, or copies of the last one. */
function withDevices(cluster, count) {
  const devices = cluster.devices.slice(0, count);
  const names = new Set(cluster.devices.map((device) => device.name));
  for (let number = devices.length; devices.length < count; number += 1) {
    const last = cluster.devices.at(-1);
    const name = `${last.kind}:${number}`;
    if (!names.has(name)) devices.push({ ...last, name });
    names.add(name);
  }
  const levels = cluster.levels.filter((level, index) => index === 0 || level.group_size <= count || index === cluster.levels.length - 1);
  const outermost = levels.at(-1);
  if (outermost && outermost.group_size && outermost.group_size < count) {
    const inner = levels.length > 1 ? levels.at(-2).group_size : 1;
    levels[levels.length - 1] = { ...outermost, group_size: Math.ceil(count / inner) * inner };
  }
  return { ...cluster, devices, levels: count > 1 && !levels.length ? [{ group_size: count }] : levels };
}

for (const button of document.querySelectorAll("[data-way]")) {
  button.disabled = false; // a click before this script ran would be lost
  button.addEventListener("click", async () => {
    const way = request.ways[Number(button.dataset.way)];
    button.disabled = true;
    say("Searching …");
    try {
      const cluster = withDevices(request.cluster, way.num_devices);
      const body = { profile_id: request.profile_id, cluster, options: way.options };
      const [, response] = await askForPlan({ body });
      location.assign(placeOf(response));
    } catch (error) {
      say(error.message, true);
      button.disabled = false;
    }
  });
}
