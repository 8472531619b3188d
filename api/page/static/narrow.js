// Leaves of a long list of profiles those that have every word of a search.
const select = document.getElementById("profile-id");
const box = document.getElementById("profile-find");
const options = [...select.options];

box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (option) => words.every((word) => option.text.toLowerCase().includes(word));
  const chosen = select.value;
  select.replaceChildren(...options.filter((option) => option.value === "" || option.value === chosen || fits(option)));
  select.value = chosen;
});
