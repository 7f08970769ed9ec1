// A run's steps: filters, pages, a table that the keyboard moves through.
import { ask } from "./api.js";
import { badge, el, phaseName, refill, table } from "./dom.js";
import { clockShort, count, duration, layerCell, length, percent, whole } from "./format.js";
import { epochState, epochText, epochsByRow } from "./epochs.js";
import { rowKeys } from "./row_keys.js";
import { go, runPlace, state } from "./state.js";

export const title = (place) => `moetrace: steps of ${place.run}`;

const SELECTS = [["evidence", "Evidence"], ["cause", "Cause"], ["phase", "Phase"], ["mode", "Mode"]];
const ORDERS = [["newest", "newest first"], ["worth", "costliest first"], ["length", "longest first"], ["oldest", "oldest first"]];
const FILTERS = ["text", "evidence", "cause", "phase", "mode", "rank", "slower_ms"];
const COLUMNS = ["step", "time", "mode", "duration", "length", "evidence", "rank", "phase", "layer", "cause", "worth", "share"];
let parts = null; // of this view while it is shown
let typing = 0;

export async function show(main, place, { signal, isNew }) {
  const asked = Object.fromEntries([...FILTERS, "order", "page", "upto"].map((name) => [name, place[name]]));
  const data = await ask("steps", { run: place.run, ...asked }, signal);
  if (isNew || !parts || !main.contains(parts.form)) {
    parts = { form: form(data.facets), count: el("output", { id: "step-count" }), list: el("div", { id: "step-list" }),
      fresh: el("button", { type: "button", class: "fresh", hidden: true, onclick: () => go({ page: "", upto: "" }) }) };
    refill(main, el("h1", {}, "Steps"), parts.form, el("p", { class: "count", role: "status" }, parts.count, parts.fresh),
      parts.list);
  }
  fillForm(place);
  parts.fresh.hidden = true;
  parts.data = data;
  fillList(place, data);
  return data.newest_step;
}

// New steps go on top of the newest page; anybody further down, or with the focus on a row, is told instead.
export function news(main, place, { last_step }) {
  if (!parts) return;
  const busy = place.page > 0 || place.upto || (place.order || "newest") !== "newest"
    || parts.list.contains(document.activeElement) || scrollY > 200;
  if (!busy) {
    ask("steps", { run: place.run, ...Object.fromEntries(FILTERS.map((name) => [name, place[name]])) })
      .then((data) => { parts.data = data; fillList(state(), data); })
      .catch(() => { /* the next poll says it */ });
    return;
  }
  const since = last_step - parts.data.newest_step;
  parts.fresh.hidden = since <= 0;
  parts.fresh.textContent = `New steps up to ${last_step}: show`;
}

function form(facets) {
  let typed = {}; // and not yet in the address; whoever is quick fills two fields before the first is asked for
  const change = (name, value) => {
    clearTimeout(typing);
    const changes = { ...typed, [name]: value, page: "", upto: "" };
    typed = {};
    go(changes);
  };
  const later = (name) => (event) => {
    clearTimeout(typing);
    typed[name] = event.target.value.trim();
    typing = setTimeout(() => change(name, typed[name]), 300);
  };
  const field = (name, text, control) => el("label", { class: `field field-${name}` }, el("span", {}, text), control);
  const select = (name, text, options) => field(name, text,
    el("select", { name, "data-key": name, onchange: (event) => change(name, event.target.value) },
      options.map(([value, label]) => el("option", { value }, label))));
  return el("form", { class: "filters", role: "search", "aria-label": "Filter steps", onsubmit: (event) => event.preventDefault() },
    field("text", "Search", el("input", { type: "search", name: "text", "data-key": "text", placeholder: "step number or words, as in: rank 2 expert_gemm",
      autocomplete: "off", maxlength: 200, oninput: later("text") })),
    SELECTS.map(([name, text]) => select(name, text, [["", "all"], ...facets[name].map((word) => [word, word])])),
    field("rank", "Rank", el("input", { type: "number", name: "rank", "data-key": "rank", min: 0, step: 1, placeholder: "all", oninput: later("rank") })),
    field("slower_ms", "At least, ms", el("input", { type: "number", name: "slower_ms", "data-key": "slower_ms", min: 0, step: "any", placeholder: "0", oninput: later("slower_ms") })),
    select("order", "Order", ORDERS),
    el("button", { type: "button", "data-key": "reset",
      onclick: () => { typed = {}; clearTimeout(typing); reset(); } }, "Reset"));
}

