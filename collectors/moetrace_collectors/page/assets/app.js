// The shell: which view, its tabs, the theme, and live refresh.
import { ask } from "./api.js";
import { el, message, refill } from "./dom.js";
import { onMove, runPlace, state } from "./state.js";
import { hide } from "./tip.js";
import * as load from "./load.js";
import * as overview from "./overview.js";
import * as runs from "./runs.js";
import * as step from "./step.js";
import * as steps from "./steps.js";
import * as traffic from "./traffic.js";

const POLL_MS = 3000;
const RUNS_EVERY = 3; // polls: the list of runs sums over all of them
const TABS = [["", "Overview"], ["steps", "Steps"], ["load", "Load"], ["traffic", "Traffic"]];
const VIEWS = { "": overview, steps, step, load, traffic };

const main = document.getElementById("main");
const banner = document.getElementById("banner");
let shown = null; // { view, key, controller, lastStep: newest step that it knows of, -1 where it does not say }
let live = true;
let ticks = 0;

function viewOf(place) {
  if (!place.run) return runs;
  return VIEWS[place.view || ""] || overview;
}

// Two addresses with one key are the same view in different states: it updates itself and keeps its elements.
const keyOf = (place) => `${place.run || ""}/${place.view || ""}`;

function drawTabs(place) {
  const tabs = document.getElementById("tabs");
  if (!place.run) return refill(tabs);
  const current = place.view === "step" ? "steps" : place.view || "";
  refill(tabs,
    el("a", { class: "run-name", href: runPlace(place.run), title: place.run, "data-key": "run" }, place.run),
    TABS.map(([view, name]) => el("a", {
      class: "tab", href: runPlace(place.run, { view }), "data-key": `tab-${view}`,
      "aria-current": view === current ? "page" : null,
    }, name)));
}

function warn(text) {
  banner.hidden = !text;
  if (banner.textContent !== text) banner.textContent = text;
}

async function draw({ moved }) {
  const place = state();
  const view = viewOf(place);
  const key = keyOf(place);
  if (moved) { drawTabs(place); hide(); }
  const isNew = !shown || shown.key !== key;
  if (shown) shown.controller.abort();
  const controller = new AbortController();
  shown = { view, key, controller, lastStep: isNew || !shown ? -1 : shown.lastStep, rows: isNew ? undefined : shown.rows };
  const mine = shown;
  main.setAttribute("aria-busy", "true");
  if (isNew) {
    main.className = `view-${place.run ? place.view || "overview" : "runs"}`;
    refill(main, el("p", { class: "quiet" }, "Loading."));
  }
  try {
    const newest = await view.show(main, place, { signal: controller.signal, isNew, moved });
    if (mine !== shown) return;
    if (Number.isInteger(newest)) mine.lastStep = Math.max(mine.lastStep, newest);
    warn("");
    document.title = view.title(place);
  } catch (error) {
    if (error.name === "AbortError" || mine !== shown) return;
    if (error.passes) {
      warn(error.message);
      if (isNew) refill(main, message("Nothing to show yet", error.message));
      mine.failed = true;
    } else if (error.status) {
      refill(main, message("Not found", `${error.message[0].toUpperCase()}${error.message.slice(1)}.`,
        el("p", {}, el("a", { href: "?" }, "See the runs of this collector"))));
    } else {
      throw error;
    }
  } finally {
    if (mine === shown) main.removeAttribute("aria-busy");
  }
  if (moved && isNew && mine === shown) scrollTo(0, 0);
}

// Cheap question first; the view is drawn again only when there is news.
async function poll() {
  const place = state();
  if (!live || document.hidden) return;
  const mine = shown;
  ticks += 1;
  try {
    if (!place.run) return (ticks % RUNS_EVERY === 0) && await draw({ moved: false });
    const news = await ask("news", { run: place.run, since: Math.max(0, mine.lastStep) });
    if (mine !== shown) return;
    // A step that waited for a rank comes behind newer ones.
    const isNews = mine.lastStep >= 0 && (news.last_step > mine.lastStep || news.rows > mine.rows);
    warn("");
    if (isNews && mine.view.busy && mine.view.busy(main)) return; // asked again with the next poll
    mine.lastStep = news.last_step;
    mine.rows = news.rows;
    if (isNews && mine.view.news) mine.view.news(main, place, news);
    if ((isNews && !mine.view.news) || mine.failed) await draw({ moved: false });
  } catch (error) {
    if (error.name !== "AbortError") warn(error.message);
  }
}

function keepPolling() {
  setTimeout(async () => { await poll(); keepPolling(); }, POLL_MS);
}

document.getElementById("live").addEventListener("click", (event) => {
  live = !live;
  event.currentTarget.setAttribute("aria-pressed", String(live));
  event.currentTarget.querySelector("span").textContent = live ? "Live" : "Paused";
});

const themes = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");
const currentTheme = () => document.documentElement.dataset.theme || "auto";
const nameTheme = () => { themeButton.textContent = `Theme: ${currentTheme()}`; };
function redrawColours() {
  dispatchEvent(new Event("moetrace-theme"));
}
themeButton.addEventListener("click", () => {
  const next = themes[(themes.indexOf(currentTheme()) + 1) % themes.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try { localStorage.setItem("moetrace-theme", next); } catch { /* then for this page only */ }
  nameTheme();
  redrawColours();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawColours);
nameTheme();

// Links within the page need no new page.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='?']");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  history.pushState(null, "", link.getAttribute("href"));
  draw({ moved: true });
});

onMove(() => draw({ moved: true }));
draw({ moved: true });
keepPolling();
