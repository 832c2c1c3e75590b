"use strict";
// A click (or Enter) on a heading sorts the rows by its column, numbers as numbers; a second one reverses them.
for (const head of document.querySelectorAll(".sortable th")) {
  const sort = () => {
    const body = head.closest("table").tBodies[0], at = head.cellIndex, down = head.ariaSort === "ascending";
    const text = (row) => row.cells[at].textContent.trim().replace(/(?<=\d),(?=\d{3})/g, "");
    const order = (a, b) => a - b || a.localeCompare(b, "en", { numeric: true });
    const rows = [...body.rows].filter((row) => text(row)).sort((a, b) => order(text(a), text(b)));
    const blank = [...body.rows].filter((row) => !text(row));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    body.append(...(down ? rows.reverse() : rows), ...blank);
  };
  head.tabIndex = 0;
  head.role = "button";
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
}