function reset() {
  go(Object.fromEntries([...FILTERS, "order", "page", "upto"].map((name) => [name, ""])));
}

function fillForm(place) {
  for (const control of parts.form.elements) {
    if (!control.name || control === document.activeElement) continue;
    const value = place[control.name] || (control.name === "order" ? "newest" : "");
    if (control.tagName === "SELECT" && ![...control.options].some((option) => option.value === value)) {
      control.append(el("option", { value }, value));
    }
    control.value = value;
  }
}

function fillList(place, data) {
  const filtered = FILTERS.some((name) => place[name]);
  parts.count.textContent = filtered ? `${count(data.total, "step")} found` : count(data.total, "step");
  if (!data.rows.length) {
    refill(parts.list, el("div", { class: "empty" }, el("p", {}, filtered
      ? "No step fits these filters: take one away, or Reset."
      : "No step has been joined yet: a step is joined when its last rank arrives or its window passes.")));
    return;
  }
  const longest = Math.max(...data.rows.map((row) => row.step_ns), 1);
  const begun = epochsByRow(data.rows, data.epochs);
  const rows = data.rows.map((row, index) => stepRow(place, row, longest, index, begun.get(row.step) || []));
  const listed = table(["#Step", "UTC", "Mode", "#Length", "", "Evidence", "#Rank", "Phase", "#Layer", "Cause", "#Worth", "#Share"], rows, { id: "step-table", "aria-label": "Steps. Up and down move, Enter opens." });
  listed.querySelectorAll("thead th").forEach((head, index) => head.classList.add(COLUMNS[index]));
  rowKeys(listed);
  refill(parts.list, listed, pager(place, data));
}

function stepRow(place, row, longest, index, epochs) {
  const href = runPlace(place.run, { view: "step", step: row.step });
  const { suspect } = row;
  const named = suspect && row.evidence !== "insufficient";
  const cost = named ? Math.min(1, suspect.worth_ns / row.step_ns) : 0;
  const open = (event) => { event.preventDefault(); event.stopPropagation(); go({ run: place.run, view: "step", step: row.step }, { keep: false }); };
  return el("tr", { tabindex: index ? -1 : 0, "data-key": `step ${row.step}`, "data-href": href, class: row.warmup ? "warm-up" : null },
    el("td", { class: "number" }, el("a", { href, tabindex: -1, onclick: open }, `${row.step}`)),
    el("td", { class: "time" }, clockShort(row.start_unix_ms)),
    el("td", { class: "mode" }, row.forward_mode, row.warmup ? " (warm-up)" : ""),
    el("td", { class: "number" }, length(row.step_ns)),
    el("td", { class: "length", "aria-hidden": "true" }, el("div", { class: "length-bar", vars: { "--part": row.step_ns / longest } },
      named && el("div", { class: `p-${suspect.phase}`, vars: { "--part": cost } }))),
    el("td", {}, badge(row.evidence), row.num_missing ? el("span", { class: "missing" }, ` ${count(row.num_missing, "rank")} missing`) : null,
      epochs.map((epoch) => el("span", { class: "epoch-mark", "data-tip": `Placement epoch ${epoch.version} from step ${epoch.step}: ${epochText(epoch)}` },
        epochState(epoch), ` epoch ${epoch.version} from ${epoch.step}`))),
    el("td", { class: "number" }, named ? `${suspect.rank}` : ""),
    el("td", {}, named ? phaseName(suspect.phase) : ""),
    el("td", { class: "number layer" }, named ? layerCell(suspect.layer) : ""),
    el("td", { class: "cause" }, named ? row.cause : ""),
    el("td", { class: "number" }, named ? duration(suspect.worth_ns) : ""),
    el("td", { class: "number share" }, named ? percent(suspect.share) : ""));
}

// From the second page on, `upto` keeps pages where they are while new steps come in.
function pager(place, data) {
  const turn = (page) => () => {
    go({ page: page || "", upto: page ? place.upto || data.last_step : "" });
    scrollTo(0, 0);
  };
  const first = data.page * 50 + 1;
  return el("nav", { class: "pager", "aria-label": "Pages of steps" },
    el("button", { type: "button", disabled: data.page === 0, onclick: turn(data.page - 1), "data-key": "page-before" }, "Previous"),
    el("span", {}, `${whole(first)} to ${whole(first + data.rows.length - 1)} of ${whole(data.total)}`),
    el("button", { type: "button", disabled: data.page + 1 >= data.pages, onclick: turn(data.page + 1), "data-key": "page-next" }, "Next"));
}

