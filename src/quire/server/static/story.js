// One request: what happened to it, what was decided and why, and when each of its tokens came.

import { colour, element, fit, owner, some, time } from "./draw.js";

const EVERY = 700;
const ID = /\b[a-z]+[-_][0-9a-f]{32}-\d+\b/g;

export class Story {
  /** ask(id) answers with what the server knows of a request, null if nothing; number(id) is what the page calls it. */
  constructor(panel, ask, number) {
    this.panel = panel;
    this.ask = ask;
    this.number = number;
    this.request = null;
    this.asked = 0;
    this.body = "";
    this.nothing();
  }

  nothing() {
    this.panel.replaceChildren(
      element("p", { class: "hint", text: "Choose a request: a row of the timeline, a block of the map, or a span of a step." }),
    );
  }

  /** Show a request, or nothing. */
  show(request) {
    this.request = request;
    this.asked = 0;
    this.body = "";
    if (request === null) this.nothing();
    else this.refresh();
  }

  /** Called with every picture: an unfinished request is asked about again now and then. */
  draw(view) {
    if (!this.request || this.panel.hidden || !view.live) return;
    const due = performance.now() - this.asked > EVERY;
    if (due && !(this.done && this.request.ended !== null)) this.refresh();
  }

  async refresh() {
    const { request } = this;
    this.asked = performance.now();
    const explanation = await this.ask(request.id);
    if (this.request !== request) return;
    const answer = explanation?.answers?.find((each) => each.id === request.id) ?? explanation?.answers?.[0] ?? null;
    this.done = answer === null || answer.state === "finished";
    const body = JSON.stringify(answer);
    if (body === this.body) return;
    this.body = body;
    this.panel.replaceChildren(...(answer === null ? this.unknown() : this.explain(answer)));
    if (answer) this.ticks(answer);
  }

  unknown() {
    const gone = "The server no longer remembers what happened to it.";
    return [this.title(this.request.what), element("p", { class: "says", text: gone })];
  }

  title(state) {
    const { number, id } = this.request;
    const about = [element("i", { tint: owner(number) }), `Request ${number} `, element("small", { text: state })];
    return element("div", {}, element("h3", {}, ...about), element("code", { text: id }));
  }

  explain(answer) {
    const ended = answer.finish_reason ? `finished: ${answer.finish_reason}` : answer.state;
    return [
      this.title(ended),
      element("p", { class: "says", text: `${this.short(answer.summary)}.` }),
      phases(answer.seconds),
      this.facts(answer),
      element("h4", { text: "What happened, and why" }),
      happened(answer, (text) => this.short(text)),
      element("h4", { text: `Its ${some(answer.token_times.length, "token")}: when each came, and how long it took` }),
      element("div", { class: "ticks" }, element("canvas", { role: "img", "aria-label": gaps(answer) })),
    ];
  }

  /** A sentence with other requests called as the page calls them. */
  short(text) {
    return text.replace(ID, (id) => {
      const number = this.number(id);
      return number === null ? `${id.slice(0, id.search(/[-_]/) + 7)}…` : `#${number}`;
    });
  }

  facts(answer) {
    const fact = (name, value) => element("span", {}, `${name} `, element("b", { text: value }));
    const { prefix, seconds } = answer;
    return element(
      "p",
      { class: "facts" },
      fact("prompt", some(answer.prompt_tokens, "token")),
      fact("from the cache", `${prefix.hit_tokens}`),
      fact("generated", `${answer.generated_tokens} of at most ${answer.max_tokens}`),
      fact("first token", time(seconds.first_token)),
      fact("chunks", `${answer.chunks}`),
      fact("preempted", `${answer.preemptions}`),
    );
  }

  /** A column for each token at its time, as high as the time since the one before. */
  ticks(answer) {
    const canvas = this.panel.querySelector(".ticks canvas");
    const width = canvas.clientWidth;
    const to = fit(canvas, width, 56);
    const times = answer.token_times;
    const total = Math.max(answer.seconds.total, times.at(-1) ?? 0) || 1;
    const waits = times.map((at, i) => (i ? at - times[i - 1] : 0));
    const most = Math.max(...waits, 1e-6);
    to.fillStyle = colour("waiting");
    to.fillRect(0, 53, (width * (answer.seconds.queued ?? total)) / total, 3);
    to.fillStyle = owner(this.request.number);
    times.forEach((at, i) => {
      const high = i ? 4 + 46 * (waits[i] / most) : 50;
      to.fillRect(Math.min(width - 1.5, (width * at) / total), 54 - high, 1.5, high);
    });
    to.fillStyle = colour("soft");
    to.font = "11px system-ui, sans-serif";
    to.fillText(`longest ${time(most)}`, 4, 12);
  }
}

function phases(seconds) {
  const parts = ["queued", "prefill", "decode"].filter((name) => seconds[name] > 0);
  const bar = element("div", { class: "phases", "aria-hidden": "true" });
  const words = element("p", { class: "facts" });
  for (const name of parts) {
    const part = element("div", { class: name });
    part.style.flexGrow = String((100 * seconds[name]) / (seconds.total || 1));
    bar.append(part);
    words.append(element("span", {}, `${name} `, element("b", { text: time(seconds[name]) })));
  }
  return element("div", {}, bar, words);
}

function happened(answer, short) {
  const rows = answer.events.map((event) =>
    element(
      "tr",
      {},
      element("td", { text: time(event.at) }),
      element("td", {}, element("i", { class: event.what }), short(event.says)),
    ),
  );
  if (answer.events_left_out) {
    const more = `and ${answer.events_left_out} more like these`;
    rows.push(element("tr", {}, element("td"), element("td", { text: more })));
  }
  return element("table", { "aria-label": "What happened" }, element("tbody", {}, ...rows));
}

function gaps(answer) {
  const times = answer.token_times;
  if (times.length < 2) return `${some(times.length, "token")}`;
  const waits = times.slice(1).map((at, i) => at - times[i]).sort((a, b) => a - b);
  const worst = waits.at(-1);
  return `${times.length} tokens, one each ${time(waits[waits.length >> 1])}, the longest wait ${time(worst)}`;
}
