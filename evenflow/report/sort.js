function sortBy(head) {
  const body = head.closest("table").tBodies[0], at = head.cellIndex;
  const key = row => row.cells[at].textContent.replaceAll(",", "");
  const rows = [...body.rows], sign = head.dataset.down ? -1 : 1;
  head.dataset.down = sign > 0 ? "1" : "";
  rows.sort((a, b) => sign * (parseFloat(key(a)) - parseFloat(key(b)) ||
    key(a).localeCompare(key(b), undefined, {numeric: true})));
  body.append(...rows);
}
