// Placement epochs in words, for the run's page and the list of steps.
import { el } from "./dom.js";

const VERDICTS = { accepted: "accepted", regressed: "regressed", not_enough_evidence: "not enough evidence" };

export function epochState({ state, verdict }) {
  return el("span", { class: `badge epoch ${verdict || state}` }, verdict ? VERDICTS[verdict] || verdict : state);
}

export function epochText({ previous_version, rollback_version, state, verdict }) {
  let text = { proposed: "proposed, not in force", announced: "announced, no step joined yet", applied: "in force, not judged yet",
    judged: "steps before and after compared" }[state] || state;
  if (previous_version) text += `; before it epoch ${previous_version}`;
  if (verdict === "regressed" && rollback_version) text += `; go back to epoch ${rollback_version}`;
  return text;
}

// Step -> epochs that begin there: at the listed step itself, or between it and the next older listed one.
export function epochsByRow(rows, epochs) {
  const steps = rows.map((row) => row.step).sort((a, b) => a - b);
  const found = new Map();
  for (const epoch of epochs) {
    const index = steps.findIndex((step) => step >= epoch.step);
    // Older than every row: it belongs to another page.
    if (index < 0 || (index === 0 && steps[0] !== epoch.step)) continue;
    found.set(steps[index], [...(found.get(steps[index]) || []), epoch]);
  }
  return found;
}
