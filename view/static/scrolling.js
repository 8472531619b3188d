// What is wider than its place says so: its edge fades where more is to be seen.

/** Keeps the classes "more-left" and "more-right" true; tells of every change. */
export function markScrolling(element, told) {
  const mark = () => {
    const { scrollLeft, scrollWidth, clientWidth } = element;
    element.classList.toggle("more-left", scrollLeft > 1);
    element.classList.toggle("more-right", scrollLeft + clientWidth < scrollWidth - 1);
    told?.();
  };
  element.addEventListener("scroll", mark, { passive: true });
  const sizes = new ResizeObserver(mark);
  sizes.observe(element);
  for (const child of element.children) sizes.observe(child);
  mark();
}
