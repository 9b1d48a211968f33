// Conversations, kept by this browser alone: at most 50, and 2 million characters in all; the oldest are dropped.

import { download } from "./tape.js";

const KEY = "quire-conversations";
const FORMAT = "quire conversations";
const MOST = 50;
const MOST_CHARACTERS = 2_000_000;
const LARGEST_FILE = 16e6;
const ROLES = ["user", "assistant", "tool"];

export class Conversations {
  constructor() {
    this.list = read(localStorage.getItem(KEY));
  }

  /** A new, empty conversation; it is kept once it has messages. */
  create() {
    return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", changed: Date.now(), messages: [] };
  }

  get(id) {
    return this.list.find((one) => one.id === id) ?? null;
  }

  /** Keep a conversation as it is now, as the first of the list. Returns how many old ones had to go. */
  keep(one) {
    one.changed = Date.now();
    this.list = [one, ...this.list.filter((other) => other.id !== one.id)];
    return this.write();
  }

  remove(id) {
    this.list = this.list.filter((one) => one.id !== id);
    this.write();
  }

  write() {
    const before = this.list.length;
    this.list.length = Math.min(before, MOST);
    for (;;) {
      const text = JSON.stringify({ format: FORMAT, version: 1, conversations: this.list });
      try {
        if (text.length <= MOST_CHARACTERS || this.list.length <= 1) localStorage.setItem(KEY, text);
        if (text.length <= MOST_CHARACTERS || this.list.length <= 1) return before - this.list.length;
      } catch (error) {
        // The browser's own limit: drop the oldest, and give up with the last, which is then only shown.
        if (error.name !== "QuotaExceededError" || this.list.length <= 1) return before - this.list.length;
      }
      this.list.pop();
    }
  }

  save() {
    const body = { format: FORMAT, version: 1, conversations: this.list };
    download(`quire-conversations-${new Date().toISOString().slice(0, 10)}.json`, JSON.stringify(body, null, 1));
  }

  /** Add the conversations of a saved file. Returns how many. Throws an Error that says what is wrong with the file. */
  async load(file) {
    if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than anything this page saves`);
    const found = read(await file.text());
    if (!found.length) throw new Error(`${file.name} has no conversations saved by this page`);
    const known = new Set(found.map((one) => one.id));
    this.list = [...found, ...this.list.filter((one) => !known.has(one.id))].sort((a, b) => b.changed - a.changed);
    this.write();
    return found.length;
  }
}

/** The conversations in a text; none where it is something else. Other fields and other types are left out. */
function read(text) {
  try {
    const saved = JSON.parse(text ?? "null");
    if (saved?.format !== FORMAT || saved.version !== 1) return [];
    return saved.conversations.map(conversation).filter((one) => one.messages.length);
  } catch {
    return [];
  }
}

function conversation(one) {
  const messages = one.messages.filter((message) => ROLES.includes(message.role) && typeof message.content === "string");
  return { id: String(one.id), title: String(one.title).slice(0, 200), changed: Number(one.changed) || 0, messages };
}
