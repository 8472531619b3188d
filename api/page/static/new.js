// A planning request out of a form; the same request as curl and Python is always in sight.
import { Address } from "./address.js";
import { ask, askForPlan, placeOf, say } from "./api.js";
import { ClusterEditor, isUnfinished } from "./cluster.js";
import { make, settled } from "./dom.js";
import { Elapsed } from "./elapsed.js";
import { clearMarks, mark, markProblem } from "./field-errors.js";
import { textOf } from "./fields.js";
import { FormAddress } from "./form-address.js";
import { hasLength, sampleOf, usualLength } from "./sample.js";
import { wordsOf } from "./search.js";
import { takenFor } from "./taken.js";

const READ_MS = 300;

const find = (id) => document.getElementById(id);
const [capabilities] = await ask("/v1/capabilities").catch((error) => {
  say(`${error.message} Load this page again.`, true);
  find("submit").disabled = true;
  throw error;
});
const { model_families: families, accelerators: catalogue } = capabilities;
let upload = null;
let uploadName = "";

/** Fills a list; the usual entry is the first, or the one named. */
const fill = (select, entries, usual = entries[0][0]) => {
  select.replaceChildren(...entries.map(([value, words]) => make("option", { value, selected: value === usual ? "" : null }, words)));
  select.value = usual;
};
fill(find("family"), families.map((family) => [family.family, family.family]));
fill(find("schedule"), [["auto", "auto, the fastest"], ...capabilities.schedules.map((name) => [name, name])], "1f1b");
fill(find("objective"), capabilities.objectives.map((name) => [name, name.replaceAll("_", " ")]), "step_time");
fill(find("as"), [["", "by name or memory"], ...catalogue.map((one) => [one.name, one.full_name])]);

find("published").replaceChildren(...families.flatMap((one) => one.published.map((entry) => make("option", { value: entry.name }))));

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

const showPreset = () => showConfig(preset()?.model.config ?? {});

