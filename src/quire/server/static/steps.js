// Steps: each a column as high as it took, of the tokens it fed; under it how many requests it fed. One in detail.

import { colour, count, element, fit, some, time } from "./draw.js";
import { kind } from "./world.js";

const KINDS = ["decode", "verify", "prefill", "chunk"];
const WIDE = 9;
const FOOT = 26;
const LABELS = 56;
const SLOW = 400;

export class Steps {
  constructor(section, pick) {
    this.pick = pick;
    this.box = section.querySelector(".bars");
    this.canvas = section.querySelector("canvas");
    this.detail = section.querySelector(".one-step");
    this.chosen = null;
    this.held = Infinity;
    this.shown = [];
    this.shownStep = null;
    this.shownAt = 0;
    this.box.addEventListener("pointerdown", (event) => {
      const step = this.shown[this.column(event)];
      this.choose(!step || step.number === this.chosen ? null : step);
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.detail.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) pick(Number(button.dataset.number));
    });
  }

  column(event) {
    const width = this.canvas.clientWidth;
    return this.shown.length - 1 - Math.floor((width - event.offsetX) / WIDE);
  }

  /** Look at one step, and hold those around it; at none: follow the latest. */
  choose(step) {
    this.chosen = step?.number ?? null;
    this.held = step ? this.shown.at(-1).number : Infinity;
    this.shownStep = null;
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape" || event.key === "End") this.choose(null);
    else if (by && this.shown.length) {
      const last = this.shown.length - 1;
      const found = this.shown.findIndex((step) => step.number === this.chosen);
      this.choose(this.shown[Math.min(last, Math.max(0, (found < 0 ? last : found) + by))]);
    } else return;
    event.preventDefault();
  }

  draw(view) {
    const width = this.box.clientWidth;
    const height = this.box.clientHeight;
    const to = fit(this.canvas, width, height);
    const { steps } = view.world;
    let until = steps.length;
    while (until > 0 && (steps[until - 1].ended > view.at || steps[until - 1].number > this.held)) until -= 1;
    this.shown = steps.slice(Math.max(0, until - Math.floor((width - LABELS) / WIDE)), until);
    const step = this.shown.find((each) => each.number === this.chosen) ?? this.shown.at(-1);
    if (this.chosen !== null && step?.number !== this.chosen) this.choose(null);
    this.columns(to, width, height - FOOT, view);
    this.foot(to, width, height, view);
    this.tell(step, view);
  }

  columns(to, width, height, view) {
    const most = scale(this.shown.map((step) => step.took));
    to.font = "11px system-ui, sans-serif";
    for (const share of [1, 0.5]) {
      const y = Math.round(height - share * (height - 10));
      to.fillStyle = colour("grid");
      to.fillRect(0, y, width, 1);
      to.fillStyle = colour("soft");
      to.fillText(time(most * share), 0, y - 3 + (share === 1 ? 13 : 0));
    }
    this.shown.forEach((step, i) => {
      const left = width - (this.shown.length - i) * WIDE;
      const high = Math.min(1, step.took / most) * (height - 10);
      let y = height;
      for (const what of KINDS) {
        if (!step[what]) continue;
        const part = Math.max(1.5, (step[what] / step.fed) * high);
        to.fillStyle = colour(what);
        to.fillRect(left + 1, y - part, WIDE - 2, part);
        y -= part;
      }
      if (step.took > most) {
        to.fillStyle = colour("bad");
        to.fillRect(left + 1, y - 4, WIDE - 2, 3);
      }
      if (view.chosen !== null && step.spans.some(([number]) => number === view.chosen)) {
        to.fillStyle = colour("accent");
        to.fillRect(left + 1, height + 2, WIDE - 2, 2);
      }
      if (step.number === this.chosen) {
        to.strokeStyle = colour("ink");
        to.lineWidth = 1.5;
        to.strokeRect(left + 0.5, y - 2, WIDE - 1, height - y + 2);
      }
    });
  }

  /** How many requests each step fed. */
  foot(to, width, height, view) {
    const rows = Math.max(view.world.facts?.seats ?? 1, 1);
    const widest = Math.max(...this.shown.map((step) => step.spans.length), 1);
    const most = Math.min(rows, widest);
    to.fillStyle = colour("soft");
    to.fillText(`batch ${widest}`, 0, height - 4);
    to.fillStyle = colour("waiting");
    this.shown.forEach((step, i) => {
      const high = Math.max(1, (step.spans.length / most) * (FOOT - 8));
      to.fillRect(width - (this.shown.length - i) * WIDE + 1, height - high, WIDE - 2, high);
    });
  }

  /** In words, and span by span. While steps fly by, not more often than can be read. */
  tell(step, view) {
    const now = performance.now();
    if (!step) {
      this.detail.replaceChildren(element("p", { text: "No step since this page was opened." }));
      return;
    }
    if (this.shownStep === step.number || (this.chosen === null && this.shownStep !== null && now - this.shownAt < SLOW)) return;
    this.shownStep = step.number;
    this.shownAt = now;
    const parts = KINDS.filter((what) => step[what]).map((what) => `${count(step[what])} ${what}`);
    const batch = `${some(step.spans.length, "request")}, ${some(step.fed, "token")}`;
    const says = `${time(step.took)} for ${batch}: ${parts.join(", ")}`;
    const held = this.chosen === null ? "" : ", held:";
    const line = element("p", {}, element("b", { text: `Step ${step.number}${held} ` }), says);
    const spans = step.spans.map(([number, fed, rows]) => {
      const what = kind(fed, rows);
      const about = `Request ${number}: ${some(fed, "token")}, ${what}`;
      const made = element("button", { type: "button", class: what, "data-number": number, tabindex: -1 });
      made.title = about;
      made.setAttribute("aria-label", about);
      made.textContent = step.spans.length <= 24 ? `${number}` : "";
      made.style.flexGrow = String(1 + Math.log2(fed));
      return made;
    });
    this.detail.replaceChildren(line, element("div", { class: "spans" }, ...spans));
    this.label(step, says);
  }

  label(step, says) {
    this.box.setAttribute("aria-valuemin", this.shown[0].number);
    this.box.setAttribute("aria-valuemax", this.shown.at(-1).number);
    this.box.setAttribute("aria-valuenow", step.number);
    this.box.setAttribute("aria-valuetext", `Step ${step.number}: ${says}`);
  }
}

/** What the full height stands for: the slowest step, unless a few are so slow that the others could not be seen. */
function scale(durations) {
  const sorted = durations.toSorted((a, b) => a - b);
  const usual = sorted[Math.floor(0.95 * (sorted.length - 1))] ?? 0;
  return round(Math.max(0.001, Math.min(sorted.at(-1) ?? 0, 2 * usual)));
}

/** The next of 1, 2, 5, 10, ... ms above. */
function round(seconds) {
  const power = 10 ** Math.floor(Math.log10(seconds));
  return power * [1, 2, 5, 10].find((m) => m * power >= seconds * 0.999);
}
