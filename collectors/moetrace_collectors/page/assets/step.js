// One step: the verdict, the timeline of some ranks, every rank in short, the costliest exchanges.
import { ask } from "./api.js";
import { badge, el, note, phaseName, refill, section, table } from "./dom.js";
import { clock, count, duration, layerCell, length, percent, whole } from "./format.js";
import { Lanes } from "./lanes.js";
import { phaseBar } from "./overview.js";
import { ribbon } from "./ribbon.js";
import { go, remember, runPlace } from "./state.js";

export const title = (place) => `moetrace: step ${place.step} of ${place.run}`;

// The verdict first, as it is quick; lanes of many layers take longer and fill in below it.
export async function show(main, place, { signal, isNew }) {
  const asked = { run: place.run, step: place.step };
  const drawing = ask("timeline", { ...asked, ranks: place.ranks }, signal);
  drawing.catch(() => { /* awaited below, or not wanted any more */ });
  const data = await ask("step", asked, signal);
  const said = el("p", { id: "said", class: "said", role: "status", "aria-live": "polite" });
  const across = section("Across ranks", el("p", { class: "quiet" }, "Laying the lanes."));
  const every = section(`All ${count(data.budgets.length, "rank")} in short`, el("p", { class: "quiet" }, "One moment."));
  const fresh = isNew || main.dataset.step !== place.step;
  const parts = [steering(place, data), verdict(data), tiles(data.step), across, every,
    el("div", { class: "columns" },
      section("The critical path by phase", phaseBar(data.phase_ns, "of this step")),
      section("The costliest exchanges", ...exchanges(data)))];
  main.dataset.step = place.step;
  if (fresh) refill(main, parts);
  const timeline = await drawing;
  across.replaceChildren(el("h2", {}, "Across ranks"), ...lanesOf(place, data.step, timeline, said).filter(Boolean));
  every.replaceChildren(every.firstChild, ...short(place, data, timeline, said).filter(Boolean));
  if (!fresh) refill(main, parts); // other ranks of the same step: no flicker in between
}

function verdict(data) {
  return el("div", { class: `verdict ${data.step.evidence}` },
    el("h1", {}, data.sentence),
    el("p", { class: "why" }, badge(data.step.evidence), " ", data.why),
    data.next && el("p", { class: "runner-up" }, data.next));
}

export function news(main, place, { last_step }) {
  const link = document.getElementById("newest");
  if (!link) return;
  link.href = runPlace(place.run, { view: "step", step: last_step });
  link.textContent = `Newest: ${last_step}`;
  link.hidden = false;
}

function steering(place, data) {
  const to = (step, text, key) => step === null
    ? el("span", { class: "quiet" }, text)
    : el("a", { href: runPlace(place.run, { view: "step", step }), "data-key": key }, `${text} ${step}`);
  return el("nav", { class: "steering", "aria-label": "Steps" },
    el("a", { href: runPlace(place.run, { view: "steps" }), "data-key": "all-steps" }, "All steps"),
    to(data.before, "\u2190 step", "step-before"),
    el("b", {}, `Step ${data.step.step}`),
    to(data.behind, "\u2192 step", "step-next"),
    el("a", { id: "newest", href: "?", "data-key": "newest", hidden: true }, ""));
}

function tiles(step) {
  const items = [[length(step.step_ns), "length", `${step.forward_mode}${step.warmup ? ", warm-up" : ""}`],
    [duration(step.extension_ns), "extension", `${percent(step.step_ns ? step.extension_ns / step.step_ns : 0)} of the step, by uneven ranks`]];
  if (step.suspect) {
    items.push([duration(step.suspect.worth_ns), `worth of rank ${step.suspect.rank}`, "given back if it were average in this phase"]);
  }
  items.push([clock(step.start_unix_ms).slice(11), "started, UTC", clock(step.start_unix_ms).slice(0, 10)]);
  if (step.num_missing) {
    items.push([whole(step.num_missing), "ranks missing", step.missing_ranks.join(", ") + (step.num_missing > step.missing_ranks.length ? ", ..." : "")]);
  }
  return el("dl", { class: "tiles" }, items.map(([value, name, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, value), el("span", {}, more)))));
}

