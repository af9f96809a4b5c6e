// Sorting and filtering of tables, copy buttons, values of points. Without it a page has the same content.
"use strict";
(() => {
  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // Sorting: by the first number of a cell, times as seconds; cells without one come last.
  const key = (cell) => {
    const text = cell.textContent.trim().replaceAll(",", "");
    const clock = text.match(/^(?:(\d+):)?(\d+):(\d\d)$/);
    if (clock) return 3600 * (clock[1] || 0) + 60 * clock[2] + +clock[3];
    const number = text.match(/^([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)([kMG](?![A-Za-z]))?/);
    return number ? +number[1] * ({ k: 1e3, M: 1e6, G: 1e9 }[number[2]] ?? 1) : text;
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
    return typeof a === "number" ? -1 : 1;
  };
  for (const table of document.querySelectorAll(".scroll table")) {
    const body = table.tBodies[0];
    if (body.rows.length < 4) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = make("button", { type: "button", className: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
        const turn = descending ? -1 : 1;
        rows.sort((a, b) => compare(a[0], b[0]) * (typeof a[0] === typeof b[0] ? turn : 1));
        body.append(...rows.map(([, row]) => row));
      });
    });
    if (body.rows.length < 9) continue;
    const count = make("output", {}, `${body.rows.length} rows`);
    const field = make("input", { type: "search", placeholder: "e.g. headfold 50%" });
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = words.length ? `${shown} of ${body.rows.length} rows` : `${shown} rows`;
    });
    const label = make("label", {}, "Filter rows ", field);
    table.parentElement.before(make("p", { className: "filter" }, label, " ", count));
  }

  // Copy buttons.
  for (const block of document.querySelectorAll("pre.command")) {
    const button = make("button", { type: "button", className: "copy" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(block.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block); // to be copied by hand
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    block.before(make("div", { className: "copy-line", ariaLive: "polite" }, button));
  }

  // Values of points: under the mouse, or by the arrow keys in the box of a picture.
  const tip = make("div", { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  document.body.append(tip);
  const show = (point) => {
    const box = point.getBoundingClientRect();
    tip.textContent = point.dataset.value;
    tip.hidden = false;
    const left = Math.min(box.right + 8, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, box.top - tip.offsetHeight - 6)}px`;
  };
  for (const point of document.querySelectorAll("[data-value]")) {
    point.addEventListener("pointerenter", () => show(point));
    point.addEventListener("pointerleave", () => (tip.hidden = true));
  }
  addEventListener("scroll", () => (tip.hidden = true), { passive: true });
  for (const box of document.querySelectorAll("figure > [tabindex]")) {
    const points = [...box.querySelectorAll("[data-value]")];
    if (!points.length) continue;
    points.sort((a, b) => a.getBoundingClientRect().left - b.getBoundingClientRect().left);
    let index = -1;
    const clear = () => points[index]?.classList.remove("current");
    box.addEventListener("blur", () => (clear(), (tip.hidden = true)));
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") clear(), (tip.hidden = true);
      if (!step) return;
      event.preventDefault();
      clear();
      index = index < 0 && step < 0 ? points.length - 1 : (index + step + points.length) % points.length;
      points[index].classList.add("current");
      points[index].scrollIntoView({ block: "nearest", inline: "nearest" });
      show(points[index]);
    });
    if (box.parentElement.querySelector(".keys")) continue; // of the same picture for another width
    const words = "Hover over a point for its values, or focus the picture and use the arrow keys.";
    box.parentElement.append(make("p", { className: "note keys" }, words));
  }

  // What is wider than the page says that it scrolls.
  const hint = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      box.classList.toggle("cut", box.clientWidth > 0 && box.scrollWidth > box.clientWidth + 1);
    }
  };
  addEventListener("resize", hint);
  document.addEventListener("toggle", hint, true);
  hint();

  // A link of the contents opens what it leads to.
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target) for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  };
  addEventListener("hashchange", open);
  open();
})();
