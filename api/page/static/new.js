// A planning request out of a form; the same request as curl and Python is always in sight.
import { Address } from "./address.js";
import { ask, placeOf, say } from "./api.js";
import { ClusterEditor } from "./cluster.js";
import { make } from "./dom.js";
import { textOf } from "./fields.js";
import { FormAddress } from "./form-address.js";

const find = (id) => document.getElementById(id);
const [families, capabilities] = await Promise.all([
  ask("/v1/model-families").then(([found]) => found.model_families),
  ask("/v1/capabilities").then(([found]) => found),
]).catch((error) => {
  say(`${error.message} Load this page again.`, true);
  find("submit").disabled = true;
  throw error;
});
let upload = null;
let uploadName = "";

const fill = (select, entries) => select.replaceChildren(...entries.map(([value, words]) => make("option", { value }, words)));
fill(find("family"), families.map((family) => [family.family, family.family]));
fill(find("schedule"), capabilities.schedules.map((name) => [name, name]));
fill(find("objective"), capabilities.objectives.map((name) => [name, name]));
find("schedule").value = "1f1b";
find("objective").value = "step_time";

const family = () => families.find((one) => one.family === find("family").value);

/** The kind of a field: its own schema, or the first that is not null, with what it refers to. */
function kindOf(schema, root) {
  const one = schema.anyOf?.find((entry) => entry.type !== "null") ?? schema;
  return one.$ref ? root.$defs[one.$ref.split("/").at(-1)] : one;
}

function field(name, schema, root, value) {
  const kind = kindOf(schema, root);
  const label = name.replaceAll("_", " ");
  if (kind.enum) {
    const select = make("select", { name }, ...kind.enum.map((entry) => make("option", { value: JSON.stringify(entry) }, String(entry))));
    select.value = JSON.stringify(value);
    return make("label", {}, label, select);
  }
  if (kind.type === "boolean") {
    const box = make("input", { type: "checkbox", name, "data-kind": "boolean" });
    box.checked = Boolean(value);
    return make("label", { class: "inline" }, box, label);
  }
  if (kind.type === "integer" || kind.type === "number") {
    const input = make("input", { type: "number", name, "data-kind": "number", step: kind.type === "integer" ? 1 : "any",
      min: kind.minimum ?? null, max: kind.maximum ?? null, placeholder: value === null ? "none" : "" });
    input.value = value ?? "";
    return make("label", {}, label, input);
  }
  const input = make("input", { name, "data-kind": kind.type === "string" ? "text" : "json" });
  input.value = kind.type === "string" ? value ?? "" : JSON.stringify(value);
  return make("label", {}, label, input);
}

function showConfig(config) {
  const root = family().config_schema;
  const fields = Object.entries(root.properties ?? {}).map(([name, schema]) => field(name, schema, root, config[name] ?? schema.default ?? null));
  find("config").replaceChildren(make("legend", {}, "Configuration"), ...fields);
  for (const input of find("config").querySelectorAll("[name]")) input.dataset.usual = textOf(input);
}

function showFamily() {
  const one = family();
  find("family-words").textContent = one.description.replaceAll("`", "");
  fill(find("preset"), [["", "none: the configuration below"], ...one.published.map((entry) => [entry.name, `${entry.name} (${(entry.num_parameters / 1e6).toFixed(0)} M parameters)`])]);
  showConfig({});
}

function showPreset() {
  const preset = family().published.find((entry) => entry.name === find("preset").value);
  showConfig(preset ? preset.model.config : {});
}

function config() {
  const found = {};
  const { properties = {} } = family().config_schema;
  for (const input of find("config").querySelectorAll("[name]")) {
    const { kind } = input.dataset;
    let value;
    if (kind === "boolean") value = input.checked;
    else if (kind === "number") value = input.value === "" ? null : Number(input.value);
    else if (kind === "text") value = input.value;
    else value = JSON.parse(input.value || "null");
    if (JSON.stringify(value) !== JSON.stringify(properties[input.name].default ?? null)) found[input.name] = value;
  }
  return found;
}

function source() {
  const kind = find("source").value;
  if (kind === "profile_id") return { profile_id: find("profile-id").value.trim() };
  if (kind === "file") return upload ?? {};
  const model = { family: find("family").value };
  const chosen = config();
  if (Object.keys(chosen).length) model.config = chosen;
  if (find("costs").value === "measure") return { model, sample: family().default_sample };
  const preset = family().published.find((entry) => entry.name === find("preset").value);
  const sample = preset ? sampleOf(preset) : null;
  return { model, ...(sample ? { sample } : {}), estimate: {} };
}

/** The family's usual sample at the length a published model was made for, of its vocabulary. */
function sampleOf(preset) {
  if (!preset.sequence_length) return null;
  const high = preset.model.config.vocab_size;
  const fitted = (tensor) => (tensor && tensor.shape.length === 2
    ? { ...tensor, shape: [tensor.shape[0], preset.sequence_length], ...(high && tensor.high ? { high } : {}) } : tensor);
  const usual = family().default_sample;
  const inputs = Object.fromEntries(Object.entries(usual.inputs).map(([name, tensor]) => [name, fitted(tensor)]));
  return { ...usual, inputs, target: fitted(usual.target) };
}