function lanesOf(place, step, drawn, said) {
  if (!drawn.lanes.some((lane) => lane.marks.length)) {
    return [note("The phase rows of this step are not in the store: they may have passed their time to live."), said];
  }
  const lanes = new Lanes(drawn, {
    suspect: step.suspect, said,
    onWindow: (start, end) => remember({ zoom: end ? `${Math.round(start)}-${Math.round(end)}` : "" }),
  });
  const [start, end] = (place.zoom || "").split("-").map(Number);
  if (end > start) lanes.look(start, end);
  const button = (text, act, key) => el("button", { type: "button", onclick: act, "data-key": key }, text);
  const tools = el("p", { class: "tools" },
    button("Whole step", () => lanes.whole(), "whole"),
    drawn.window && button("Costliest exchange", () => { lanes.look(...drawn.window); lanes.onWindow(...drawn.window); }, "closer"),
    button("Zoom in", () => lanes.zoom(0.5), "zoom-in"), button("Zoom out", () => lanes.zoom(2), "zoom-out"),
    place.ranks && button("Chosen ranks only: back to all", () => go({ ranks: "" }), "lanes-back"));
  const used = new Set(drawn.lanes.flatMap((lane) => lane.marks.map((mark) => drawn.phases[mark[1]])));
  lanes.narrow = el("span", { hidden: true }, el("i", { class: "swatch swatch-narrow" }), "short phases: zoom in to tell them apart");
  const legend = el("p", { class: "legend" }, drawn.phases.filter((phase) => used.has(phase)).map(phaseName),
    el("span", {}, el("i", { class: "swatch swatch-wait" }), "wait inside an exchange"),
    el("span", {}, el("i", { class: "swatch swatch-critical" }), "critical path (dashed: ambiguous)"), lanes.narrow);
  let text = "Lanes are laid so that the ends of shared exchanges meet. A rank that waits long is early: the slow one hardly waits. "
    + "Drag or use the arrow keys; double click, or Ctrl and the wheel, zooms.";
  if (drawn.hidden_ranks) {
    text += ` ${count(drawn.hidden_ranks, "more rank")} took part: pick them below; the path has gaps where it ran over them. `
      + "Expert-parallel groups do not wait for each other, so their lanes may begin apart.";
  }
  return [tools, legend, lanes.canvas, said, note(text)];
}

function short(place, data, timeline, said) {
  if (!data.budgets.length) return [note("No rank's phase rows are in the store.")];
  const drawn = new Set(timeline.lanes.map((lane) => lane.rank));
  const toggle = (rank) => {
    const next = new Set(drawn);
    if (next.has(rank)) next.delete(rank); else next.add(rank);
    if (next.size) go({ ranks: [...next].sort((a, b) => a - b).slice(0, 64).join(",") });
  };
  return [
    el("p", { class: "legend" }, el("span", {}, el("i", { class: "swatch p-outside" }), "work"),
      data.step.suspect && el("span", {}, el("i", { class: "swatch p-expert_gemm" }), "work of the named rank (triangle)"),
      el("span", {}, el("i", { class: "swatch p-dispatch" }), "transfer"),
      el("span", {}, el("i", { class: "swatch swatch-wait" }), "wait for the others")),
    ribbon(data.budgets, { step: place.step, drawn, suspect: data.step.suspect, said, toggle }),
    note(`${waiting(data)}A bar below a column marks a rank that is drawn above; click a column `
      + "(or Enter) to add it or take it away."),
  ];
}

// The slow one hardly waits; only ranks of one group wait for each other.
function waiting({ budgets, step }) {
  const named = step.suspect && budgets.find(([rank]) => rank === step.suspect.rank);
  if (!named) return "";
  const others = budgets.filter(([rank, group]) => group === named[1] && rank !== named[0]).map(([, , , , wait]) => wait)
    .sort((a, b) => a - b);
  if (!others.length) return "";
  return `Rank ${named[0]} waited ${duration(named[4])} in its exchanges, the others of its group a median `
    + `${duration(others[Math.floor(others.length / 2)])}. `;
}

function exchanges(data) {
  if (!data.exchanges.length) return [note("No exchange of this step was extended.")];
  const rows = data.exchanges.map((item) => el("tr", {},
    el("td", {}, `${item.phase}${item.ambiguous ? " (ambiguous)" : ""}`),
    el("td", { class: "number" }, layerCell(item.layer)),
    el("td", { class: "number" }, item.rank >= 0 ? `${item.rank}` : "cannot be told"),
    el("td", {}, phaseName(item.work_phase)),
    el("td", { class: "number" }, duration(item.extension_ns)),
    el("td", { class: "number" }, duration(item.transfer_ns))));
  return [table(["Exchange", "#Layer", "#Waited for rank", "Most of all in", "#Extension", "#Transfer"], rows),
    note("Extension: the work of the rank that all waited for, above the mean.")];
}
