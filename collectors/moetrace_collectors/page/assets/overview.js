// A run in one picture: the sentence, who costs what, in which layer, and the newest steps.
import { ask } from "./api.js";
import { el, note, phaseName, refill, section, swatch, table } from "./dom.js";
import { epochState, epochText } from "./epochs.js";
import { clock, count, duration, layerCell, layerName, length, percent, whole } from "./format.js";
import { runPlace } from "./state.js";
import { stepStrip } from "./strip.js";

export const title = (place) => `moetrace: ${place.run}`;
const PHASES = ["outside", "router", "permute", "dispatch", "expert_gemm", "combine", "unpermute", "shared_expert",
  "fused", "schedule", "accept"];

export async function show(main, place, { signal }) {
  const data = await ask("overview", { run: place.run }, signal);
  const { run } = data;
  const facts = [run.model || "unnamed model", `${count(run.ranks, "rank")} on ${count(run.hosts, "host")}`,
    run.forward_modes.join(", "), run.sample_period > 1 ? `1 step in ${run.sample_period} sampled` : "every step sampled",
    `figures: ${data.counted}`, `newest step ${run.last_step}, ${clock(run.last_unix_ms)} UTC`];
  refill(main,
    el("p", { class: "facts" }, facts.map((fact) => el("span", {}, fact))),
    ...words(data),
    notices(data.notices),
    tiles(data),
    data.epochs.length > 0 && section("Placement epochs", ...epochs(data, place)),
    el("div", { class: "columns" },
      section("Which rank costs what", ...byRank(data, place)),
      section("In which layer", ...byLayer(data))),
    section("Where the time goes: the critical path by phase, median over steps", data.modes.map((mode) => [
      data.modes.length > 1 && el("h3", {}, mode.forward_mode),
      phaseBar(mode.phase_median_ns, "of the median step's critical path")]).flat(), !data.modes.length && note("Only warm-up steps so far.")),
    section(`The newest ${count(data.strip.length, "step")}`, stepStrip(data.strip, place.run),
      note("A bar is a step's length; its coloured part is what the named rank cost, in the colour of the phase: solid "
        + "where the evidence is clear, hatched where it is ambiguous. Arrow keys move, Enter opens."),
      el("p", {}, el("a", { href: runPlace(place.run, { view: "steps", order: "worth" }) }, "The costliest steps first"))));
  return run.last_step;
}

// Who is reading the bars keeps them as they are.
export const busy = (main) => Boolean(main.querySelector(".strip:hover, .strip:focus"));

// One sentence per forward mode: what costs prefill says nothing of decode.
function words(data) {
  const several = data.modes.length > 1;
  const said = several ? data.modes : [{ forward_mode: "", ...data }];
  const next = [...new Set(said.flatMap((mode) => mode.next_steps))];
  return [
    el("h1", { class: several ? "by-mode" : null }, said.map((mode) =>
      el("span", {}, several && el("small", {}, `${mode.forward_mode} `), mode.headline))),
    ...said.filter((mode) => mode.remark).map((mode) =>
      el("p", { class: "remark" }, several && el("small", {}, `${mode.forward_mode} `), mode.remark)),
    el("ul", { class: "next" }, next.map((text) => el("li", {}, text)))];
}

// The rows behind a notice: SQL that the collector itself answers.
function rowsLink({ sql, parameters }) {
  const query = new URLSearchParams({ query: sql, default_format: "PrettyCompactNoEscapesMonoBlock" });
  for (const [name, value] of Object.entries(parameters)) query.set(`param_${name}`, value);
  return `../?${query}`;
}

function notices(listed) {
  return listed.length > 0 && el("ul", { class: "notices", "aria-label": "Before you trust the figures" }, listed.map((notice) =>
    el("li", { class: notice.kind }, notice.text, " ", el("a", { href: rowsLink(notice), target: "_blank", rel: "noopener",
      "data-key": notice.kind, title: notice.sql }, "Rows (SQL)"))));
}

function epochs(data, place) {
  const rows = data.epochs.map((epoch) => el("tr", {},
    el("th", { scope: "row" }, `epoch ${epoch.version}`),
    el("td", { class: "number" }, epoch.step === null ? "" : el("a", { href: runPlace(place.run, { view: "step", step: epoch.step }),
      "data-key": `epoch-${epoch.version}` }, `${epoch.step}`)),
    el("td", {}, epochState(epoch)),
    el("td", { class: "name" }, epochText(epoch)),
    el("td", { class: "number" }, epoch.experts_copied === null ? "" : whole(epoch.experts_copied)),
    el("td", {}, epoch.policy_version),
    el("td", {}, `${clock(Math.max(...Object.values(epoch.event_unix_ms)))}`)));
  return [table(["Epoch", "#First step", "Verdict", "What happened", "#Experts copied", "Policy", "UTC"], rows, { "aria-label": "Placement epochs" },
    { tall: rows.length > 6 })];
}

