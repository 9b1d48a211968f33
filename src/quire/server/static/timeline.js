// Requests over time: a row each, those that run first, then those that wait, then the last that ended.

import { colour, element, fit, owner, some } from "./draw.js";

const ROW = 22;
const MOST = { running: 64, waiting: 10, finished: 40 };

export class Timeline {
  /** pick(number) is called for the request that the user chose. */
  constructor(section, pick) {
    this.pick = pick;
    this.rows = section.querySelector(".rows");
    this.box = section.querySelector(".timeline");
    this.canvas = section.querySelector("canvas");
    this.shown = [];
    this.drawn = "";
    this.canvas.addEventListener("click", (event) => {
      const row = this.shown[Math.floor(event.offsetY / ROW)];
      if (row?.request) pick(row.request.number);
    });
    this.rows.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) pick(Number(button.dataset.number));
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const buttons = [...this.rows.querySelectorAll("button")];
    if (!step || !buttons.length) return;
    event.preventDefault();
    const at = buttons.indexOf(document.activeElement);
    buttons[Math.min(buttons.length - 1, Math.max(0, at + step))].focus();
  }

  draw(view) {
    this.shown = arrange(view);
    this.label(view);
    this.paint(view);
  }

  /** The names at the left: real buttons, kept while the same request stays in the same place; focus goes with it. */
  label(view) {
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.dataset.number : undefined;
    this.shown.forEach((row, i) => {
      const old = this.rows.children[i];
      const fresh = this.named(row, view, old);
      if (old === undefined) this.rows.append(fresh);
      else if (fresh !== old) old.replaceWith(fresh);
    });
    while (this.rows.children.length > this.shown.length) this.rows.lastElementChild.remove();
    if (focused === undefined || this.rows.contains(document.activeElement)) return;
    const moved = this.rows.querySelector(`[data-number="${focused}"]`) ?? this.box;
    moved.focus({ preventScroll: true });
  }

  named(row, view, old) {
    if (!row.request) {
      const [tag, style] = row.title ? ["h3", ""] : ["p", "more"];
      if (old?.tagName === tag.toUpperCase() && old.textContent === row.text) return old;
      return element(tag, { class: style, text: row.text });
    }
    const { number } = row.request;
    const about = `${row.request.what}, ${some(row.request.prompt, "prompt token")}`;
    if (old?.dataset.number !== String(number)) {
      old = element(
        "button",
        { class: "row", type: "button", "data-number": number, tabindex: -1 },
        element("i", { tint: owner(number) }),
        element("b", { text: `#${number}` }),
        element("span"),
      );
    }
    const made = String(Math.round(row.request.made) || "");
    if (old.lastElementChild.textContent !== made) old.lastElementChild.textContent = made;
    const chosen = String(view.chosen === number);
    if (old.getAttribute("aria-pressed") !== chosen) old.setAttribute("aria-pressed", chosen);
    const label = `Request ${number}, ${about}${view.isOwn(row.request) ? ", yours" : ""}`;
    if (old.getAttribute("aria-label") !== label) old.setAttribute("aria-label", label);
    old.classList.toggle("own", view.isOwn(row.request));
    return old;
  }

  paint(view) {
    const width = this.canvas.parentElement.clientWidth;
    const height = this.shown.length * ROW;
    const to = fit(this.canvas, width, height);
    const x = (at) => width * (1 - (view.at - at) / view.span);
    grid(to, view, width, height, x);
    to.font = "11px system-ui, sans-serif";
    to.textBaseline = "middle";
    this.shown.forEach((row, i) => {
      const y = i * ROW;
      if (row.title) {
        to.fillStyle = colour("empty");
        to.fillRect(0, y, width, ROW);
        if (i === 0) axis(to, view, y, x, width);
      } else if (row.request) bar(to, row.request, view, y, x, width);
    });
  }
}

/** Which rows there are: titles, requests, and how many did not fit. */
function arrange(view) {
  const groups = { running: [], waiting: [], finished: [] };
  for (const request of view.world.requests.values()) {
    const what = request.what;
    if (what === "finished") {
      if (request.ended > view.at - view.span) groups.finished.push(request);
    } else groups[what === "waiting" ? "waiting" : "running"].push(request);
  }
  groups.finished.sort((a, b) => b.ended - a.ended);
  const rows = [];
  for (const [name, requests] of Object.entries(groups)) {
    const total = name === "waiting" ? Math.max(requests.length, view.world.now?.waiting ?? 0) : requests.length;
    rows.push({ title: true, text: `${name[0].toUpperCase()}${name.slice(1)} ${total}` });
    for (const request of requests.slice(0, MOST[name])) rows.push({ request });
    if (total > MOST[name]) rows.push({ text: `and ${total - MOST[name]} more` });
  }
  return rows;
}

/** Seconds between two lines: round, and far enough apart for their names. */
function every(span, width) {
  return [1, 2, 5, 10, 30, 60].find((step) => (width * step) / span >= 56) ?? 60;
}

function grid(to, view, width, height, x) {
  to.fillStyle = colour("grid");
  const step = every(view.span, width);
  for (let back = step; back < view.span; back += step) to.fillRect(Math.round(x(view.at - back)), 0, 1, height);
}

function axis(to, view, y, x, width) {
  const step = every(view.span, width);
  to.fillStyle = colour("soft");
  to.textAlign = "center";
  for (let back = step; back < view.span; back += step) {
    to.fillText(back < 60 ? `−${back} s` : `−${back / 60} min`, x(view.at - back), y + ROW / 2);
  }
  to.textAlign = "left";
}

function bar(to, request, view, y, x, width) {
  const middle = y + ROW / 2;
  const chosen = view.chosen === request.number;
  if (chosen || view.isOwn(request)) {
    to.globalAlpha = chosen ? 0.16 : 0.09;
    to.fillStyle = colour("accent");
    to.fillRect(0, y, width, ROW);
    to.globalAlpha = 1;
  }
  for (const [what, from, until] of request.parts) {
    const left = Math.max(-4, x(from));
    const right = Math.min(width + 4, x(until ?? view.at));
    if (right < 0 || left > width) continue;
    const high = what === "waiting" ? 4 : 12;
    to.fillStyle = what === "decode" ? owner(request.number) : colour(what);
    to.beginPath();
    to.roundRect(left, middle - high / 2, Math.max(1.5, right - left), high, what === "waiting" ? 2 : 3);
    to.fill();
  }
  to.fillStyle = colour("bad");
  for (const { at } of request.outs) to.fillRect(x(at) - 1, middle - 9, 3, 18);
  if (request.follows && request.what === "waiting") {
    to.fillStyle = colour("soft");
    to.textAlign = "right";
    to.fillText(`for #${request.follows}'s prefix`, Math.max(90, x(request.at) - 6), middle);
    to.textAlign = "left";
  }
  if (request.ended === null) return;
  const end = x(request.ended);
  if (end > width - 4) return;
  to.fillStyle = colour("soft");
  to.fillText(`${request.made} · ${request.finish}`, end + 6, middle);
}
