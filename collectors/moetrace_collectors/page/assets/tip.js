// One tooltip for everything that has data-tip; figures with cells of their own call show and hide.

const tip = document.getElementById("tip");

export function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(Math.max(4, x + 14), innerWidth - box.width - 4)}px`;
  const below = y + 18 + box.height < innerHeight;
  tip.style.top = `${below ? y + 18 : y - box.height - 12}px`;
}

export function hide() {
  tip.hidden = true;
}

document.addEventListener("pointermove", (event) => {
  const holder = event.target.closest && event.target.closest("[data-tip]");
  if (holder) show(holder.dataset.tip, event.clientX, event.clientY);
  else if (!(event.target.closest && event.target.closest("[data-own-tip]"))) hide();
});
document.addEventListener("focusin", (event) => {
  const holder = event.target.closest("[data-tip]");
  if (!holder || !holder.matches(":focus-visible")) return hide();
  const box = holder.getBoundingClientRect();
  show(holder.dataset.tip, box.left + box.width / 2, box.top + box.height / 2);
});
document.addEventListener("focusout", hide);
addEventListener("scroll", hide, { passive: true, capture: true });