function tiles(data) {
  const clear = data.evidence.clear || 0;
  const items = data.modes.map((mode) => [length(mode.median_ns), `median step, ${mode.forward_mode}`,
    `95 % of ${count(mode.steps, "step")} below ${length(mode.p95_ns)}`]);
  if (data.modes.some((mode) => mode.median_ns > 0)) {
    items.push([duration(data.extension_median_ns), "median extension per step", "what even ranks would give back"]);
  }
  if (data.counted_steps) {
    items.push([`${whole(clear)} of ${whole(data.counted_steps)}`, "steps with clear evidence",
      data.partial_steps ? `ranks missing in ${count(data.partial_steps, "step")}` : "no rank missing in any step"]);
  }
  return el("dl", { class: "tiles" }, items.map(([value, name, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, value), el("span", {}, more)))));
}

function byRank(data, place) {
  const { ranks, other_ranks, other_ns, ambiguous_ns } = data.by_rank;
  if (!ranks.length) return [note("No exchange between ranks was judged in the steps that were read.")];
  const phases = PHASES.filter((phase) => ranks.some((row) => row.phases[phase]));
  const largest = Math.max(...ranks.flatMap((row) => phases.map((phase) => row.phases[phase] || 0)));
  const total = ranks.reduce((sum, row) => sum + row.total_ns, other_ns) || 1;
  const rows = ranks.map((row) => el("tr", {},
    el("th", { scope: "row" }, el("a", { href: runPlace(place.run, { view: "steps", rank: row.rank, order: "worth" }),
      "data-key": `rank-${row.rank}` }, `rank ${row.rank}`)),
    phases.map((phase) => {
      const value = row.phases[phase] || 0;
      const strength = Math.round(70 * Math.sqrt(value / (largest || 1)));
      return el("td", { class: "number shade", vars: { "--strength": `${strength}%` } }, value ? duration(value) : "");
    }),
    el("td", { class: "number" }, layerCell(row.layer)),
    el("td", { class: "number" }, el("b", {}, percent(row.total_ns / total)))));
  let text = `Summed over ${data.counted}: by how much the rank that all waited for exceeded the mean.`;
  if (other_ranks) text += ` ${count(other_ranks, "more rank")} added ${duration(other_ns)} together.`;
  if (ambiguous_ns) text += ` Left out: ${duration(ambiguous_ns)} where waits and work disagree.`;
  return [table(["Rank", ...phases.map((phase) => `#${phase}`), "#Most in layer", "#Share"], rows, { class: "matrix" }), note(text)];
}

// A column per layer, stacked by phase; thin columns stay readable at 61 layers and more.
function byLayer(data) {
  const layers = data.by_layer.filter((row) => row.layer >= 0 || Object.values(row.phases).some((value) => value > 0));
  if (!layers.length) return [note("No layer was extended.")];
  const totals = layers.map((row) => Object.values(row.phases).reduce((sum, value) => sum + value, 0));
  const most = Math.max(...totals, 1);
  const phases = PHASES.filter((phase) => layers.some((row) => row.phases[phase]));
  const worst = layers[totals.indexOf(Math.max(...totals))];
  const width = 460, height = 150;
  const pitch = Math.min(64, width / layers.length);
  const every = Math.ceil(26 / pitch);
  const columns = layers.map((row, index) => {
    let y = height;
    const said = phases.filter((phase) => row.phases[phase]).map((phase) => `${phase} ${duration(row.phases[phase])}`);
    return el("g", { "data-tip": `${row.layer >= 0 ? layerName(row.layer) : "end of the step"}: ${said.join(", ") || "nothing"}` },
      el("rect", { x: index * pitch, y: 0, width: pitch, height, class: "column-ground" }),
      phases.map((phase) => {
        const tall = height * ((row.phases[phase] || 0) / most);
        y -= tall;
        return el("rect", { x: index * pitch + pitch * 0.1, y, width: pitch * 0.8, height: tall, class: `p-${phase}` });
      }),
      index % every === 0 ? el("text", { x: (index + 0.5) * pitch, y: height + 15, class: "column-name" },
        row.layer >= 0 ? `${row.layer}` : "end") : null);
  });
  const text = `${worst.layer >= 0 ? `Layer ${worst.layer}` : "The end of the step"} was extended most: ${duration(most)}, `
    + `${percent(most / (totals.reduce((sum, value) => sum + value, 0) || 1))} of the sum over layers.`;
  return [el("svg", { viewBox: `0 0 ${width + 8} ${height + 20}`, class: "layers", role: "img", "aria-label": text,
    preserveAspectRatio: "xMinYMin" }, columns),
    el("p", { class: "legend" }, phases.map(phaseName)), note(text)];
}

export function phaseBar(phases, what) {
  const listed = Object.entries(phases).filter(([, value]) => value > 0);
  const total = listed.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return note("No phase took any time.");
  return el("div", { class: "phase-bar" },
    el("div", { class: "bar-parts", "aria-hidden": "true" }, listed.map(([phase, value]) =>
      el("div", { class: `p-${phase}`, vars: { "flex-grow": value }, "data-tip": `${phase}: ${duration(value)}, ${percent(value / total)} ${what}` }))),
    el("ul", { class: "legend" }, [...listed].sort((a, b) => b[1] - a[1]).map(([phase, value]) =>
      el("li", {}, swatch(phase), `${phase} `, el("b", {}, duration(value)), ` ${percent(value / total)}`))));
}
