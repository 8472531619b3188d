// A table sorted by its headings; long ones show their beginning until asked for more.
import { make } from "./dom.js";

const FIRST_ROWS = 200;

/** The column and the direction that a parameter names: "forward", or "-forward" to begin with the most. */
function sortingOf(address, name, columns) {
  const text = address.get(name);
  if (text === null) return [0, 1];
  const found = columns.findIndex((column) => column.key === text.replace(/^-/, ""));
  if (found < 0) {
    address.refuse([name], `the order of ${columns[0].title}`);
    return [0, 1];
  }
  return [found, text.startsWith("-") ? -1 : 1];
}

/**
 * Fills a table.
 * columns: {key, title, value(row), text(row)}; rows: anything. Sorting is stable and by value.
 * The address has the sorting under a name, and whether all rows are shown.
 */
export function sortable(table, more, columns, rows, address, name) {
  let [sorted, direction] = sortingOf(address, name, columns);
  let all = address.get(`${name}-rows`) === "all";
  const body = table.tBodies[0];
  const heads = columns.map((column, index) =>
    make("th", { scope: "col" }, make("button", { type: "button", onclick: () => order(index) }, column.title)));
  table.tHead.replaceChildren(make("tr", {}, ...heads));

  function order(column) {
    direction = column === sorted ? -direction : 1;
    sorted = column;
    const isUsual = sorted === 0 && direction === 1;
    address.set({ [name]: isUsual ? null : (direction < 0 ? "-" : "") + columns[sorted].key });
    draw();
  }

  function draw() {
    heads.forEach((head, index) => {
      head.ariaSort = index !== sorted ? "none" : direction > 0 ? "ascending" : "descending";
    });
    const { value } = columns[sorted];
    const ordered = [...rows].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      return direction * (a < b ? -1 : a > b ? 1 : 0);
    });
    const shown = all ? ordered : ordered.slice(0, FIRST_ROWS);
    body.replaceChildren(...shown.map((row) => make("tr", {}, ...columns.map((column) => {
      const cell = column.text(row);
      return make("td", column.isName ? { class: "name", title: cell } : {}, cell);
    }))));
    const left = rows.length - shown.length;
    more.replaceChildren(...(left > 0 ? [make("button", {
      type: "button",
      onclick: () => {
        all = true;
        address.set({ [`${name}-rows`]: "all" });
        draw();
      },
    }, `Show ${left} more`)] : []));
  }

  draw();
  return { update(next) { rows = next; draw(); } };
}
