// A heat map of ratios to a mean, drawn by plotly in the bins of the report: a colour can be read off the legend.
import { colour } from "./colours.js";
import { el } from "./dom.js";
import { whole } from "./format.js";
import { hide, show } from "./tip.js";

const SCRIPT = "assets/plotly.min.js";
let loading = null;
let fetching = false; // into the browser's cache

// Fetched early, beside the numbers, but not run: reading plotly in takes the browser a second or more, and what a
// view says in words has to be on the screen before.
export function fetchPlotly() {
  if (loading || fetching) return;
  fetching = true;
  fetch(SCRIPT).then((answer) => answer.arrayBuffer()).catch(() => { /* said where it is missed */ });
}

// Resolves when what was put into the page has been painted; at once where nothing is painted (a hidden tab).
export function painted() {
  if (document.hidden) return Promise.resolve();
  return new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
}

// Plotly is large, so it is run when the first heat map is wanted; it comes from the collector itself.
export function plotly() {
  loading = loading || new Promise((resolve, reject) => {
    // It brings an inline sheet for maps, which are not drawn here and which the page's policy refuses.
    const head = document.head;
    head.appendChild = (node) => (node.tagName === "STYLE" ? node : Node.prototype.appendChild.call(head, node));
    const done = () => { delete head.appendChild; };
    const script = el("script", { src: SCRIPT,
      onload: () => { done(); resolve(window.Plotly); },
      onerror: () => { done(); loading = null; reject(new Error("heat maps need plotly on the collector's machine: pip install 'moetrace[collector]'")); } });
    document.head.append(script);
  });
  return loading;
}

