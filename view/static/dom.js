// Making elements, and finding values by the path an element names.

/** An element with attributes, properties that begin with "on", and children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** What is at "stages.0.memory_bytes" of an object. */
export function at(object, path) {
  return path.split(".").reduce((found, name) => found?.[name], object);
}

/** A colour of the style sheet, which knows whether it is dark. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const FONT = "12px system-ui, sans-serif";

/** Fits a canvas to its box, sharp on any screen, and gives what draws on it. */
export function fitted(canvas, height) {
  const width = Math.max(1, canvas.parentElement.clientWidth);
  const ratio = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  const context = canvas.getContext("2d");
  if (canvas.width === across && canvas.height === down) context.reset(); // nothing is laid out anew
  else {
    canvas.width = across;
    canvas.height = down;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = FONT;
  return [context, width];
}

/** Calls once things have come to rest. */
export function settled(milliseconds, call) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
}

/** Calls at once, and then once in a while at most; the last time is not lost. */
export function paced(milliseconds, call) {
  let timer = 0;
  let isWaiting = false;
  const start = () => {
    isWaiting = false;
    call();
    timer = setTimeout(() => {
      timer = 0;
      if (isWaiting) start();
    }, milliseconds);
  };
  return () => {
    if (timer) isWaiting = true;
    else start();
  };
}
