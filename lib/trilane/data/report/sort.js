"use strict";
// A click (or Enter) on a heading sorts the rows by its column, numbers as numbers; a second one reverses them.
for (const head of document.querySelectorAll(".sortable th")) {
  const sort = () => {
    const body = head.closest("table").tBodies[0], at = head.cellIndex, down = head.ariaSort === "ascending";
    const text = (row) => row.cells[at].textContent.trim();
    const rows = [...body.rows].sort((a, b) => text(a).localeCompare(text(b), "en", { numeric: true }));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    body.append(...(down ? rows.reverse() : rows));
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
}
