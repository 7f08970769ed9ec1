// All runs of the store.
import { ask } from "./api.js";
import { el, message, note, refill, table } from "./dom.js";
import { clock, count, length, whole } from "./format.js";
import { rowKeys } from "./row_keys.js";
import { runPlace } from "./state.js";

export const title = () => "moetrace: runs";

export async function show(main, place, { signal }) {
  const { runs } = await ask("runs", {}, signal);
  if (!runs.length) return refill(main, nothing());
  const rows = runs.map((run, index) => {
    const counted = run.steps - run.warmup_steps;
    return el("tr", { tabindex: index ? -1 : 0, "data-key": `run ${run.run_id}`, "data-href": runPlace(run.run_id) },
      el("td", { class: "name" }, el("a", { href: runPlace(run.run_id), tabindex: -1 }, run.run_id)),
      el("td", {}, run.model || "unnamed model"),
      el("td", { class: "number" }, whole(run.ranks)),
      el("td", {}, run.forward_modes.join(", ")),
      el("td", { class: "number" }, whole(run.steps)),
      el("td", { class: "number" }, counted ? length(run.step_median_ns) : "-"),
      el("td", { class: "number" }, counted ? length(run.step_p95_ns) : "-"),
      el("td", {}, counted ? `clear in ${whole(run.clear_steps)} of ${whole(counted)}` : "warm-up only"),
      el("td", {}, clock(run.last_unix_ms)));
  });
  const listed = table(["Run", "Model", "#Ranks", "Modes", "#Steps", "#Median step", "#95 %", "Evidence", "Newest step, UTC"],
    rows, { "aria-label": "Runs" });
  rowKeys(listed);
  refill(main, el("h1", {}, `${count(runs.length, "run")} in this collector's store`),
    el("section", {}, listed), note("Enter or a click opens a run; the one with the newest step comes first."));
}

function nothing() {
  const endpoint = location.origin;
  return message("No run yet",
    "No step has been joined and stored. Point the ranks at this collector, and this page fills by itself:",
    el("pre", {}, `import moetrace\n\nmoetrace.init(run_id="run-1", endpoint="${endpoint}")\nmoetrace.instrument(model)`),
    el("p", {}, "No model at hand? ", el("code", {}, "moetrace demo"), " runs one over four processes."));
}
