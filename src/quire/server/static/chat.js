// A conversation with the server that is being watched: streamed, and its own request marked in the pictures.

import { element, some, time } from "./draw.js";

const MOST_TOKENS = 300;

export class Chat {
  /** own(id) is called with the answer's id, pick() shows its request, signIn() is called when the server wants a key. */
  constructor(panel, { own, pick, signIn }) {
    Object.assign(this, { own, pick, signIn });
    this.talk = panel.querySelector(".talk");
    this.pace = panel.querySelector(".pace");
    this.form = panel.querySelector("form");
    this.say = panel.querySelector("textarea");
    this.send = panel.querySelector("#send");
    this.messages = [];
    this.model = "";
    this.stopping = null;
    this.talk.append(element("p", { class: "hint", text: "Ask for something, and watch: your request is marked on the timeline and on the map." }));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stopping.abort();
      else if (this.say.value.trim()) this.answer(this.say.value.trim());
    });
    this.say.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
  }

  add(role, text) {
    this.talk.querySelector(".hint")?.remove();
    const line = element("p", { class: role, text });
    this.talk.append(line);
    this.talk.scrollTop = this.talk.scrollHeight;
    return line;
  }

  async answer(text) {
    this.say.value = "";
    this.add("user", text);
    this.messages.push({ role: "user", content: text });
    this.stopping = new AbortController();
    this.send.textContent = "Stop";
    try {
      await this.stream();
    } catch (error) {
      if (error.name !== "AbortError") this.add("error", error.message);
    } finally {
      this.stopping = null;
      this.send.textContent = "Send";
    }
  }

  async stream() {
    const began = performance.now();
    const asked = { model: this.model, messages: this.messages, stream: true, max_tokens: MOST_TOKENS };
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...asked, stream_options: { include_usage: true } }),
      signal: this.stopping.signal,
    });
    if (response.status === 401) this.signIn();
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `the server said ${response.status}`);
    const line = this.add("assistant", "");
    const said = { content: "", first: null, usage: null };
    this.messages.push({ role: "assistant", content: "" });
    try {
      for await (const data of events(response.body)) this.take(data, said, line, began);
    } finally {
      this.messages.at(-1).content = said.content;
      if (!said.content) this.messages.pop();
    }
    this.report(said, performance.now() - began);
  }

  take(data, said, line, began) {
    if (data.error) throw new Error(data.error.message);
    this.own(data.id);
    if (data.usage) said.usage = data.usage;
    const text = data.choices[0]?.delta.content ?? "";
    if (!text) return;
    said.first ??= performance.now() - began;
    said.content += text;
    const low = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 40;
    line.append(text);
    if (low) this.talk.scrollTop = this.talk.scrollHeight;
  }

  report({ first, usage }, took) {
    const tokens = usage?.completion_tokens ?? 0;
    const rate = tokens > 1 ? `, ${Math.round((tokens - 1) / ((took - first) / 1e3))} tokens/s` : "";
    const look = element("button", { type: "button", text: "what happened to it" });
    look.addEventListener("click", () => this.pick());
    const says = `${some(tokens, "token")}, the first after ${time(first === null ? null : first / 1e3)}${rate}`;
    this.pace.replaceChildren(says, look);
  }
}

/** The JSON of each event of a stream, to its end. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
    }
  }
}
