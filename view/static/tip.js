// Words beside the pointer, the same element for every chart.
import { make } from "./dom.js";

const AWAY = 14;
let bubble = null;

/** Shows words beside the pointer, inside the window; none hides them. */
export function tip(event, text) {
  if (!text) {
    bubble?.remove();
    bubble = null;
    return;
  }
  bubble ??= document.body.appendChild(make("div", { class: "hover", "aria-hidden": "true" }));
  bubble.textContent = text;
  const { offsetWidth: width, offsetHeight: height } = bubble;
  const left = event.clientX + AWAY + width > innerWidth - 4 ? event.clientX - AWAY - width : event.clientX + AWAY;
  const top = event.clientY + AWAY + height > innerHeight - 4 ? event.clientY - AWAY - height : event.clientY + AWAY;
  bubble.style.left = `${Math.max(4, left)}px`;
  bubble.style.top = `${Math.max(4, top)}px`;
}

/** Has words follow the pointer over an element; words(event) gives them. */
export function hoverable(element, words) {
  element.addEventListener("pointermove", (event) => tip(event, words(event)));
  for (const end of ["pointerleave", "pointercancel"]) element.addEventListener(end, (event) => tip(event, ""));
}
