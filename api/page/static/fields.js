// What is in fields of a form, as text.

export const textOf = (input) => (input.type === "checkbox" ? String(input.checked) : input.value);

/** Writes text into a field; whether it can be there. */
export function put(input, text) {
  if (input.type === "checkbox") input.checked = text === "true";
  else input.value = text;
  return textOf(input) === text && input.checkValidity();
}