function body() {
  const options = { num_microbatches: Number(find("microbatches").value) };
  const usual = { schedule: "1f1b", objective: "step_time", recompute: "never" };
  for (const [name, value] of Object.entries(usual)) {
    if (find(name).value !== value) options[name] = find(name).value;
  }
  if (find("replicas").value === "any") options.max_replicas = null;
  return { ...source(), cluster: cluster.value(), options };
}

/** A value as Python writes it; strings stay as they are. */
const python = (value) => JSON.stringify(value, null, 4).replace(/"(?:[^"\\]|\\.)*"|\b(?:null|true|false)\b/g,
  (word) => ({ null: "None", true: "True", false: "False" })[word] ?? word);

function tell() {
  const kind = find("source").value;
  find("of-family").hidden = kind !== "family";
  find("of-file").hidden = kind !== "file";
  find("of-id").hidden = kind !== "profile_id";
  let sent;
  try {
    sent = body();
  } catch {
    return; // a field is being typed
  }
  const large = ["profile", "graph"].find((name) => name in sent);
  const { [large]: left, ...brief } = sent;
  const url = `${location.origin}/v1/plans`;
  const text = JSON.stringify(brief).replaceAll("'", "'\\''");
  const start = `curl -H "Authorization: Bearer $STAGEWRIGHT_TOKEN" -H 'Content-Type: application/json'`;
  find("curl").textContent = large
    ? `jq '{${large}: .} + ${text}' '${uploadName.replaceAll("'", "'\\''")}' | ${start} \\\n  -d @- \\\n  ${url}`
    : `${start} \\\n  -d '${text}' \\\n  ${url}`;
  find("python").textContent = `import json, os, pathlib, urllib.request\n\nbody = ${python(brief)}${large ? `\nbody["${large}"] = json.loads(pathlib.Path(${JSON.stringify(uploadName)}).read_text())` : ""}\nrequest = urllib.request.Request(\n    "${url}",\n    json.dumps(body).encode(),\n    {"Authorization": "Bearer " + os.environ["STAGEWRIGHT_TOKEN"], "Content-Type": "application/json"},\n)\nprint(json.load(urllib.request.urlopen(request)))`;
}

async function take(file) {
  upload = null;
  if (!file) return;
  uploadName = file.name;
  try {
    if (file.name.endsWith(".pt2")) {
      const [{ id }] = await ask("/v1/graphs/pt2", { method: "POST", body: file });
      upload = { graph_id: id };
    } else {
      const document = JSON.parse(await file.text());
      const kind = String(document.schema_version ?? "").match(/^stagewright\.(profile|graph)\//)?.[1];
      if (!kind) throw new Error(`${file.name} is neither a profile nor a graph of Stagewright`);
      upload = { [kind]: document };
    }
    say(`${file.name} is taken.`);
  } catch (error) {
    say(error instanceof SyntaxError ? `${file.name} is no JSON: ${error.message}` : error.message, true);
  }
  tell();
  kept.write(upload?.graph_id ?? null);
}

find("new").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = find("submit");
  button.disabled = true;
  say("Planning …");
  try {
    const sent = body();
    if (find("source").value === "file" && !upload) throw new Error("Choose a file first.");
    if (sent.profile_id === "") throw new Error("Choose a profile: its id is on the page of profiles.");
    const headers = sent.model && !sent.estimate ? { Prefer: "respond-async" } : {}; // measured: watch the job
    const [, response] = await ask("/v1/plans", { method: "POST", body: sent, headers });
    location.assign(placeOf(response));
  } catch (error) {
    const fields = (error.document?.errors ?? []).map((one) => `${one.pointer ?? one.parameter}: ${one.detail}`);
    say(fields.length > 1 ? fields.join("; ") : error.message, true);
    button.disabled = false;
  }
});
find("family").addEventListener("input", showFamily);
find("preset").addEventListener("input", showPreset);
find("file").addEventListener("change", (event) => take(event.target.files[0]));
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
addEventListener("drop", (event) => {
  if (!event.dataTransfer?.files.length) return;
  find("source").value = "file";
  take(event.dataTransfer.files[0]);
});
const cluster = new ClusterEditor(find("cluster"), find("cluster-editor"));
const address = new Address();
const kept = new FormAddress(address, find, { family: showFamily, preset: showPreset }, cluster);
find("new").addEventListener("input", () => {
  tell();
  kept.write(upload?.graph_id ?? null);
});

showFamily();
if (address.get("graph_id")) upload = { graph_id: address.get("graph_id") };
await kept.read();
const isLost = find("source").value === "file" && !upload;
say([...address.refused, isLost ? "Choose the file again: browsers do not keep files." : ""].join(" ").trim());
tell();
document.body.dataset.ready = "yes";
