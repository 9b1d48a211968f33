// How everything stands, made of frames. Nothing here is drawn; times are seconds on the engine's clock.

const LIMITS = { seconds: 320, ended: 400, steps: 4000, samples: 4000, gaps: 20000 };

/** One request as the page knows it. parts: [what, from, to or null], what being waiting, prefill or decode. */
class Request {
  constructor([, at, number, id, prompt, max, priority]) {
    Object.assign(this, { number, id, prompt, max, priority, at: at / 1e6 });
    Object.assign(this, { first: null, ended: null, finish: null, hit: 0, made: 0, last: null, outs: [], follows: 0 });
    this.parts = [["waiting", this.at, null]];
  }

  get what() {
    return this.ended !== null ? "finished" : this.parts.at(-1)[0];
  }

  become(what, at) {
    const part = this.parts.at(-1);
    if (part[2] === null) part[2] = at;
    if (what) this.parts.push([what, at, null]);
  }
}

export class World {
  /** whole: nothing is forgotten, for what lies in a file and does not grow. */
  constructor(whole = false) {
    this.limits = whole ? Object.fromEntries(Object.keys(LIMITS).map((name) => [name, Infinity])) : LIMITS;
    this.clear();
  }

  clear() {
    this.epoch = this.facts = this.now = this.head = null;
    this.at = 0;
    this.requests = new Map();
    this.steps = [];
    this.samples = [];
    this.firsts = [];
    this.gaps = [];
    this.trouble = null;
    this.holders = new Int16Array(0);
    this.owners = new Int32Array(0);
    this.places = new Int32Array(0);
    this.changed = new Float64Array(0);
  }

  /** Take in the next frame. */
  apply(frame) {
    if (frame.whole && frame.whole.epoch !== this.epoch) this.clear();
    if (!frame.whole && this.epoch === null) return;
    const before = this.samples.at(-1);
    this.at = frame.at / 1e6;
    this.now = frame.now;
    for (const event of frame.events) this.take(event);
    this.takeSteps(frame.steps);
    if (frame.whole) this.begin(frame.whole);
    this.takePages(frame.whole ? frame.whole.pages : frame.pages, Boolean(frame.whole));
    this.sample(before, frame);
    this.forget();
  }

  // ---------------------------------------------------------------- events of requests

  take([what, at, number, ...rest]) {
    const seconds = at / 1e6;
    if (what === "new") {
      if (!this.requests.has(number)) this.requests.set(number, new Request([what, at, number, ...rest]));
      return;
    }
    if (what === "failed") {
      this.trouble = { at: seconds, reason: rest[0] };
      for (const each of number) this.requests.get(each)?.become("waiting", seconds);
      return;
    }
    const request = this.requests.get(number);
    if (!request) return;
    if (what === "wait") this.head = { number, missing: rest[0], at: seconds };
    else if (what === "open") {
      request.hit = rest[0];
      request.become("prefill", seconds);
      if (this.head?.number === number) this.head = null;
    } else if (what === "hold") {
      request.follows = rest[0];
    } else if (what === "first") {
      if (request.first !== null) return;
      request.first = seconds;
      this.firsts.push([seconds, seconds - request.at]);
      request.become("decode", seconds);
    } else if (what === "made") this.sampled(number, seconds, rest[0]);
    else if (what === "out") {
      request.outs.push({ at: seconds, by: rest[0], lost: rest[1] });
      request.last = null;
      request.become("waiting", seconds);
    } else if (what === "end" && request.ended === null) {
      request.become("", seconds);
      Object.assign(request, { ended: seconds, finish: rest[0], made: rest[1] });
    }
  }

  // ---------------------------------------------------------------- steps

  takeSteps(steps) {
    let spans = [];
    for (const [number, planned, launched, committed, changed, made] of steps) {
      spans = changed === 0 ? spans : changed;
      const seconds = committed / 1e6;
      const step = { number, at: launched / 1e6, took: (committed - launched) / 1e6, planned: planned / 1e6 };
      this.steps.push(Object.assign(step, { ended: seconds, spans, made }, mixture(spans)));
      const each = made / Math.max(1, step.sampled);
      for (const [owner, , rows] of spans) if (rows) this.sampled(owner, seconds, each);
    }
  }

  sampled(number, at, tokens) {
    const request = this.requests.get(number);
    if (!request || request.ended !== null) return;
    request.made += tokens;
    if (request.what === "prefill") request.become("decode", at);
    if (request.last !== null && at > request.last) this.gaps.push([at, (at - request.last) / Math.max(1, tokens)]);
    request.last = at;
  }

  // ---------------------------------------------------------------- a whole picture

