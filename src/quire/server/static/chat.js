// The chat: a conversation with the server, its list of earlier ones, and what is sent with each message.

import { quoted, readImage } from "./attachments.js";
import { complete } from "./completion.js";
import { ConversationList } from "./conversation-list.js";
import { Conversations } from "./conversations.js";
import { element } from "./draw.js";
import { ChatSettings } from "./settings.js";
import { tabStore } from "./storage.js";
import { Turn } from "./turn.js";

const OPEN = "quire-open-conversation";
const HINT = "Send a message. Conversations are kept in this browser only.";

export class Chat {
  /** own(ids) is called with the ids of an answer and of its request, pick() shows its request, signIn() is called when the server wants a key. */
  constructor(panel, { own, pick, signIn }) {
    Object.assign(this, { panel, own, pick, signIn });
    this.find = (query) => panel.querySelector(query);
    this.talk = this.find(".talk");
    this.say = this.find("#say");
    this.heard = this.find("#heard");
    this.settings = new ChatSettings(this.find("#settings"));
    this.kept = new Conversations((id) => this.changedElsewhere(id));
    this.list = new ConversationList(this.find("#history"), this.kept, this);
    this.stopping = this.look = null;
    this.turns = [];
    this.images = [];
    this.current = this.kept.get(tabStore.getItem(OPEN)) ?? this.kept.list[0] ?? this.kept.create();
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
      else if (this.say.value.trim() || this.images.length) this.send(this.say.value.trim());
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
    on("#compose", "paste", (event) => this.drop(event, event.clipboardData));
    on("#compose", "drop", (event) => this.drop(event, event.dataTransfer));
    for (const drawer of this.panel.querySelectorAll(".above details")) this.closable(drawer);
    on("#new-chat", "click", () => this.open(this.kept.create()));
    on("#attach", "click", () => this.find("#attachment").click());
    on("#attachment", "change", async ({ target }) => {
      await this.attach(target.files[0]);
      target.value = "";
    });
  }

