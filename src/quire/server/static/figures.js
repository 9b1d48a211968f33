// The tiles: throughput, sequences, blocks, latencies. Each a number, a line under it, and what it was before.

import { colour, count, element, percent, some, spark, time } from "./draw.js";
import { World } from "./world.js";

const EVERY = 400;
const POINTS = 48;
const QUANTILES = [0.5, 0.9, 0.99];
const MISSING = {
  seats: "a free row",
  rows: "a row of a step in flight",
  pages: "KV blocks",
  budget: "room in a step",
  grammar: "its grammar",
  gap: "an idle engine",
};

export class Figures {
  constructor(section) {
    this.tiles = {};
    this.last = 0;
    for (const [name, title] of Object.entries({
      rate: "Throughput",
      running: "Running",
      pages: "KV blocks held",
      first: "Time to first token, p50",
      gap: "Between tokens, p50",
      prefix: "Prompts from cache",
    })) {
      const [value, note] = [element("p", { class: "value" }), element("p", { class: "note" })];
      const canvas = element("canvas", { "aria-hidden": "true" });
      section.append(element("div", { class: `tile ${name}` }, element("h2", { text: title }), value, note, canvas));
      this.tiles[name] = { value, note, canvas };
    }
  }

  draw(view) {
    const now = performance.now();
    if (now - this.last < EVERY || !view.world.now) return;
    this.last = now;
    const { world } = view;
    const spread = (value) => over(world.samples, view, (sample) => value(sample));
    this.throughput(view, spread);
    const waiting = world.now.waiting ? `${count(world.now.waiting)} waiting${this.head(world)}` : "none waiting";
    const most = world.facts.seats; // max_num_seqs
    this.set("running", String(world.now.running), most ? ` of at most ${count(most)}` : "", waiting);
    this.line("running", spread((sample) => sample.running), "decode", most || undefined);
    this.blocks(world, spread);
    this.latency("first", world.firsts, view);
    this.latency("gap", world.gaps, view);
    this.prefix(view);
  }

  throughput(view, spread) {
    const quiet = view.live && !view.world.now.running && view.at - view.world.at > 2;
    const rate = quiet ? 0 : view.world.rate(view.at);
    this.set("rate", count(rate), " tokens/s", `${count(view.world.now.generated)} generated since the start`);
    this.line("rate", spread((sample) => sample.rate), "decode");
  }

  head(world) {
    if (!world.head || !world.now.waiting) return "";
    return `, #${world.head.number} for ${MISSING[world.head.missing] ?? world.head.missing}`;
  }

  blocks(world, spread) {
    const all = world.now.used + world.now.free;
    const { evictions, preemptions } = world.now;
    const note = `${some(preemptions, "preemption")}, ${some(evictions, "eviction")}`;
    this.set("pages", percent(world.now.used / Math.max(1, all)), ` of ${count(all)}`, note);
    this.line("pages", spread((sample) => sample.used), "verify", all);
  }

  latency(name, pairs, view) {
    const [middle, most, worst] = World.quantiles(pairs, view.at - Math.max(view.span, 15), QUANTILES);
    this.set(name, time(middle), "", `p90 ${time(most)}, p99 ${time(worst)}`);
    this.line(name, filled(buckets(pairs, view).map(median)), "prefill");
  }

  prefix(view) {
    const { world } = view;
    const { queried, hit } = world.now;
    const [, fed, right] = world.now.drafted || [0, 0, 0];
    const note = fed ? `${percent(right / fed)} of ${count(fed)} drafts right` : `${count(hit)} of ${count(queried)}`;
    this.set("prefix", queried ? percent(hit / queried) : "–", "", note);
    this.line("prefix", over(world.samples, view, (sample) => sample.share), "prefill", 1);
  }

  set(name, value, unit, note) {
    const tile = this.tiles[name];
    const says = `${value}${unit}`;
    if (tile.value.textContent !== says) tile.value.replaceChildren(value, element("small", { text: unit }));
    if (tile.note.textContent !== note) tile.note.textContent = note;
  }

  line(name, values, tint, most) {
    spark(this.tiles[name].canvas, values, colour(tint), most);
  }
}

/** Samples' values, the latest in each of so many equal parts of the time shown. */
function over(samples, view, value) {
  const found = new Array(POINTS).fill(null);
  for (const sample of samples) {
    const place = Math.floor(POINTS * (1 - (view.at - sample.at) / view.span));
    if (place >= 0 && place < POINTS) found[place] = value(sample);
  }
  return filled(found);
}

function buckets(pairs, view) {
  const found = Array.from({ length: POINTS }, () => []);
  for (const [at, value] of pairs) {
    const place = Math.floor(POINTS * (1 - (view.at - at) / view.span));
    if (place >= 0 && place < POINTS) found[place].push(value);
  }
  return found;
}

function median(values) {
  return values.length ? values.sort((a, b) => a - b)[values.length >> 1] : null;
}

/** Gaps take the value before them. */
function filled(values) {
  let last = 0;
  return values.map((value) => (last = value ?? last));
}