  begin(whole) {
    this.epoch = whole.epoch;
    this.facts = whole.facts;
    const standing = new Set();
    for (const request of whole.requests) {
      const number = request.new[2];
      standing.add(number);
      if (!this.requests.has(number)) this.requests.set(number, this.arrived(request));
    }
    if (!whole.complete) return;
    for (const { number, ended } of this.requests.values()) {
      if (ended === null && !standing.has(number)) this.requests.delete(number);
    }
  }

  /** A request that was there before this page was. */
  arrived(known) {
    const request = new Request(known.new);
    const seconds = (micros) => (micros === null ? null : micros / 1e6);
    const [opened, first, ended] = [known.opened, known.first, known.ended].map(seconds);
    if (opened !== null) request.become("prefill", opened);
    if (first !== null) request.become("decode", first);
    if (ended !== null) request.become("", ended);
    else if (known.state === "waiting" && opened !== null) request.become("waiting", this.at);
    return Object.assign(request, { first, ended, finish: known.finish, hit: known.hit, made: known.made });
  }

  // ---------------------------------------------------------------- pages

  takePages(pages, whole) {
    const size = (this.facts?.pages ?? 0) + 1;
    if (this.holders.length !== size) {
      this.holders = new Int16Array(size).fill(-1);
      this.owners = new Int32Array(size);
      this.places = new Int32Array(size);
      this.changed = new Float64Array(size);
    } else if (whole) this.holders.fill(-1);
    for (const [page, holders, owner, place] of pages) {
      if (this.owners[page] !== owner && holders > 0) this.changed[page] = this.at;
      this.holders[page] = holders;
      this.owners[page] = owner;
      this.places[page] = place;
    }
  }

  /** Pages by what they are: held, by more than one, kept for their contents, empty. */
  pageCount() {
    const found = { held: 0, shared: 0, cached: 0, empty: 0 };
    for (let page = 1; page < this.holders.length; page += 1) {
      const holders = this.holders[page];
      if (holders > 0) found.held += 1;
      if (holders > 1) found.shared += 1;
      if (holders === 0) found.cached += 1;
      if (holders < 0) found.empty += 1;
    }
    return found;
  }

  // ---------------------------------------------------------------- figures

  sample(before, frame) {
    const { generated, queried, hit } = frame.now;
    const sample = { ...frame.now, at: this.at, rate: 0, share: queried ? hit / queried : 0 };
    if (before && before.generated <= generated && sample.at > before.at) {
      sample.rate = (generated - before.generated) / (sample.at - before.at);
    }
    this.samples.push(sample);
  }

  /** Tokens a second over the last `seconds`, up to `at`. */
  rate(at, seconds = 2) {
    const since = this.samples.find((sample) => sample.at >= at - seconds);
    const last = this.samples.at(-1);
    if (!since || !last || last.at <= since.at) return 0;
    return (last.generated - since.generated) / (Math.max(at, last.at) - since.at);
  }

  /** Quantiles of (time, value) pairs since a moment: an array, null for each where there are none. */
  static quantiles(pairs, since, wanted) {
    const values = Float64Array.from(pairs.filter(([at]) => at >= since), ([, value]) => value).sort();
    if (!values.length) return wanted.map(() => null);
    return wanted.map((q) => values[Math.min(values.length - 1, Math.floor(q * values.length))]);
  }

  forget() {
    const { limits } = this;
    const since = this.at - limits.seconds;
    const trim = (list, most, old) => {
      let from = Math.max(0, list.length - most);
      while (from < list.length && old(list[from])) from += 1;
      if (from > 64 || from > list.length / 4) list.splice(0, from);
    };
    trim(this.steps, limits.steps, (step) => step.ended < since);
    trim(this.samples, limits.samples, (sample) => sample.at < since);
    trim(this.firsts, limits.gaps, ([at]) => at < since);
    trim(this.gaps, limits.gaps, ([at]) => at < since);
    const ended = [...this.requests.values()].filter((request) => request.ended !== null);
    const spare = ended.length - limits.ended;
    if (spare > 0) {
      ended.sort((a, b) => a.ended - b.ended);
      for (const old of ended.slice(0, spare)) this.requests.delete(old.number);
    }
  }
}

/** What kind a span is: rows are positions sampled, fed are tokens. */
export function kind(fed, rows) {
  if (rows === 0) return "chunk";
  if (rows > 1) return "verify";
  return fed > 1 ? "prefill" : "decode";
}

function mixture(spans) {
  const found = { chunk: 0, prefill: 0, decode: 0, verify: 0, fed: 0, sampled: 0 };
  for (const [, fed, rows] of spans) {
    found[kind(fed, rows)] += fed;
    found.fed += fed;
    if (rows) found.sampled += 1;
  }
  return found;
}
