// The devices of each stage: a block whose rows are replicas, and columns those that split its layers.
import { make } from "./dom.js";
import { visible } from "./format.js";

const MOST_CELLS = 8; // rows and columns of a block that are drawn
const MOST_STAGES = 64;

/** The places of a row or column that are drawn, -1 for those left out. */
function meshPlaces(count) {
  if (count <= MOST_CELLS) return Array.from({ length: count }, (_, place) => place);
  return [...Array.from({ length: MOST_CELLS - 2 }, (_, place) => place), -1, count - 1];
}

function meshCell(stage, replica, shard) {
  if (replica < 0 || shard < 0) return make("span", { class: "cell more" }, "…");
  const name = visible(stage.devices[replica * stage.tensor + shard]);
  const parts = [
    ...(stage.replicas > 1 ? [`replica ${replica}`] : []),
    ...(stage.tensor > 1 ? [`part ${shard} of ${stage.tensor}`] : []),
  ];
  return make("span", { class: "cell", title: [name, ...parts].join(", ") }, name);
}

function meshBlock(stage, index) {
  const columns = meshPlaces(stage.tensor);
  const cells = meshPlaces(stage.replicas).flatMap((replica) => columns.map((shard) => meshCell(stage, replica, shard)));
  return make("li", { class: `hue-${index % 8}` },
    make("p", { class: "heading" }, `stage ${index}`),
    make("p", { class: "small" }, stage.mesh),
    make("div", { class: `block wide-${columns.length}`, "aria-hidden": "true" }, ...cells));
}

/** Shows the blocks of a plan; nothing where each stage has one device. */
export function showMeshes(section, view) {
  section.hidden = view.stages.every((stage) => stage.devices.length === 1);
  if (section.hidden) return;
  const left = view.stages.length - MOST_STAGES;
  section.querySelector("ul").replaceChildren(
    ...view.stages.slice(0, MOST_STAGES).map(meshBlock),
    ...(left > 0 ? [make("li", { class: "small" }, `and ${left} more stages, in the table below`)] : []));
}
