// The chat: a conversation with the server, its list of earlier ones, and what is sent with each message.

import { complete } from "./completion.js";
import { Conversations } from "./conversations.js";
import { element } from "./draw.js";
import { ChatSettings } from "./settings.js";
import { Turn } from "./turn.js";

const LARGEST_FILE = 200_000;
const HINT = "Ask for something. What you write is kept in this browser only.";

export class Chat {
  /** own(id) is called with the answer's id, pick() shows its request, signIn() is called when the server wants a key. */
  constructor(panel, { own, pick, signIn }) {
    Object.assign(this, { panel, own, pick, signIn });
    this.find = (query) => panel.querySelector(query);
    this.talk = this.find(".talk");
    this.say = this.find("#say");
    this.settings = new ChatSettings(this.find("#settings"));
    this.kept = new Conversations();
    this.stopping = null;
    this.current = this.kept.list[0] ?? this.kept.create();
    this.wire();
    this.show();
  }

  get model() {
    return this.settings.model;
  }

  wire() {
    const on = (query, what, action) => this.find(query).addEventListener(what, action);
    on("#compose", "submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stopping.abort();
      else if (this.say.value.trim()) this.send(this.say.value.trim());
    });
    on("#say", "keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.stopping) this.find("#compose").requestSubmit();
    });
    on("#say", "input", () => this.fitBox());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopping?.abort();
    });
    on("#new-chat", "click", () => this.open(this.kept.create()));
    on("#export", "click", () => this.kept.save());
    on("#import", "click", () => this.find("#conversations-file").click());
    on("#attach", "click", () => this.find("#attachment").click());
    on("#conversations-file", "change", (event) => this.import(event.target));
    on("#attachment", "change", (event) => this.attach(event.target));
  }

  fitBox() {
    this.say.style.height = "auto";
    this.say.style.height = `${Math.min(this.say.scrollHeight + 2, 220)}px`;
  }

  // ------------------------------------------------------------------ conversations

  open(conversation) {
    this.stopping?.abort();
    this.current = conversation;
    this.find("#history").open = false;
    this.show();
    this.say.focus();
  }

  show() {
    const { messages } = this.current;
    this.talk.replaceChildren(...messages.map((message, i) => this.turn(message, i).box));
    if (!messages.length) this.talk.append(element("p", { class: "hint", text: HINT }));
    this.talk.scrollTop = this.talk.scrollHeight;
    this.showList();
    this.showAwaited();
  }

  showList() {
    const rows = this.kept.list.map((one) => {
      const button = (text, label, action) => {
        const made = element("button", { type: "button", text, "aria-label": label });
        made.addEventListener("click", action);
        return made;
      };
      const open = button(one.title, `Open ${one.title}`, () => this.open(one));
      open.className = "name";
      if (one === this.current) open.setAttribute("aria-current", "true");
      const rename = button("Rename", `Rename ${one.title}`, () => this.rename(one));
      const remove = button("Delete", `Delete ${one.title}`, () => this.remove(one));
      return element("li", {}, open, rename, remove);
    });
    this.find(".conversations").replaceChildren(...rows);
    this.find("#export").disabled = !rows.length;
  }

  rename(one) {
    const title = prompt("Name of the conversation", one.title)?.trim();
    if (!title) return;
    one.title = title.slice(0, 200);
    this.kept.write();
    this.showList();
  }

  remove(one) {
    if (!confirm(`Delete “${one.title}”? This cannot be undone.`)) return;
    this.kept.remove(one.id);
    if (one === this.current) this.open(this.kept.list[0] ?? this.kept.create());
    else this.showList();
  }

  async import(input) {
    try {
      const count = await this.kept.load(input.files[0]);
      this.open(this.kept.list[0]);
      this.tell(`${count} conversations were imported.`);
    } catch (error) {
      this.tell(error.message);
    }
    input.value = "";
  }

  // ------------------------------------------------------------------ asking

  /** The first tool call that has no result yet. */
  get awaited() {
    const { messages } = this.current;
    const from = messages.findLastIndex((message) => message.role === "assistant");
    return messages[from]?.tool_calls?.[messages.length - 1 - from] ?? null;
  }

  showAwaited() {
    const name = this.awaited?.function.name;
    this.say.placeholder = name ? `Result of ${name}` : "Message";
  }

  send(text) {
    const call = this.awaited;
    const message = call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
    this.say.value = "";
    this.fitBox();
    this.current.messages.push(message);
    this.current.title ||= text.slice(0, 60).replace(/\s+/g, " ");
    this.keep();
    this.show();
    if (!this.awaited) this.answer();
  }

  async answer() {
    const asking = this.current;
    let asked;
    try {
      asked = this.settings.request(asking.messages.map(plain));
    } catch (error) {
      this.fail(error);
      return;
    }
    const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], first: null, finish: null };
    asking.messages.push(message);
    const turn = this.turn(message, asking.messages.length - 1);
    this.talk.append(turn.box);
    this.scroll(true);
    const stopping = new AbortController();
    this.stopping = stopping;
    this.find("#send").textContent = "Stop";
    let failed = null;
    try {
      await complete(asked, message, stopping.signal, (_, id) => this.grown(turn, id));
    } catch (error) {
      failed = error;
      message.finish ??= stopping.signal.aborted ? "stopped" : "failed";
    }
    this.end(asking, turn, stopping.signal.aborted ? null : failed);
  }

  grown(turn, id) {
    this.own(id);
    const low = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 60;
    turn.grow(() => this.scroll(low));
  }

  /** After an answer, whole or not. One of which nothing came is not kept. */
  end(asking, turn, failed) {
    const { message } = turn;
    this.stopping = null;
    this.find("#send").textContent = "Send";
    if (!message.content && !message.reasoning && !message.tool_calls.length) {
      if (failed || message.finish === "stopped") asking.messages.pop();
    }
    this.kept.keep(asking);
    if (asking !== this.current) return this.showList();
    const low = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 60;
    turn.show();
    this.show();
    this.scroll(low);
    if (failed) this.fail(failed);
    else this.offerStory();
  }

  offerStory() {
    const look = element("button", { type: "button", text: "what happened to it" });
    look.addEventListener("click", () => this.pick());
    this.talk.lastElementChild?.querySelector(".actions")?.append(look);
  }

  /** Why there is no answer, and what can be done about it. */
  fail(error) {
    if (error.status === 401) this.signIn();
    const button = (text, action) => {
      const made = element("button", { type: "button", text });
      made.addEventListener("click", action);
      return made;
    };
    const long = error.code === "context_length_exceeded";
    const again = long ? button("New chat", () => this.open(this.kept.create())) : button("Retry", () => this.again());
    this.talk.append(element("div", { class: "error", role: "alert" }, element("p", { text: error.message }), again));
    this.scroll(true);
  }

  tell(text) {
    this.talk.append(element("p", { class: "hint", role: "status", text }));
    this.scroll(true);
  }

  // ------------------------------------------------------------------ changing turns

  turn(message, index) {
    if (message.role === "user") return new Turn(message, { Edit: () => this.edit(index) });
    const last = index === this.current.messages.length - 1;
    return new Turn(message, last && message.role === "assistant" ? { Regenerate: () => this.again() } : {});
  }

  /** Answer the last message of the user or of a tool anew. */
  again() {
    if (this.stopping) return;
    const { messages } = this.current;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    this.show();
    if (messages.length) this.answer();
  }

  /** Put a message back into the box; it and what came after it go. */
  edit(index) {
    if (this.stopping) return;
    this.say.value = this.current.messages[index].content;
    this.current.messages.length = index;
    this.show();
    this.fitBox();
    this.say.focus();
  }

  async attach(input) {
    const [file] = input.files;
    input.value = "";
    const text = file.size > LARGEST_FILE ? null : await file.text();
    if (text === null) this.tell(`${file.name} is larger than ${LARGEST_FILE / 1000} kB.`);
    else if (text.includes("\0") || text.includes("\ufffd")) this.tell(`${file.name} is not text; this server reads text only.`);
    else this.say.value += `${this.say.value ? "\n\n" : ""}${file.name}:\n\`\`\`\n${text.trimEnd()}\n\`\`\`\n`;
    this.fitBox();
    this.say.focus();
  }

  keep() {
    const gone = this.kept.keep(this.current);
    if (gone > 0) this.tell("The oldest conversation was dropped: a browser keeps only so many. Export keeps them.");
  }

  scroll(low) {
    if (low) this.talk.scrollTop = this.talk.scrollHeight;
  }
}

/** A message as the API takes it. */
function plain({ role, content, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return { role, content, tool_call_id: id };
  return calls?.length ? { role, content, tool_calls: calls } : { role, content };
}
