// Name, tags and notes of a stored plan, and its end.
import { ask } from "./api.js";

const form = document.getElementById("labels");
const said = document.getElementById("labels-said");
const path = `/v1/plans/${document.body.dataset.plan}`;
const end = document.getElementById("delete");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const { name, tags, notes } = form.elements;
  const body = {
    name: name.value.trim() || null,
    tags: tags.value.split(/\s+/).filter(Boolean),
    notes: notes.value.trim() || null,
  };
  try {
    await ask(path, { method: "PATCH", body });
    document.getElementById("title").textContent = body.name ?? name.placeholder;
    said.textContent = "Saved.";
  } catch (error) {
    said.textContent = error.message;
  }
});

/** Two clicks, since a plan that is deleted does not come back. */
end.addEventListener("click", async () => {
  if (end.dataset.sure === undefined) {
    end.dataset.sure = "";
    end.textContent = "Delete it for good";
    return;
  }
  try {
    await ask(path, { method: "DELETE" });
    location.assign("/plans");
  } catch (error) {
    said.textContent = error.message;
  }
});

// Only now does anybody listen.
document.getElementById("save").disabled = false;
end.disabled = false;
