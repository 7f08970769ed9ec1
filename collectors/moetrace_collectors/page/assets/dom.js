// Building the page: text only ever becomes text nodes, so nothing from a store can become markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_NAMES = new Set(["svg", "g", "rect", "path", "text", "line"]);

// el("td", { class: "number", "data-key": 3 }, "text", node, ...): null and false children are left out.
export function el(name, attributes = {}, ...children) {
  const node = SVG_NAMES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "vars") for (const [name, amount] of Object.entries(value)) node.style.setProperty(name, amount);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// New content in place of the old; the element that had the focus (by data-key) has it again.
export function refill(container, ...children) {
  const focused = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  container.replaceChildren(...children.flat().filter(Boolean));
  if (focused !== undefined) {
    const again = [...container.querySelectorAll("[data-key]")].find((node) => node.dataset.key === focused);
    if (again) again.focus({ preventScroll: true });
  }
}

export const section = (title, ...children) => el("section", {}, title && el("h2", {}, title), ...children);
export const note = (text) => el("p", { class: "note" }, text);
export const swatch = (phase) => el("i", { class: `swatch p-${phase}`, "aria-hidden": "true" });
export const phaseName = (phase) => el("span", { class: "phase" }, swatch(phase), phase);
export const badge = (evidence) => el("span", { class: `badge ${evidence}` }, evidence);

export function table(headings, rows, attributes = {}, { tall = false } = {}) {
  const head = headings.map((name) =>
    el("th", { scope: "col", class: name.startsWith("#") ? "number" : null }, name.replace(/^#/, "")));
  // What scrolls up and down has to be reached by the keyboard.
  return el("div", { class: tall ? "scroll tall" : "scroll", tabindex: tall ? 0 : null },
    el("table", attributes, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

// One of a few choices as a row of buttons; arrow keys move as in any radio group.
export function choice(legend, name, options, chosen, onchange) {
  return el("fieldset", { class: "choice" }, el("legend", {}, legend),
    options.map(([value, text]) => el("label", {},
      el("input", { type: "radio", name, value, checked: value === chosen, "data-key": `${name}-${value}`,
        onchange: () => onchange(value) }), text)));
}

export function message(title, text, ...more) {
  return el("div", { class: "empty" }, el("h1", {}, title), el("p", {}, text), ...more);
}
