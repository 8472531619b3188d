// A plan or a profile dropped on any page is shown, unless the page itself takes files.

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
