// Every rank of a step in short: work, transfer and hatched wait as a column each. A rank can be added to the lanes.
import { colours, hatch, sharpCanvas } from "./colours.js";
import { el } from "./dom.js";
import { duration } from "./format.js";
import { hide, show as showTip } from "./tip.js";

const FOOT = 22, HEIGHT = 150;
let left = {}; // step and place of the cursor: adding a rank draws the figure anew, and the reader goes on from there

// budgets: [rank, group, work, transfer, wait] a row; drawn: ranks that have a lane; toggle(rank) adds or takes one.
export function ribbon(budgets, { step, drawn, suspect, said, toggle }) {
  const tallest = Math.max(...budgets.map(([, , work, transfer, wait]) => work + transfer + wait), 1);
  let place = left.step === step ? left.place : -1, pitch = 1;
  left = {};
  const canvas = el("canvas", { class: "ribbon", tabindex: 0, role: "img", "data-key": "ribbon", "data-own-tip": true,
    "aria-label": `All ${budgets.length} ranks: work and wait. Left and right move, Enter adds or takes away a lane.`,
    "aria-describedby": "said" });
  canvas.style.height = `${HEIGHT + FOOT}px`;

  const text = ([rank, , work, transfer, wait]) =>
    `rank ${rank}: work ${duration(work)}, transfer ${duration(transfer)}, wait ${duration(wait)}`
    + (suspect && suspect.rank === rank ? "; named by the verdict" : "") + (drawn.has(rank) ? "; drawn above" : "");

  const draw = sharpCanvas(canvas, (context, width) => {
    const ink = colours("ink", "muted", "accent", "surface", "outside", "dispatch", "hatch-ground", "hatch-line", "expert_gemm");
    context.clearRect(0, 0, width, HEIGHT + FOOT);
    pitch = Math.min(48, width / budgets.length);
    const gap = pitch > 4 ? pitch * 0.12 : 0;
    const wait = hatch(context, ink["hatch-ground"], ink["hatch-line"]);
    budgets.forEach((row, index) => {
      const [rank, , work, transfer, waits] = row;
      const named = suspect && suspect.rank === rank;
      let y = HEIGHT;
      for (const [size, fill] of [[work, named ? ink.expert_gemm : ink.outside], [transfer, ink.dispatch], [waits, wait]]) {
        const tall = (HEIGHT - 12) * (size / tallest);
        y -= tall;
        context.fillStyle = fill;
        context.fillRect(index * pitch + gap, y, Math.max(0.8, pitch - 2 * gap), tall);
      }
      context.fillStyle = ink.ink;
      const middle = (index + 0.5) * pitch;
      if (named) {
        context.beginPath();
        context.moveTo(middle - 5, 0);
        context.lineTo(middle + 5, 0);
        context.lineTo(middle, 8);
        context.fill();
      }
      if (drawn.has(rank)) context.fillRect(middle - Math.max(1, pitch / 2 - gap), HEIGHT + 2, Math.max(2, pitch - 2 * gap), 3);
    });
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = ink.muted;
    context.textAlign = "center";
    const every = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((size) => size * pitch >= 30) || 512;
    budgets.forEach(([rank], index) => {
      if (index % every === 0) context.fillText(`${rank}`, Math.max(8, (index + 0.5) * pitch), HEIGHT + 18);
    });
    if (place >= 0) {
      context.strokeStyle = ink.accent;
      context.lineWidth = 2;
      context.strokeRect(place * pitch, 9, Math.max(3, pitch), HEIGHT - 8);
    }
  });

  const at = (event) => {
    const index = Math.floor((event.clientX - canvas.getBoundingClientRect().left) / pitch);
    return index >= 0 && index < budgets.length ? index : -1;
  };
  canvas.addEventListener("pointermove", (event) => {
    const index = at(event);
    if (index < 0) return hide();
    showTip(text(budgets[index]), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("click", (event) => { const index = at(event); if (index >= 0) toggle(budgets[index][0]); });
  canvas.addEventListener("blur", () => { if (!canvas.isConnected) return; place = -1; said.textContent = ""; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const named = budgets.findIndex(([rank]) => suspect && suspect.rank === rank);
    const first = Math.max(0, named);
    const to = { ArrowRight: place < 0 ? first : place + 1, ArrowLeft: place < 0 ? first : place - 1, Home: 0, End: budgets.length - 1,
      PageDown: place + 16, PageUp: place - 16 }[event.key];
    if (event.key === "Enter" && place >= 0) {
      left = { step, place };
      return toggle(budgets[place][0]);
    }
    if (to === undefined) return;
    event.preventDefault();
    place = Math.min(Math.max(0, to), budgets.length - 1);
    said.textContent = text(budgets[place]);
    draw();
  });
  return canvas;
}
