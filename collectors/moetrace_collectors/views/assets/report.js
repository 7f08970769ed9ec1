"use strict";
(() => {
  document.documentElement.classList.add("scripted");
  const tip = document.getElementById("tip");

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(4, x + 14), innerWidth - box.width - 4);
    const below = y + 18 + box.height < innerHeight;
    tip.style.left = left + "px";
    tip.style.top = (below ? y + 18 : y - box.height - 12) + "px";
  };
  const hide = () => { tip.hidden = true; };
  const showAt = (text, element) => {
    const box = element.getBoundingClientRect();
    show(text, box.left + box.width / 2, box.top + box.height / 2);
  };

  // Titles become our tips: at once, and for the keyboard too. Without this script they stay titles.
  const textOf = (element) => {
    if (element.dataset.tip === undefined) {
      const title = element.querySelector(":scope > title");
      if (!title) return "";
      element.dataset.tip = title.textContent;
      title.remove();
    }
    return element.dataset.tip;
  };
  const withTip = (target, root) => {
    for (let element = target; element && element !== root; element = element.parentNode) {
      if (element.tagName === "svg") return null;
      if (textOf(element)) return element;
    }
    return null;
  };

  for (const figure of document.querySelectorAll(".explore-marks, .frontier")) {
    figure.addEventListener("pointermove", (event) => {
      const element = withTip(event.target, figure);
      if (element) show(textOf(element), event.clientX, event.clientY); else hide();
    });
    figure.addEventListener("pointerleave", hide);
  }

  for (const figure of document.querySelectorAll(".explore-marks")) {
    const groups = [...figure.querySelectorAll(".marks")];
    const lanes = groups.length
      ? groups.map((group) => [...group.querySelectorAll("rect")])
      : [[...figure.querySelectorAll("g.step")]];
    let lane = 0, place = -1, pointed = null;
    const middle = (element) => { const box = element.getBoundingClientRect(); return box.left + box.width / 2; };
    const point = (element) => {
      if (pointed) pointed.classList.remove("pointed");
      pointed = element;
      if (!element) return hide();
      element.classList.add("pointed");
      element.scrollIntoView({ block: "nearest", inline: "nearest" });
      showAt((groups.length ? rankName(lane) : "") + textOf(element), element);
    };
    const names = [...figure.querySelectorAll(".lane-name")].map((name) => name.textContent + ", ");
    const rankName = (index) => names[index] || "";
    figure.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const change = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (event.key === "Escape") { point(null); place = -1; return; }
      if (move === undefined && (change === undefined || lanes.length < 2)) return;
      event.preventDefault();
      if (move !== undefined) {
        place = Math.min(Math.max(0, place + move), lanes[lane].length - 1);
      } else {
        const from = pointed ? middle(pointed) : 0;
        lane = Math.min(Math.max(0, lane + change), lanes.length - 1);
        place = lanes[lane].findIndex((element) => element.getBoundingClientRect().right >= from);
        if (place < 0) place = lanes[lane].length - 1;
      }
      point(lanes[lane][place] || null);
    });
    figure.addEventListener("blur", () => point(null));
  }

  for (const figure of document.querySelectorAll(".explore-heat")) {
    const data = JSON.parse(document.getElementById(figure.id + "-data").textContent);
    const svg = figure.querySelector("svg");
    const cursor = figure.querySelector(".cursor");
    let row = 0, column = -1;
    const read = (y, x) => {
      const value = data.values[y][x];
      const where = `${data.rowName} ${data.rows[y]}, ${data.columnName} ${data.columns[x]}: `;
      if (value === null) return where + "not reported";
      const ratio = data.means[y] > 0 ? `, ${(value / data.means[y]).toFixed(2)} x mean` : "";
      return `${where}${value.toLocaleString("en")} ${data.unit}${ratio}`;
    };
    const place = (y, x) => {
      cursor.setAttribute("x", data.gutter + x * data.width);
      cursor.setAttribute("y", data.head + y * data.height);
      cursor.setAttribute("visibility", "visible");
    };
    const leave = () => { cursor.setAttribute("visibility", "hidden"); hide(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = Math.floor(((event.clientX - box.left) * data.box[0] / box.width - data.gutter) / data.width);
      const y = Math.floor(((event.clientY - box.top) * data.box[1] / box.height - data.head) / data.height);
      if (x < 0 || y < 0 || x >= data.columns.length || y >= data.rows.length) return leave();
      place(y, x);
      show(read(y, x), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", leave);
    figure.addEventListener("blur", leave);
    figure.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (event.key === "Escape") return leave();
      if (!moves) return;
      event.preventDefault();
      row = Math.min(Math.max(0, row + moves[0]), data.rows.length - 1);
      column = Math.min(Math.max(0, column + moves[1]), data.columns.length - 1);
      place(row, column);
      showAt(read(row, column), cursor);
    });
  }

  const views = [...document.querySelectorAll(".load-view")];
  const choose = (index) => views.forEach((view) => { view.hidden = view.dataset.view !== index; });
  for (const choice of document.querySelectorAll("input[name=load-view]")) {
    choice.addEventListener("change", () => choose(choice.value));
    if (choice.checked) choose(choice.value);
  }

  const filter = document.getElementById("step-filter");
  if (filter) {
    const rows = [...document.querySelectorAll("#step-table tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
    const count = document.getElementById("step-count");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const [row, text] of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = `${shown} of ${rows.length} steps`;
    });
  }
})();
