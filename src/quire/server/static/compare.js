// Several servers, or two saved files, side by side: the same figures of each, and how far the second file's are off.

import { colour, count, element, percent, spark, time } from "./draw.js";
import { World } from "./world.js";

const EVERY = 500;
const POINTS = 60;

/** [title, name in what `measure` returns, format, whether more is better: 1, -1, 0 neither] */
const ROWS = [
  ["Tokens/s", "rate", (n) => count(n), 1],
  ["Tokens generated", "generated", (n) => count(n), 0],
  ["Requests ended", "requests", (n) => count(n), 0],
  ["Running, mean", "running", (n) => n.toFixed(1), 0],
  ["Waiting, mean", "waiting", (n) => n.toFixed(1), -1],
  ["Time to first token, p50", "first50", time, -1],
  ["Time to first token, p99", "first99", time, -1],
  ["Between tokens, p50", "gap50", time, -1],
  ["Between tokens, p99", "gap99", time, -1],
  ["KV blocks held, most", "held", percent, 0],
  ["Prompts from cache", "cached", percent, 1],
  ["Preemptions", "preemptions", (n) => count(n), -1],
  ["Evictions", "evictions", (n) => count(n), 0],
];

export class Comparison {
  /** pick(source) is called for the one that the panels below are to show. */
  constructor(section, pick) {
    Object.assign(this, { section, pick, last: 0, sources: [] });
    this.table = section.querySelector("table");
  }

  /** Show these; one alone needs no comparison. */
  show(sources) {
    this.sources = sources;
    this.last = 0;
    this.section.hidden = sources.length < 2;
    document.body.classList.toggle("several", sources.length > 1);
    const files = sources.every((source) => !source.live);
    this.differs = files && sources.length === 2;
    this.buttons = sources.map((source) => this.button(source));
    this.lines = sources.map(() => element("canvas", { "aria-hidden": "true" }));
    this.states = sources.map(() => element("td"));
    this.cells = ROWS.map(() => sources.map(() => element("td")));
    this.differences = ROWS.map(() => element("td"));
    const row = (title, cells, last) => {
      return element("tr", {}, element("th", { scope: "row", text: title }), ...cells, this.differs ? last : null);
    };
    const names = this.buttons.map((button) => element("th", { scope: "col" }, button));
    const last = this.differs ? element("th", { scope: "col", text: "Difference" }) : null;
    const lines = this.lines.map((line) => element("td", {}, line));
    this.table.replaceChildren(
      element("thead", {}, element("tr", {}, element("td"), ...names, last)),
      element(
        "tbody",
        {},
        files ? null : row("State", this.states, null),
        row("Throughput", lines, element("td")),
        ...ROWS.map(([title], i) => row(title, this.cells[i], this.differences[i])),
      ),
    );
  }

  button(source) {
    const made = element("button", { type: "button", text: source.name, title: "Show it below" });
    made.addEventListener("click", () => this.pick(source));
    return made;
  }

  /** Mark the one that the panels below show. */
  choose(source) {
    this.sources.forEach((one, i) => this.buttons[i].setAttribute("aria-pressed", String(one === source)));
  }

  draw(view) {
    const now = performance.now();
    if (this.section.hidden || now - this.last < EVERY) return;
    this.last = now;
    const files = this.sources.every((source) => !source.live);
    this.section.querySelector(".over").textContent = files ? "the whole of each file" : `the last ${view.span} seconds`;
    const measured = this.sources.map((source) => (source.why ? null : measure(...source.stretch(view.span))));
    this.sources.forEach((source, i) => {
      set(this.states[i], source.why ?? "live");
    });
    const most = Math.max(0, ...measured.flatMap((one) => one?.line ?? []));
    this.lines.forEach((line, i) => spark(line, measured[i]?.line ?? [], colour("decode"), most));
    ROWS.forEach(([, name, format, better], i) => {
      const values = measured.map((one) => one?.[name] ?? null);
      values.forEach((value, j) => set(this.cells[i][j], value === null ? "–" : format(value)));
      if (this.differs) difference(this.differences[i], values, better);
    });
  }
}

function set(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}

/** How far the second value is from the first, as a share of it. */
function difference(cell, [first, second], better) {
  const known = first !== null && second !== null;
  const by = known && first ? (second - first) / first : null;
  const equal = known && (first === second || Math.abs(by) < 0.0005);
  set(cell, equal ? "equal" : by === null ? "–" : `${by > 0 ? "+" : "−"}${(100 * Math.abs(by)).toFixed(1)} %`);
  cell.className = !by || equal || !better ? "" : by * better > 0 ? "better" : "worse";
}

/** The figures of a world between two moments, in seconds on its clock; null where nothing is known. */
export function measure(world, from, to) {
  if (!world.now) return null;
  const within = world.samples.filter(({ at }) => at >= from && at <= to);
  const before = world.samples.findLast(({ at }) => at < from) ?? within[0] ?? world.samples.at(-1);
  const last = within.at(-1) ?? before;
  const since = (name) => last[name] - before[name];
  const all = world.now.used + world.now.free;
  const queried = since("queried");
  const [first50, first99] = World.quantiles(world.firsts, from, [0.5, 0.99]);
  const [gap50, gap99] = World.quantiles(world.gaps, from, [0.5, 0.99]);
  const mean = (name) => overTime(within.length ? within : [before], name, from, to);
  const made = since("generated");
  return {
    rate: made / Math.max(1e-6, to - Math.max(from, before.at)),
    generated: made,
    requests: since("requests"),
    running: mean("running"),
    waiting: all ? mean("waiting") : null,
    held: all ? Math.max(...within.map(({ used }) => used), last.used) / all : null,
    cached: queried ? since("hit") / queried : null,
    preemptions: all ? since("preemptions") : null,
    evictions: all ? since("evictions") : null,
    ...{ first50, first99, gap50, gap99 },
    line: line(within, from, to),
  };
}

/** The mean over time of what holds from each sample to the next. */
function overTime(samples, name, from, to) {
  let [sum, seconds] = [0, 0];
  samples.forEach((sample, i) => {
    const lasts = Math.max(0, Math.min(samples[i + 1]?.at ?? to, to) - Math.max(sample.at, from));
    sum += sample[name] * lasts;
    seconds += lasts;
  });
  return seconds ? sum / seconds : samples.at(-1)[name];
}

/** Tokens a second in each of so many equal parts of the time. */
function line(samples, from, to) {
  const found = new Array(POINTS).fill(0);
  const part = (to - from) / POINTS;
  samples.forEach((sample, i) => {
    const place = Math.min(POINTS - 1, Math.floor((sample.at - from) / part));
    if (i) found[place] += Math.max(0, sample.generated - samples[i - 1].generated) / part;
  });
  return found;
}
