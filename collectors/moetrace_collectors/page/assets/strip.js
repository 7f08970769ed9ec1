// Steps as bars in their order: one figure, moved through by arrow keys, opened by Enter or a click.
import { el } from "./dom.js";
import { duration, layerName, length } from "./format.js";
import { go, runPlace } from "./state.js";
import { hide, show as showTip } from "./tip.js";

const HEIGHT = 110;

export function stepText(step) {
  let text = `step ${step.step} (${step.forward_mode}${step.warmup ? ", warm-up" : ""}): ${length(step.step_ns)}; evidence ${step.evidence}`;
  if (step.suspect) {
    text += `; rank ${step.suspect.rank} in ${step.suspect.phase}, ${layerName(step.suspect.layer)}: `
      + `${duration(step.suspect.worth_ns)} (${step.cause})`;
  }
  return step.num_missing ? `${text}; ${step.num_missing} ranks missing` : text;
}

export function stepStrip(steps, run) {
  const longest = Math.max(...steps.map((step) => step.step_ns), 1);
  const pitch = 1000 / Math.max(steps.length, 40);
  const bars = steps.map((step, index) => {
    const tall = HEIGHT * (step.step_ns / longest);
    const cost = step.suspect && step.evidence !== "insufficient" ? HEIGHT * (step.suspect.worth_ns / longest) : 0;
    const shape = { x: index * pitch + pitch * 0.1, width: pitch * 0.8 };
    return el("g", { class: step.warmup ? "step warm-up" : "step", "data-step": step.step },
      el("rect", { x: index * pitch, y: 0, width: pitch, height: HEIGHT, class: "column-ground" }),
      el("rect", { ...shape, y: HEIGHT - tall, height: tall, class: "step-bar" }),
      cost > 0 && el("rect", { ...shape, y: HEIGHT - cost, height: cost, class: `p-${step.suspect.phase}` }),
      cost > 0 && step.evidence === "ambiguous" && el("path", { class: "doubt", d: hatch(shape.x, HEIGHT - cost, shape.width, cost) }));
  });
  const figure = el("svg", { viewBox: `0 0 1000 ${HEIGHT + 2}`, class: "strip", preserveAspectRatio: "none", tabindex: 0,
    role: "group", "aria-label": "Steps in order. Left and right move, Enter opens.", "data-key": "strip", "data-own-tip": true }, bars);
  let place = -1;
  const point = (index) => {
    bars.forEach((bar, other) => bar.classList.toggle("pointed", other === index));
    place = index;
    if (index < 0) return hide();
    const box = bars[index].getBoundingClientRect();
    showTip(stepText(steps[index]), box.left + box.width / 2, box.top + box.height / 2);
  };
  const open = (index) => { if (steps[index]) go({ run, view: "step", step: steps[index].step }, { keep: false }); };
  const at = (event) => bars.indexOf(event.target.closest("g.step"));
  figure.addEventListener("pointermove", (event) => point(at(event)));
  figure.addEventListener("pointerleave", () => point(-1));
  figure.addEventListener("blur", () => point(-1));
  figure.addEventListener("click", (event) => open(at(event)));
  figure.addEventListener("keydown", (event) => {
    const to = { ArrowRight: place + 1, ArrowLeft: place < 0 ? steps.length - 1 : place - 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Enter" && place >= 0) { open(place); return; }
    if (event.key === "Escape") { point(-1); return; }
    if (to === undefined) return;
    event.preventDefault();
    point(Math.min(Math.max(0, to), steps.length - 1));
  });
  return figure;
}

function hatch(x, y, width, height) {
  let path = "";
  for (let at = y + 2; at < y + height; at += 5) path += `M${x} ${at}h${width}`;
  return path;
}
