// Numbers for people, by the same rules as the report and the terminal (number_format.py).

const digits = (value) =>
  value.toLocaleString("en", {
    minimumFractionDigits: Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2,
    maximumFractionDigits: Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2,
  });

export function duration(ns) {
  const size = Math.abs(ns);
  if (size >= 10e9) return `${digits(ns / 1e9)} s`;
  if (size < 1e5 && ns !== 0) return `${digits(ns / 1e3)} us`;
  return `${digits(ns / 1e6)} ms`;
}

// Of a step; one that was not judged has none.
export const length = (ns) => (ns > 0 ? duration(ns) : "-");

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 1) return "<1 %";
  if (value > 99 && value < 100) return ">99 %";
  return `${value.toFixed(0)} %`;
}

// Made once: a heat map of many ranks has tens of thousands of cells.
const WHOLE = new Intl.NumberFormat("en");
export const whole = (value) => WHOLE.format(value);
export const count = (value, noun, plural = `${noun}s`) => `${whole(value)} ${value === 1 ? noun : plural}`;
export const layerName = (layer) =>
  layer === null ? "no single layer" : layer >= 0 ? `layer ${layer}` : "step level";
export const layerCell = (layer) => (layer === null ? "several" : layer >= 0 ? `${layer}` : "step level");

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? digits(value) : value} ${units[unit]}`;
}

// Times are UTC, as in the store and the report.
export const clock = (unixMs) => new Date(unixMs).toISOString().replace("T", " ").slice(0, 19);
export const clockShort = (unixMs) => new Date(unixMs).toISOString().slice(11, 23);
