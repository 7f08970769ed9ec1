// One step across ranks on a canvas: a lane per rank, waits hatched, the critical path along the lanes.
// Geometry comes from the collector (views/timeline.py); here times only become pixels.
import { colours, hatch, sharpCanvas } from "./colours.js";
import { el } from "./dom.js";
import { count, duration, layerName } from "./format.js";
import { hide, show as showTip } from "./tip.js";

const GUTTER = 96, AXIS = 24, LANE = 26, SIDE = 5, PITCH = 42;
const DENSE_PATH = 40;
const NARROW = 5; // pixels; phases below it are laid together in one calm colour, so that what is long stands out

export class Lanes {
  // onWindow(start, end) is told when the user has looked closer; said is an element that reads marks out.
  constructor(timeline, { suspect, said, onWindow }) {
    this.timeline = timeline;
    this.suspect = suspect;
    this.said = said;
    this.onWindow = onWindow;
    this.lanes = timeline.lanes.map((lane) => ({ rank: lane.rank, marks: lane.marks.map((mark) => markOf(mark, timeline)) }));
    this.critical = new Set(timeline.critical.map((stretch) => stretch.rank));
    this.start = 0;
    this.end = Math.max(1, timeline.end_ns);
    this.lane = 0;
    this.place = -1;
    this.canvas = el("canvas", { class: "lanes", tabindex: 0, role: "img", "data-key": "lanes", "data-own-tip": true,
      "aria-label": `Timeline of ${count(this.lanes.length, "rank")}. Left and right move from mark to mark, up and down from rank `
        + "to rank, plus and minus zoom, 0 shows the whole step.", "aria-describedby": "said" });
    this.canvas.style.height = `${AXIS + PITCH * this.lanes.length + 6}px`;
    this.draw = sharpCanvas(this.canvas, (context, width) => this.paint(context, width));
    this.listen();
  }

  look(start, end) {
    const least = Math.max(1000, this.timeline.end_ns / 5000);
    const span = Math.min(Math.max(end - start, least), this.timeline.end_ns || 1);
    this.start = Math.min(Math.max(0, start), Math.max(0, this.timeline.end_ns - span));
    this.end = this.start + span;
    this.draw();
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    this.look(at - (at - this.start) * factor, at + (this.end - at) * factor);
    this.onWindow(this.start, this.end);
  }

  whole() {
    this.look(0, this.timeline.end_ns);
    this.onWindow(0, 0);
  }

