// On every page: wide tables fade at their edge, and a dropped plan or profile is shown unless the
// page itself takes files.
import { markScrolling } from "./scrolling.js";

for (const table of document.querySelectorAll(".scroll:not(#graph)")) markScrolling(table);

for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
addEventListener("drop", async (event) => {
  const [file] = event.dataTransfer?.files ?? [];
  if (!file || document.getElementById("new")) return;
  const text = document.createElement("textarea");
  text.name = "document";
  text.value = await file.text();
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: "/plans/file", hidden: true });
  form.append(text);
  document.body.append(form);
  form.submit();
});
