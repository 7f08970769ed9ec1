// Who sends how much to whom: source rank x destination rank, in blocks where ranks are many.
import { ask } from "./api.js";
import { el, message, note, refill, section } from "./dom.js";
import { bytes, count, whole } from "./format.js";
import { fetchPlotly, heatMap } from "./heat.js";
import { controls, spanNote } from "./load.js";
import { go } from "./state.js";

export const title = (place) => `moetrace: traffic of ${place.run}`;
let parts = null;

export async function show(main, place, { signal, isNew }) {
  fetchPlotly(); // while the collector sums
  const data = await ask("traffic", { run: place.run, mode: place.mode, steps: place.steps, from: place.from, to: place.to }, signal);
  if (!data.forward_mode || !data.bytes.some((row) => row.some(Boolean))) {
    parts = null;
    return refill(main, message("No traffic recorded", data.forward_mode
      ? `No rank reported what its dispatches sent to whom in ${data.forward_mode}${place.from ? " between these ranks" : ""}. `
        + "Rows per destination are reported where the adapter sees the split sizes of the all-to-all."
      : "No step outside warm-up has been joined yet. This page fills by itself once one is.",
    place.from && el("p", {}, el("button", { type: "button", onclick: () => go({ from: "", to: "" }) }, "All ranks"))));
  }
  const now = figure(data);
  if (!isNew && parts && main.contains(parts.top)) {
    refill(parts.top, ...topOf(place, data));
    await parts.map.change(now);
  } else {
    parts = { top: el("div", {}, topOf(place, data)), map: heatMap(now) };
    refill(main, parts.top, section("From rank to rank, dispatch", parts.map.box,
      note("Rows are sources, columns destinations; the way back (combine) mirrors it.")));
    await parts.map.start();
  }
}

const name = (first, data) => (data.block === 1 ? `${first}` : `${first}-${Math.min(first + data.block, data.ranks) - 1}`);

function topOf(place, data) {
  const closer = place.from || place.to;
  return [el("h1", {}, sentence(data)), controls(place, data), spanNote(place, data, "Rows and bytes hold padding."),
    el("p", { class: "tools" },
      closer && el("button", { type: "button", "data-key": "all", onclick: () => go({ from: "", to: "" }) },
        `Ranks ${place.from} to ${place.to}: back to all`),
      data.block > 1 && el("span", { class: "quiet" },
        `${count(data.ranks, "rank")} in blocks of ${data.block}: click a cell, or Enter on it, to see its ranks.`))];
}

function sentence(data) {
  let most = 0, from = 0, to = 0, total = 0, kept = 0;
  data.bytes.forEach((row, y) => row.forEach((value, x) => {
    total += value;
    if (data.sources[y] === data.destinations[x]) kept += value;
    else if (value > most) { most = value; from = y; to = x; }
  }));
  const each = data.block === 1 ? "Rank" : "Ranks";
  if (!most) return `Dispatches sent ${bytes(total)}, none of it between ${data.block === 1 ? "ranks" : "blocks"}.`;
  const stays = total ? ` ${Math.round((100 * kept) / total)} % of ${bytes(total)} stays where it is.` : "";
  return `${each} ${name(data.sources[from], data)} sent most, ${bytes(most)} to ${name(data.destinations[to], data)}.${stays}`;
}

function figure(data) {
  const means = data.sources.map(() => data.mean_bytes);
  const range = (first) => `${first}-${Math.min(first + data.block, data.ranks) - 1}`;
  return { key: "traffic", label: `Bytes sent from rank to rank by dispatches, ${data.forward_mode}`, rowName: "from",
    rows: data.sources.map((first) => name(first, data)), columnName: data.block === 1 ? "to rank" : "to ranks",
    columns: data.destinations.map((first) => name(first, data)), values: data.bytes, means, edges: data.edges,
    wideNames: data.block > 1, meanName: "the mean pair that sends", unit: "bytes",
    text: (y, x) => `rank ${name(data.sources[y], data)} to ${name(data.destinations[x], data)}: ${whole(data.bytes[y][x])} bytes, `
      + `${whole(data.rows[y][x])} rows`,
    onCell: data.block === 1 ? null : (y, x) => go({ from: range(data.sources[y]), to: range(data.destinations[x]) }) };
}