  paint(context, width) {
    const ink = colours("ink", "muted", "line", "faint", "surface", "critical", "accent", "bar", "hatch-ground", "hatch-line",
      ...this.timeline.phases);
    this.width = width;
    this.scale = (width - GUTTER - 8) / (this.end - this.start);
    const height = AXIS + PITCH * this.lanes.length + 6;
    context.clearRect(0, 0, width, height);
    const wait = hatch(context, ink["hatch-ground"], ink["hatch-line"]);
    this.hasNarrow = false;
    this.paintAxis(context, ink, height);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER - 6, height);
    context.clip();
    this.lanes.forEach((lane, index) => this.paintLane(context, ink, wait, lane, index));
    this.paintPath(context, ink);
    this.paintCursor(context, ink);
    context.restore();
    if (this.narrow) this.narrow.hidden = !this.hasNarrow;
    context.textAlign = "right";
    context.textBaseline = "middle";
    this.lanes.forEach((lane, index) => {
      const named = this.suspect && this.suspect.rank === lane.rank;
      context.font = `${named ? "700 " : ""}13px system-ui, sans-serif`;
      context.fillStyle = named || this.critical.has(lane.rank) ? ink.ink : ink.muted;
      context.fillText(`${named ? "\u25b6 " : ""}rank ${lane.rank}`, GUTTER - 10, this.top(index) + LANE / 2);
    });
  }

  top(index) { return AXIS + PITCH * index; }
  x(time) { return GUTTER + (time - this.start) * this.scale; }

  paintAxis(context, ink, height) {
    const span = (this.end - this.start) / 1e6;
    const rough = span / 8, magnitude = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((size) => size >= rough);
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.lineWidth = 1;
    for (let index = Math.ceil(this.start / 1e6 / step); index * step * 1e6 <= this.end; index += 1) {
      const x = Math.round(this.x(index * step * 1e6)) + 0.5;
      context.strokeStyle = ink.line;
      context.beginPath();
      context.moveTo(x, AXIS - 8);
      context.lineTo(x, height);
      context.stroke();
      context.fillStyle = ink.muted;
      if (x < this.width - 54) context.fillText(`${(index * step).toFixed(decimals)} ms`, x + 3, 12);
    }
  }

  paintLane(context, ink, wait, lane, index) {
    const top = this.top(index);
    context.fillStyle = ink.faint;
    context.fillRect(GUTTER, top, this.width - GUTTER - 8, LANE);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (!lane.marks.length) {
      context.fillStyle = ink.muted;
      context.fillText("no phase rows in the store", GUTTER + 120, top + LANE / 2);
    }
    let together = null;
    const lay = () => {
      if (together) {
        context.fillStyle = ink.bar;
        context.fillRect(together[0], top, together[1] - together[0], LANE);
        this.hasNarrow = true;
      }
      together = null;
    };
    for (const mark of lane.marks) {
      if (mark.end < this.start || mark.start > this.end) continue;
      if (!mark.side && !mark.error && (mark.end - mark.start) * this.scale < NARROW) {
        const from = this.x(mark.start), to = this.x(mark.end);
        if (together && from - together[1] < 1) together[1] = Math.max(together[1], to);
        else { lay(); together = [from, to]; }
        continue;
      }
      if (!mark.side) lay();
      const left = Math.max(GUTTER, this.x(mark.start)), right = Math.min(this.width, this.x(mark.end));
      const wide = Math.max(0.35, right - left);
      const waits = mark.kind === "wait";
      context.fillStyle = waits ? wait : ink[mark.phase];
      const [y, tall] = mark.side ? [top + LANE + 1, SIDE] : [top, LANE];
      context.fillRect(left, y, wide, tall);
      if (wide > 3) {
        context.strokeStyle = mark.error ? ink.critical : ink.surface;
        context.lineWidth = mark.error ? 2 : 0.5;
        context.strokeRect(left, y, wide, tall);
      }
      const label = waits ? "wait" : mark.phase;
      if (!mark.side && wide > 6.6 * label.length + 8) {
        if (waits) {
          const half = context.measureText(label).width / 2 + 3;
          context.fillStyle = ink["hatch-ground"];
          context.fillRect(left + wide / 2 - half, top + 5, 2 * half, LANE - 10);
        }
        context.fillStyle = waits ? ink.ink : "#10151a";
        context.fillText(label, left + wide / 2, top + LANE / 2);
      }
    }
    lay();
  }

  // Along the lower edge of the lane that all waited for, and over to the next where it changes.
  paintPath(context, ink) {
    const row = new Map(this.lanes.map((lane, index) => [lane.rank, index]));
    const seen = this.timeline.critical.filter((stretch) =>
      row.has(stretch.rank) && stretch.end_ns >= this.start && stretch.start_ns <= this.end);
    const lines = (width, style) => {
      let before = null;
      for (const stretch of seen) {
        const y = this.top(row.get(stretch.rank)) + LANE + 4;
        const start = this.x(stretch.start_ns), end = this.x(stretch.end_ns);
        context.strokeStyle = style;
        if (before && before.barrier === stretch.barrier - 1 && before.y !== y) {
          context.setLineDash([]);
          context.globalAlpha = seen.length > DENSE_PATH ? 0.4 : 1;
          context.lineWidth = seen.length > DENSE_PATH ? 1 : width / 2;
          context.beginPath();
          context.moveTo(before.x, before.y);
          context.lineTo(start, y);
          context.stroke();
          context.globalAlpha = 1;
        }
        context.setLineDash(stretch.certain ? [] : [5, 3]);
        context.lineWidth = width;
        context.beginPath();
        context.moveTo(start, y);
        context.lineTo(end, y);
        context.stroke();
        before = { barrier: stretch.barrier, x: end, y };
      }
      context.setLineDash([]);
    };
    lines(4, ink.critical);
  }

  paintCursor(context, ink) {
    const mark = this.place >= 0 && this.lanes[this.lane].marks[this.place];
    if (!mark) return;
    context.strokeStyle = ink.accent;
    context.lineWidth = 2.5;
    const y = this.top(this.lane);
    const left = this.x(mark.start);
    context.strokeRect(left, mark.side ? y + LANE + 1 : y, Math.max(2, this.x(mark.end) - left), mark.side ? SIDE : LANE);
  }

  textOf(index, mark) {
    return `rank ${this.lanes[index].rank}, ${mark.text}`;
  }

  pathAt(index, time) {
    return this.timeline.critical.find((stretch) =>
      stretch.rank === this.lanes[index].rank && stretch.start_ns <= time && stretch.end_ns >= time);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const time = this.start + (event.clientX - box.left - GUTTER) / this.scale;
    const index = Math.floor((event.clientY - box.top - AXIS) / PITCH);
    const lane = this.lanes[index];
    if (!lane || event.clientX - box.left < GUTTER) return { time };
    const y = event.clientY - box.top - this.top(index);
    if (y > LANE) {
      const stretch = this.pathAt(index, time);
      if (stretch) return { time, text: stretchText(stretch) };
    }
    const slack = 2 / this.scale;
    const mark = lane.marks.find((item) => item.start - slack <= time && item.end + slack >= time && item.side === (y > LANE))
      || lane.marks.find((item) => item.start <= time && item.end >= time);
    return { time, mark, text: mark && this.textOf(index, mark) };
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const shift = (drag.x - event.clientX) / this.scale;
        drag.moved = drag.moved || Math.abs(drag.x - event.clientX) > 3;
        this.look(drag.start + shift, drag.end + shift);
        return hide();
      }
      const { text } = this.at(event);
      if (text) showTip(text, event.clientX, event.clientY); else hide();
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      drag = { x: event.clientX, start: this.start, end: this.end };
      canvas.setPointerCapture(event.pointerId);
    });
    const drop = () => { if (drag && drag.moved) this.onWindow(this.start, this.end); drag = null; };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", hide);
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.at(event).time));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls as ever
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event).time);
    }, { passive: false });
    canvas.addEventListener("blur", () => { this.place = -1; this.said.textContent = ""; this.draw(); });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const marks = () => this.lanes[this.lane].marks;
    if (event.key === "+" || event.key === "=") this.zoom(0.5, this.middle());
    else if (event.key === "-") this.zoom(2, this.middle());
    else if (event.key === "0") this.whole();
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      if (this.place < 0) this.place = marks().findIndex((mark) => mark.end > this.start);
      else this.place = Math.min(Math.max(0, this.place + (event.key === "ArrowRight" ? 1 : -1)), marks().length - 1);
      this.read();
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const time = this.middle();
      this.lane = Math.min(Math.max(0, this.lane + (event.key === "ArrowDown" ? 1 : -1)), this.lanes.length - 1);
      this.place = Math.max(0, marks().findIndex((mark) => mark.end >= time));
      this.read();
    } else if (event.key === "Escape") { this.place = -1; this.said.textContent = ""; this.draw(); }
    else return;
    event.preventDefault();
  }

  middle() {
    const mark = this.place >= 0 && this.lanes[this.lane].marks[this.place];
    return mark ? (mark.start + mark.end) / 2 : (this.start + this.end) / 2;
  }

  read() {
    const mark = this.lanes[this.lane].marks[this.place];
    if (!mark) return;
    if (mark.start < this.start || mark.end > this.end) {
      const span = this.end - this.start;
      this.look(mark.start - span / 4, mark.start - span / 4 + span);
    }
    const path = this.pathAt(this.lane, (mark.start + mark.end) / 2);
    this.said.textContent = this.textOf(this.lane, mark) + (path ? "; on the critical path" : "");
    this.draw();
  }
}

function markOf([code, phase, layer, start, length, side, error, rows, backward], { kinds, phases }) {
  const name = phases[phase], kind = kinds[code];
  const what = kind === "wait" ? `${name}: wait for the others` : kind === "transfer" ? `${name}: transfer` : name;
  let text = `${what}, ${layerName(layer)}${backward ? ", backward" : ""}: ${duration(length)}`;
  if (rows >= 0 && kind !== "wait") text += `, ${count(rows, "row")}`;
  if (error) text += " (the model raised here)";
  return { kind, phase: name, start, end: start + length, side: Boolean(side), error: Boolean(error), text };
}

function stretchText(stretch) {
  const where = stretch.layer >= 0 ? `before the exchange in layer ${stretch.layer}` : "at the step's end";
  return `critical: rank ${stretch.rank}, most of all in ${stretch.phase}, ${where}: ${duration(stretch.extension_ns)} over the mean`
    + (stretch.certain ? "" : " (ambiguous)");
}
