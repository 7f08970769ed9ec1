// Tables whose rows open something: one row is in the tab order, arrows move, Enter opens.

export function rowKeys(holder) {
  const body = holder.querySelector("tbody");
  const move = (from, to) => {
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  };
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-href]");
    if (!row) return;
    const rows = [...body.querySelectorAll("tr[data-href]")];
    const index = rows.indexOf(row);
    const to = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); move(row, rows[to]); }
    else if (event.key === "Enter" && event.target === row) { event.preventDefault(); row.querySelector("a").click(); }
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-href]");
    if (row && !event.target.closest("a") && !String(getSelection())) row.querySelector("a").click();
  });
}
