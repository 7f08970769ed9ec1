"use strict";
// Before the first paint, so that a chosen theme does not flash. Storage can be forbidden; then the system's theme holds.
(() => {
  let chosen = "auto";
  try { chosen = localStorage.getItem("moetrace-theme") || "auto"; } catch { /* as the system says */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