  /** A drawer closes with Escape, and when something else is pressed. */
  closable(drawer) {
    document.addEventListener("pointerdown", (event) => {
      if (!drawer.contains(event.target)) drawer.open = false;
    });
    drawer.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !drawer.open) return;
      event.stopPropagation();
      drawer.open = false;
      drawer.querySelector("summary").focus();
    });
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

  /** Draw the whole conversation, after another one was opened. */
  show() {
    tabStore.setItem(OPEN, this.current.id);
    document.title = this.current.title ? `${this.current.title} · Quire` : "Quire";
    this.turns = this.current.messages.map((message) => this.turn(message));
    this.talk.replaceChildren(...this.turns.map((turn) => turn.box));
    if (!this.turns.length) this.talk.append(element("p", { class: "hint", text: HINT }));
    this.scroll(true);
    this.list.show();
    this.showAwaited();
  }

  /** Append a message to the conversation and to what is shown. */
  add(message) {
    this.current.messages.push(message);
    const turn = this.turn(message);
    this.turns.push(turn);
    this.talk.append(turn.box);
    this.scroll(true);
    return turn;
  }

  /** Remove the messages from an index on. */
  cut(from) {
    this.clear();
    this.current.messages.length = from;
    for (const turn of this.turns.splice(from)) turn.box.remove();
  }

  /** Remove what is no part of the conversation: hints and errors. */
  clear() {
    for (const old of this.talk.querySelectorAll(":scope > :not(article)")) old.remove();
  }

  /** Another tab has kept or removed a conversation. */
  changedElsewhere(id) {
    if (id === this.current.id && !this.stopping) this.show();
    else this.list.show();
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
    if (!call && this.images.length) message.images = this.images;
    this.clear();
    this.say.value = "";
    this.images = call ? this.images : [];
    this.showImages();
    this.fitBox();
    this.add(message);
    this.current.title ||= text.slice(0, 60).replace(/\s+/g, " ") || "An image";
    this.keep();
    this.showAwaited();
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
    const turn = this.add({ role: "assistant", content: "", reasoning: "", tool_calls: [], first: null, finish: null });
    const stopping = new AbortController();
    this.busy(stopping, asking);
    let failed = null;
    try {
      await complete(asked, turn.message, stopping.signal, (ids) => this.grown(turn, ids));
    } catch (error) {
      failed = error;
      turn.message.finish ??= stopping.signal.aborted ? "stopped" : "failed";
    }
    this.end(asking, turn, stopping.signal.aborted ? null : failed);
  }

  /** While an answer comes, `stopping` ends it, and screen readers wait for the whole of it. */
  busy(stopping, asking) {
    this.stopping = stopping;
    this.kept.hold(asking);
    this.find("#send").textContent = stopping ? "Stop" : "Send";
    this.talk.setAttribute("aria-busy", String(stopping !== null));
    if (stopping) this.heard.textContent = "The answer begins.";
  }

  get low() {
    return this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 60;
  }

  grown(turn, ids) {
    this.own(ids);
    const { low } = this;
    turn.grow(() => this.scroll(low));
  }

  /** After an answer, whole or not. One of which nothing came is not kept. */
  end(asking, turn, failed) {
    const { message } = turn;
    const nothing = !message.content && !message.reasoning && !message.tool_calls.length;
    const unkept = nothing && (failed || message.finish === "stopped");
    this.busy(null, null);
    if (asking !== this.current) {
      if (unkept) asking.messages.pop();
      this.kept.keep(asking);
      return this.list.show();
    }
    const { low } = this;
    if (unkept) this.cut(asking.messages.length - 1);
    else turn.show();
    this.keep();
    this.showAwaited();
    this.scroll(low);
    if (failed) return this.fail(failed);
    this.heard.textContent = message.finish === "stopped" ? "The answer was stopped." : "The answer is complete.";
    if (!unkept) this.offerStory(turn);
  }

  offerStory(turn) {
    this.look?.remove();
    this.look = element("button", { type: "button", text: "Explain" });
    this.look.addEventListener("click", () => this.pick());
    turn.buttons.append(this.look);
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

  turn(message) {
    if (message.role === "user") return new Turn(message, { Edit: () => this.edit(message) });
    return new Turn(message, message.role === "assistant" ? { Regenerate: () => this.again() } : {});
  }

  /** Answer the last message of the user or of a tool anew. */
  again() {
    if (this.stopping) return;
    const { messages } = this.current;
    if (messages.at(-1)?.role === "assistant") this.cut(messages.length - 1);
    this.clear();
    if (messages.length) this.answer();
  }

  /** Put a message back into the box; it and what came after it go. */
  edit(message) {
    if (this.stopping) return;
    this.say.value = message.content;
    this.images = message.images ?? [];
    this.showImages();
    this.cut(this.current.messages.indexOf(message));
    this.showAwaited();
    this.fitBox();
    this.say.focus();
  }

  /** Images that go with the next message. */
  showImages() {
    const shown = this.images.map((url, i) => {
      const remove = element("button", { type: "button", text: "Remove", "aria-label": `Remove image ${i + 1}` });
      remove.addEventListener("click", () => {
        this.images = this.images.filter((_, at) => at !== i);
        this.showImages();
        this.say.focus();
      });
      return element("li", {}, element("img", { src: url, alt: `Image ${i + 1}` }), remove);
    });
    this.find("#compose .images").replaceChildren(...shown);
  }

  /** What the model reads, as /v1/models has it. */
  offer(models) {
    this.settings.offer(models);
    const images = this.settings.readsImages;
    this.find("#attach").title = images ? "Put an image or a text file into the message" : "Put a text file into the message";
  }

  /** Files that are pasted or dropped are attached; text goes where it always goes. */
  async drop(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    for (const file of [...files]) await this.attach(file);
  }

  async attach(file) {
    try {
      if (file.type.startsWith("image/") && this.settings.readsImages) {
        this.images = [...this.images, await readImage(file)];
        this.showImages();
      } else this.say.value += `${this.say.value ? "\n\n" : ""}${await quoted(file)}`;
    } catch (error) {
      this.tell(error.message);
    }
    this.fitBox();
    this.say.focus();
  }

  keep() {
    const gone = this.kept.keep(this.current);
    this.list.show();
    tabStore.setItem(OPEN, this.current.id);
    document.title = `${this.current.title} · Quire`;
    if (gone > 0) this.tell("The oldest conversation was dropped: a browser keeps only so many. Export keeps them.");
  }

  scroll(low) {
    if (low) this.talk.scrollTop = this.talk.scrollHeight;
  }
}

/** A message as the API takes it. */
function plain({ role, content, images, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return { role, content, tool_call_id: id };
  if (images?.length) {
    const text = content ? [{ type: "text", text: content }] : [];
    return { role, content: [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...text] };
  }
  return calls?.length ? { role, content, tool_calls: calls } : { role, content };
}