/** Fills family and configuration in with a published model once its name is whole. */
function findModel() {
  const wanted = find("find-model").value.trim().toLowerCase();
  const one = families.find((entry) => entry.published.some((known) => known.name === wanted));
  find("found-model").textContent = one ? `Taken: ${wanted}.` : wanted.length > 2 && !families.some((entry) => entry.published.some((known) => known.name.includes(wanted)))
    ? "No published model is called so; choose a family below, or a file." : "";
  if (!one) return;
  fill(find("source"), [...find("source").options].map((option) => [option.value, option.text]));
  find("family").value = one.family;
  showFamily();
  find("preset").value = wanted;
  showPreset();
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

const isFamily = () => find("source").value === "family";
const isEstimated = () => (isFamily() ? find("costs").value === "estimate" : find("source").value === "file" && !upload?.profile);
const estimate = () => (find("as").value ? { device: find("as").value } : {});

function source() {
  const kind = find("source").value;
  if (kind === "profile_id") return { profile_id: find("profile-id").value.trim() };
  if (kind === "file") return { ...upload, ...(isEstimated() && find("as").value ? { estimate: estimate() } : {}) };
  const model = { family: find("family").value };
  const chosen = config();
  if (Object.keys(chosen).length) model.config = chosen;
  if (!isEstimated()) return { model, sample: sample(), profiling: {} };
  return { model, ...(isUsualSample() ? {} : { sample: sample() }), estimate: estimate() };
}

const preset = () => family().published.find((entry) => entry.name === find("preset").value);

/** The configuration with what it does not say, as the family has it. */
function wholeConfig() {
  const { properties = {} } = family().config_schema;
  return { ...Object.fromEntries(Object.entries(properties).map(([name, one]) => [name, one.default])), ...config() };
}

const isUsualSample = () => Number(find("size").value) === 1 && !find("length").value && !preset()?.sequence_length;

function sample() {
  const usual = family().default_sample;
  const whole = wholeConfig();
  const length = find("length").value ? Number(find("length").value) : usualLength(usual, whole, preset()?.sequence_length);
  return sampleOf(usual, whole, Number(find("size").value), length);
}

function showSample() {
  const usual = family().default_sample;
  find("of-length").hidden = !hasLength(usual);
  if (!hasLength(usual)) find("length").value = "";
  find("length").placeholder = usualLength(usual, wholeConfig(), preset()?.sequence_length) ?? "";
}

function body() {
  const count = find("microbatches").value;
  const options = count ? { num_microbatches: Number(count) } : {};
  const usual = { schedule: "1f1b", objective: "step_time", recompute: "never", cut_at: "layers", regular: "no" };
  for (const [name, value] of Object.entries(usual)) {
    if (find(name).value !== value) options[name] = find(name).value;
  }
  const auto = count ? [] : ["num_microbatches"];
  if (options.schedule === "auto") {
    delete options.schedule;
    auto.push("schedule", "chunks");
  }
  if (auto.length) options.auto = auto;
  if (find("replicas").value === "any") options.max_replicas = null;
  if (find("robust").checked) options.robust = true;
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
  find("of-as").hidden = !isEstimated();
  let sent;
  try {
    showSample();
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
    if (file.name.endsWith(".pt2")) throw new Error(`Capture ${file.name} where torch is (stagewright capture ${file.name} -o graph.json), and take graph.json.`);
    const document = JSON.parse(await file.text());
    const kind = String(document.schema_version ?? "").match(/^stagewright\.(profile|graph)\//)?.[1];
    if (!kind) throw new Error(`${file.name} is neither a profile nor a graph of Stagewright`);
    upload = { [kind]: document };
    say(`${file.name} is taken.`);
  } catch (error) {
    say(error instanceof SyntaxError ? `${file.name} is not JSON: ${error.message}` : error.message, true);
  }
  tell();
  kept.write();
}

/** What estimates take the devices for, below their field; gives what cannot be told. */
async function tellTaken() {
  const place = find("taken");
  place.textContent = "";
  const wanted = find("cluster").value;
  if (!isEstimated() || find("as").value || isUnfinished(wanted.trim())) return [];
  try {
    const found = cluster.edited ?? (await ask(`/v1/clusters?devices=${encodeURIComponent(wanted.trim())}`))[0];
    if (wanted !== find("cluster").value) return [];
    const { words, unknown } = takenFor(catalogue, found.devices);
    const what = unknown.map((kind) => `“${kind}”`).join(", ");
    place.textContent = unknown.length ? `The catalogue has no data for ${what}: choose a device to estimate with.` : words;
    return unknown;
  } catch {
    return []; // planning says what is wrong with them
  }
}

/** What is missing before the service is asked: fields, and what to do. */
async function missing(sent) {
  if (find("source").value === "file" && !upload) return [[find("file"), "Choose a file first."]];
  if (sent.profile_id === "") return [[find("profile-id"), "Choose a profile; ids are listed on the Profiles page."]];
  const unknown = await tellTaken();
  if (!unknown.length) return [];
  const why = find("taken").textContent;
  find("taken").textContent = ""; // it is said in red now
  if (unknown.some((kind) => /^0+(\.0+)?[A-Z]/i.test(kind))) return [[find("cluster"), "with 0 bytes they hold nothing: say what memory they have, such as 4x24GB."]];
  return [[find("as"), why]];
}

const elapsed = new Elapsed(find("submit"), find("stop"), find("timer"));
find("new").addEventListener("submit", async (event) => {
  event.preventDefault();
  clearMarks();
  const signal = elapsed.start();
  say("Planning …");
  try {
    const sent = body();
    const lacks = await missing(sent);
    if (lacks.length) {
      mark(lacks);
      return;
    }
    const headers = sent.profiling ? { Prefer: "respond-async" } : {}; // measured: watch the job
    const [, response] = await askForPlan({ body: sent, headers, signal });
    location.assign(placeOf(response));
  } catch (error) {
    if (error.document?.errors?.length || error.message.includes("--estimate-for")) markProblem(error);
    else say(...wordsOf(error));
  } finally {
    elapsed.end();
  }
});
find("find-model").addEventListener("input", findModel);
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
const soon = settled(READ_MS, tellTaken);
find("new").addEventListener("input", () => {
  clearMarks();
  tell();
  soon();
  kept.write();
});

showFamily();
await kept.read();
kept.write(); // what was chosen before this program had come
const isLost = find("source").value === "file" && !upload;
say([...address.refused, isLost ? "Choose the file again; browsers do not keep files." : ""].join(" ").trim());
tell();
tellTaken();
document.body.dataset.ready = "yes";
