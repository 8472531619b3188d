// Which field of the form an error of the service is about, and marking it.
import { say } from "./api.js";
import { visible } from "./format.js";
import { make } from "./dom.js";

/** Pointers into a request's body, and the fields that fill them. */
const FIELDS = [
  [/^\/(cluster|devices)/, () => "#cluster"], [/^\/options\/num_microbatches/, () => "#microbatches"],
  [/^\/options\/max_replicas/, () => "#replicas"], [/^\/options\/(schedule|objective|recompute|robust)/, (name) => `#${name}`],
  [/^\/estimate/, () => "#as"], [/^\/profile_id/, () => "#profile-id"], [/^\/(profile|graph|graph_id)(\/|$)/, () => "#file"],
  [/^\/sequence/, () => "#length"], [/^\/sample/, () => "#size"],
  [/^\/model\/config\/(\w+)/, (name) => `#config [name="${name}"]`], [/^\/model/, () => "#family"],
];

function fieldOf(pointer) {
  for (const [pattern, selector] of FIELDS) {
    const found = pointer.match(pattern);
    const field = found && document.querySelector(selector(found[1]));
    if (field) return field;
  }
  return null;
}

/** The words of a field's label, without its hint. */
const labelOf = (field) => [...field.closest("label").childNodes].find((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())?.data.trim() ?? "";

/** What the service says to who types commands, to who fills a form. */
const forForm = (text) => text.replace(" (--estimate-for)", " under “Estimated as”");

export function clearMarks() {
  const marks = document.querySelectorAll(".field-error");
  if (marks.length) say(""); // the message line repeats them
  for (const mark of marks) mark.remove();
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
}

/** Marks fields, each with its sentence, goes to the first, and says all in the message line. */
export function mark(errors) {
  clearMarks();
  const lines = errors.map(([field, text], number) => {
    if (!field) return text;
    const id = `field-error-${number}`;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-describedby", id);
    field.closest("label").append(make("span", { class: "field-error", id }, visible(text)));
    for (let around = field.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
    return `${labelOf(field)}: ${text}`;
  });
  say(lines.join(" "), true);
  errors.find(([field]) => field)?.[0].focus();
}

/** Marks what a problem of the service names; an error without fields is said alone. */
export function markProblem(error) {
  const named = (error.document?.errors ?? []).map((one) => [fieldOf(one.pointer ?? ""), forForm(one.detail)]);
  const isForDevices = error.message.includes("--estimate-for");
  if (isForDevices) mark([[document.getElementById("as"), forForm(error.message)]]);
  else if (named.length) mark(named);
  else mark([[null, forForm(error.message)]]);
}
