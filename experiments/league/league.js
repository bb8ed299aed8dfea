"use strict";
// A table is sorted by the column whose head is clicked: numbers by size, from the largest, what is missing last.
const shown = (cell) => cell.textContent.trim();
const size = (text) => parseFloat(text.replaceAll("−", "-").replaceAll(",", ""));
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = shown(head);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const rows = [...table.tBodies[0].rows];
      const values = new Map(rows.map((row) => [row, shown(row.cells[column])]));
      const known = rows.filter((row) => values.get(row) !== "–");
      const numbers = known.every((row) => !Number.isNaN(size(values.get(row))));
      const down = numbers ? head.ariaSort !== "descending" : head.ariaSort === "ascending";
      const compare = numbers
        ? (a, b) => size(values.get(a)) - size(values.get(b))
        : (a, b) => values.get(a).localeCompare(values.get(b));
      known.sort((a, b) => (down ? -compare(a, b) : compare(a, b)));
      table.tBodies[0].append(...known, ...rows.filter((row) => !known.includes(row)));
      heads.forEach((other) => { other.ariaSort = null; });
      head.ariaSort = down ? "descending" : "ascending";
    });
  });
}
// One track of the table at a time.
for (const choice of document.querySelectorAll("select.only")) {
  choice.hidden = false;
  choice.addEventListener("change", () => {
    for (const row of document.querySelectorAll("table.sortable tbody tr")) {
      row.hidden = choice.value !== "" && row.dataset.track !== choice.value;
    }
  });
}
// A click on an entry's name shows its curve, with its interval, and hides those that were not chosen; one on a group's
// name chooses the group.
const choose = (entries) => {
  const parts = [...document.querySelectorAll("[data-entry]")].filter((part) => entries.includes(part.dataset.entry));
  const on = !parts.every((part) => part.classList.contains("on"));
  parts.forEach((part) => part.classList.toggle("on", on));
};
for (const name of document.querySelectorAll(".keys span")) {
  const keys = name.matches(".group") ? [...name.parentElement.querySelectorAll(".key")] : [name];
  const click = () => choose(keys.map((key) => key.dataset.entry));
  name.tabIndex = 0;
  name.setAttribute("role", "button");
  name.addEventListener("click", click);
  name.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault(); // Space would scroll
    click();
  });
}