// figure: { key, label, rowName, rows, columnName, columns, values, means, edges, unit, text?, onCell? }
export function heatMap(figure) {
  const plot = el("div", { class: "plot", "aria-hidden": "true" });
  const cursor = el("div", { class: "cell-cursor", hidden: true });
  const said = el("p", { class: "said", role: "status", "aria-live": "polite", id: `${figure.key}-said` });
  const holder = el("div", { class: "heat", tabindex: 0, role: "group", "data-key": figure.key, id: figure.key,
    "data-own-tip": true,
    "aria-label": `${figure.label}. Arrow keys move from cell to cell${figure.onCell ? ", Enter looks closer" : ""}.`,
    "aria-describedby": `${figure.key}-said` }, plot, cursor);
  const box = el("div", { class: "heat-box" }, legend(figure), holder, said);
  const map = { box, figure, row: 0, column: -1 };
  plot.style.height = `${heightOf(figure)}px`; // what lies below stays where it is once the map is drawn

  const readCell = (row, column) => {
    const { figure: now } = map;
    if (now.text) return now.text(row, column);
    const value = now.values[row][column];
    const where = `${now.rowName} ${now.rows[row]}, ${now.columnName} ${now.columns[column]}: `;
    if (value === null) return `${where}not reported`;
    const ratio = now.means[row] > 0 ? `, ${(value / now.means[row]).toFixed(2)} x mean` : "";
    return `${where}${whole(value)} ${now.unit}${ratio}`;
  };

  map.draw = async () => {
    const Plotly = await plotly();
    if (!holder.isConnected) return;
    const { figure: now } = map;
    const height = heightOf(now);
    plot.style.height = `${height}px`;
    const font = { family: "system-ui, sans-serif", size: 12, color: colour("muted") };
    const axis = { showgrid: false, zeroline: false, ticks: "", fixedrange: false, tickfont: font };
    await Plotly.react(plot, [{
      type: "heatmap", z: now.values.map((row, y) => row.map((value) => binOf(value, now.means[y], now.edges))),
      zmin: -1.5, zmax: 6.5, colorscale: steps(), showscale: false, hoverinfo: "none",
      xgap: now.columns.length <= 128 ? 1 : 0, ygap: now.rows.length <= 80 ? 1 : 0,
    }], {
      height, margin: { l: 80, r: 8, t: 4, b: 40 }, paper_bgcolor: "transparent", plot_bgcolor: colour("surface"), font,
      dragmode: "zoom", uirevision: now.key,
      xaxis: { ...axis, ...ticks(now.columns, now.wideNames ? 11 : 24), title: { text: now.columnName, font, standoff: 6 }, range: [-0.5, now.columns.length - 0.5] },
      yaxis: { ...axis, ...ticks(now.rows, 20, now.wideNames ? "" : now.rowName), range: [now.rows.length - 0.5, -0.5] },
    }, { displayModeBar: false, displaylogo: false, responsive: true, doubleClick: "reset", showTips: false });
    box.dataset.drawn = "true";
    place();
  };

  const place = () => {
    cursor.hidden = map.column < 0;
    const axes = plot._fullLayout;
    if (map.column < 0 || !axes) return;
    const { xaxis, yaxis } = axes;
    const left = xaxis._offset + xaxis.d2p(map.column - 0.5), right = xaxis._offset + xaxis.d2p(map.column + 0.5);
    const top = yaxis._offset + yaxis.d2p(map.row - 0.5), bottom = yaxis._offset + yaxis.d2p(map.row + 0.5);
    Object.assign(cursor.style, { left: `${left}px`, top: `${Math.min(top, bottom)}px`, width: `${right - left}px`,
      height: `${Math.abs(bottom - top)}px` });
  };

  holder.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
      Home: [0, -1e6], End: [0, 1e6], PageUp: [-1e6, 0], PageDown: [1e6, 0] }[event.key];
    if (event.key === "Enter" && map.column >= 0 && map.figure.onCell) return map.figure.onCell(map.row, map.column);
    if (event.key === "Escape") { map.column = -1; said.textContent = ""; return place(); }
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    map.row = Math.min(Math.max(0, map.row + move[0]), map.figure.rows.length - 1);
    map.column = Math.min(Math.max(0, map.column + move[1]), map.figure.columns.length - 1);
    said.textContent = readCell(map.row, map.column);
    place();
  });
  holder.addEventListener("blur", () => { cursor.hidden = true; });
  holder.addEventListener("focus", place);
  const listen = () => {
    if (!plot.on) return;
    plot.on("plotly_click", (event) => { if (map.figure.onCell) map.figure.onCell(event.points[0].y, event.points[0].x); });
    plot.on("plotly_relayout", place);
    // Said when it is pointed at: the text of every cell beforehand costs more than drawing them.
    plot.on("plotly_hover", (event) => show(readCell(event.points[0].y, event.points[0].x), event.event.clientX, event.event.clientY));
    plot.on("plotly_unhover", hide);
  };
  const onTheme = () => { if (holder.isConnected) map.draw(); else removeEventListener("moetrace-theme", onTheme); };
  addEventListener("moetrace-theme", onTheme);
  map.start = async () => {
    try {
      await painted();
      await map.draw();
      listen();
    } catch (error) {
      said.textContent = `Not drawn: ${error.message}. The arrow keys read the cells all the same.`;
    }
  };
  // Other numbers for the same picture: zoom and cursor stay.
  map.change = async (next) => {
    map.figure = next;
    box.replaceChild(legend(next), box.firstChild);
    map.column = Math.min(map.column, next.columns.length - 1);
    map.row = Math.min(map.row, next.rows.length - 1);
    if (map.column >= 0) said.textContent = readCell(map.row, map.column);
    await map.draw();
  };
  return map;
}

function heightOf({ rows }) {
  const size = Math.max(9, Math.min(26, 460 / rows.length));
  return Math.max(120, Math.round(size * rows.length) + 46);
}

export function binOf(value, mean, edges) {
  if (value === null || value === undefined) return null;
  if (value === 0 || !(mean > 0)) return -1;
  return edges.filter((edge) => value / mean >= edge).length;
}

function steps() {
  const names = ["surface", "h0", "h1", "h2", "h3", "h4", "h5", "h6"];
  return names.flatMap((name, index) => [[index / 8, colour(name)], [(index + 1) / 8, colour(name)]]);
}

function ticks(names, most, prefix) {
  const every = Math.max(1, Math.ceil(names.length / most));
  const places = names.map((_, index) => index).filter((index) => index % every === 0);
  return { tickvals: places, ticktext: places.map((index) => (prefix ? `${prefix} ${names[index]}` : `${names[index]}`)) };
}

function legend({ edges, meanName, values }) {
  const names = [`below ${edges[0]}`, ...edges.slice(1).map((edge, index) => `${edges[index]} to ${edge}`), `${edges[edges.length - 1]} and more`];
  const silent = values.some((row) => row.some((value) => value === 0));
  return el("p", { class: "legend" }, el("span", {}, `times ${meanName}:`),
    silent && el("span", {}, el("i", { class: "swatch h-dead" }), "none at all"),
    names.map((name, index) => el("span", {}, el("i", { class: `swatch h${index}` }), name)));
}
