"use strict";
// Moves through the columns of the timeline: by the slider (keys, touch, a screen reader) or the pointer over the figure.
// Without it the page shows the peak.
(() => {
  const step = JSON.parse(document.getElementById("columns").textContent);
  const at = document.getElementById("at");
  const svg = document.getElementById("step");
  const cursor = document.getElementById("cursor");
  const now = document.getElementById("now");
  const count = step.moments.length;
  const units = [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

  // As memcalc/units.py: the largest unit that keeps a size at 1 or more, three decimals at most.
  function size(bytes) {
    for (const [unit, factor] of units) {
      if (Math.round(bytes / factor * 1000) / 1000 >= 1) {
        return `${(bytes / factor).toFixed(3).replace(/\.?0+$/, "")} ${unit}`;
      }
    }
    return `${bytes} B`;
  }

  function put(key, text) {
    const cell = document.getElementById(`now-${key}`);
    if (cell) cell.textContent = text;
  }

  function show(column) {
    let total = 0;
    for (const [name, held] of Object.entries(step.held)) {
      total += held[column];
      put(name, size(held[column]));
    }
    put("total", size(total));
    for (const [name, live] of Object.entries(step.curves)) {
      put(name, live[column] < 0 ? "" : size(live[column]));
    }
    cursor.setAttribute("x1", column + 0.5);
    cursor.setAttribute("x2", column + 0.5);
    const text = `${step.moments[column]}: ${size(total)}`;
    now.textContent = `${text}, at ${step.names[column]}${column === step.peak ? " (the peak)" : ""}`;
    at.setAttribute("aria-valuetext", text);
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * count);
    at.value = Math.min(Math.max(column, 0), count - 1);
    show(Number(at.value));
  }

  if (count) {
    at.addEventListener("input", () => show(Number(at.value)));
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    at.value = step.peak;  // a browser keeps the place of a page that is loaded again
    show(step.peak);
  }

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
        button.textContent = "Selected";
      }
    });
  }
})();
