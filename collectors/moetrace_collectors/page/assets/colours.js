// Colours of the style sheet for canvases and plotly, which cannot read variables.

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function colours(...names) {
  return Object.fromEntries(names.map((name) => [name, colour(name)]));
}

// The pattern that always means waiting.
export function hatch(context, ground, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = line;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const start of [-6, 0, 6]) { pen.moveTo(start, 6); pen.lineTo(start + 6, 0); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

// A canvas as sharp as the screen, drawn again when its box or the theme changes.
export function sharpCanvas(canvas, draw) {
  const again = () => {
    const box = canvas.getBoundingClientRect();
    if (!box.width) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(context, box.width, box.height);
  };
  new ResizeObserver(again).observe(canvas);
  const onTheme = () => { if (canvas.isConnected) again(); else removeEventListener("moetrace-theme", onTheme); };
  addEventListener("moetrace-theme", onTheme);
  return again;
}
