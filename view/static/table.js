// A table sorted by its headings; long ones show their beginning until asked for more.
import { make } from "./dom.js";

const FIRST_ROWS = 200;

/**
 * Fills a table.
 * columns: {title, value(row), text(row)}; rows: anything. Sorting is stable and by value.
 */
export function sortable(table, more, columns, rows, start, changed) {
  let [sorted, direction] = start ?? [0, 1];
  let all = false;
  const head = table.tHead;
  const body = table.tBodies[0];

  function order(column) {
    direction = column === sorted ? -direction : 1;
    sorted = column;
    changed?.(sorted, direction);
    draw();
  }

  function draw() {
    head.replaceChildren(make("tr", {}, ...columns.map((column, index) => {
      const state = index !== sorted ? "none" : direction > 0 ? "ascending" : "descending";
      const button = make("button", { type: "button", onclick: () => order(index) }, column.title);
      return make("th", { scope: "col", "aria-sort": state }, button);
    })));
    const { value } = columns[sorted];
    const ordered = [...rows].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      return direction * (a < b ? -1 : a > b ? 1 : 0);
    });
    const shown = all ? ordered : ordered.slice(0, FIRST_ROWS);
    body.replaceChildren(...shown.map((row) => make("tr", {}, ...columns.map((column) => {
      const cell = column.text(row);
      return make("td", {}, cell);
    }))));
    const left = rows.length - shown.length;
    more.replaceChildren(...(left > 0 ? [make("button", {
      type: "button",
      onclick: () => { all = true; draw(); },
    }, `Show ${left} more`)] : []));
  }

  draw();
  return { update(next) { rows = next; draw(); } };
}
