// Expert and rank load: layer x expert, layer x rank, figures per layer; one forward mode at a time.
import { ask } from "./api.js";
import { choice, el, message, note, refill, section, table } from "./dom.js";
import { whole } from "./format.js";
import { fetchPlotly, heatMap } from "./heat.js";
import { go } from "./state.js";

export const title = (place) => `moetrace: load of ${place.run}`;
export const SPANS = [["1", "newest step"], ["20", "newest 20"], ["200", "newest 200"], ["2000", "newest 2,000"]];
let parts = null;

export async function show(main, place, { signal, isNew }) {
  fetchPlotly(); // while the collector sums
  const data = await ask("loads", { run: place.run, mode: place.mode, cohort: place.cohort, steps: place.steps }, signal);
  if (data.cohort && !data.steps.length) {
    parts = null;
    return refill(main, message(`Nothing of cohort ${data.cohort}`, `None of the ${data.forward_mode} steps that were asked for holds its tokens.`,
      controls(place, data)));
  }
  if (!data.forward_mode || (!data.experts && !data.ranks)) {
    parts = null;
    return refill(main, message("No expert counts", data.forward_mode
      ? "The steps of this run carry no counts per expert. The adapter's coverage report, printed by moetrace.instrument(model), says why; "
        + "routing that no adapter knows can be counted with moetrace.wrap(router=...)."
      : "No step outside warm-up has been joined yet. This page fills by itself once one is."));
  }
  const figures = [expertFigure(data), rankFigure(data)];
  const same = !isNew && parts && main.contains(parts.top) && figures.every((figure, index) => Boolean(figure) === Boolean(parts.maps[index]));
  if (same) {
    refill(parts.top, ...topOf(place, data));
    refill(parts.layers, ...layersOf(data));
    await Promise.all(figures.map((figure, index) => figure && parts.maps[index].change(figure)));
  } else {
    parts = { top: el("div", {}, topOf(place, data)), layers: el("div", {}, layersOf(data)),
      maps: figures.map((figure) => figure && heatMap(figure)) };
    refill(main, parts.top,
      section("Tokens per expert, layer by layer", parts.maps[0] ? parts.maps[0].box : note("No rank counted what it routed.")),
      section("Rows received per rank, layer by layer", parts.maps[1] ? parts.maps[1].box : note("No rank reported the rows it received.")),
      section("Figures per layer", parts.layers));
    await Promise.all(parts.maps.map((map) => map && map.start()));
  }
  return undefined;
}

export function controls(place, data) {
  const asked = place.steps || "20";
  const spans = SPANS.some(([value]) => value === asked) ? SPANS : [...SPANS, [asked, `newest ${asked}`]];
  return el("div", { class: "switches" },
    choice("Forward mode", "mode", data.forward_modes.map((mode) => [mode, mode]), data.forward_mode, (mode) => go({ mode })),
    choice("Summed over", "steps", spans, asked, (steps) => go({ steps })),
    (data.cohorts || []).length > 0 && choice("Cohort", "cohort", [["", "all"], ...data.cohorts.map((name) => [name, name])],
      data.cohort, (cohort) => go({ cohort })));
}

export function spanNote(place, data, padding) {
  const asked = Number(place.steps || 20);
  const cut = data.steps.length < asked && data.steps.length > 0;
  const why = data.cohort ? "the others hold nothing of the cohort, the run has no more of them, or more would take too long to sum"
    : "the run has no more of them, or more would take too long to sum";
  return note(`Summed over ${data.counted}${data.cohort ? `, cohort ${data.cohort}` : ""}. ${padding}`
    + (cut ? ` Fewer than asked for: ${why}.` : ""));
}

function topOf(place, data) {
  return [el("h1", {}, sentence(data)), controls(place, data),
    spanNote(place, data, "Tokens per expert are without padding and dummy batches; rows that ranks received hold both.")];
}

const where = (data) => (data.cohort ? `${data.forward_mode} of cohort ${data.cohort}` : data.forward_mode);

function sentence(data) {
  const worst = data.imbalance.reduce((most, layer) => (!most || layer.max_mean_ratio > most.max_mean_ratio ? layer : most), null);
  if (!worst || !worst.pairs) return `Load in ${where(data)}`;
  let text = `In ${where(data)}, expert ${worst.hot_expert} of layer ${worst.layer} is hottest: ${worst.max_mean_ratio.toFixed(2)} times the mean`;
  if (data.ranks) {
    let most = { ratio: 0 };
    data.ranks.counts.forEach((row, y) => row.forEach((value, x) => {
      const ratio = data.ranks.means[y] > 0 ? (value || 0) / data.ranks.means[y] : 0;
      if (ratio > most.ratio) most = { ratio, rank: data.ranks.columns[x], layer: data.ranks.layers[y] };
    }));
    if (most.ratio) text += `; rank ${most.rank} receives most, ${most.ratio.toFixed(2)} times the mean in layer ${most.layer}`;
  }
  return `${text}.`;
}

function expertFigure({ experts, forward_mode }) {
  return experts && { key: "experts", label: `Tokens per layer and expert, ${forward_mode}`, rowName: "layer", rows: experts.layers,
    columnName: "expert", columns: experts.columns, values: experts.counts, means: experts.means, edges: experts.edges,
    meanName: "the layer's mean", unit: "(token, slot) pairs" };
}

function rankFigure({ ranks, forward_mode }) {
  return ranks && { key: "ranks", label: `Rows received per layer and rank, ${forward_mode}`, rowName: "layer", rows: ranks.layers,
    columnName: "rank", columns: ranks.columns, values: ranks.counts, means: ranks.means, edges: ranks.edges,
    meanName: "the layer's mean", unit: "rows" };
}

function layersOf(data) {
  if (!data.imbalance.length) return [note("Nothing was counted.")];
  const rows = data.imbalance.map((layer) => el("tr", {},
    [`${layer.layer}`, layer.max_mean_ratio.toFixed(2), layer.cv.toFixed(2),
      layer.rank_max_mean_ratio === null ? "" : layer.rank_max_mean_ratio.toFixed(2), `${layer.hot_expert}`,
      `${whole(layer.dead_experts)} of ${whole(layer.experts)}`, whole(layer.pairs)]
      .map((text) => el("td", { class: "number" }, text))));
  return [table(["#Layer", "#Max / mean, experts", "#CV, experts", "#Max / mean, ranks", "#Hot expert", "#Without tokens", "#Pairs"], rows,
    { "aria-label": "Figures per layer" }, { tall: true })];
}
