// Conversations, kept by this browser alone, each under a key of its own so that no tab overwrites what another keeps: at
// most 50, and 4 million characters in all; the oldest are dropped.

import { store, storedKeys } from "./storage.js";
import { download } from "./tape.js";

const PREFIX = "quire-conversation-";
const FORMAT = "quire conversations";
const MOST = 50;
const MOST_CHARACTERS = 4_000_000;
const LARGEST_FILE = 16e6;
const ROLES = ["user", "assistant", "tool"];

export class Conversations {
  /** changed(id) is called after another tab kept or removed one. */
  constructor(changed) {
    this.list = storedKeys().filter((key) => key.startsWith(PREFIX)).map(stored).filter((one) => one !== null);
    this.sort();
    this.held = null;
    addEventListener("storage", (event) => {
      if (event.storageArea !== store || !event.key?.startsWith(PREFIX)) return;
      this.refresh(event.key);
      changed(event.key.slice(PREFIX.length));
    });
  }

  /** A new, empty conversation; it is kept once it has messages. */
  create() {
    return { id: fresh(), title: "", changed: 0, messages: [] };
  }

  get(id) {
    return this.list.find((one) => one.id === id) ?? null;
  }

  /** Let no other tab change a conversation here, while it is answered; null: any may again. */
  hold(one) {
    this.held = one;
  }

  /** Keep a conversation as it is now, as the first of the list. Returns how many old ones had to go.
   *
   *  Where another tab has changed it since, both are kept: this one under a new id. */
  keep(one) {
    const other = stored(PREFIX + one.id);
    if (other !== null && other.changed !== one.changed) {
      this.list = [other, ...this.list.filter((each) => each.id !== one.id)];
      one.id = fresh();
      one.title = `${one.title} (2)`;
    }
    one.changed = Math.max(Date.now(), one.changed + 1);
    this.list = [one, ...this.list.filter((each) => each.id !== one.id)];
    return this.write(one);
  }

  rename(one, title) {
    one.title = title.slice(0, 200);
    this.write(one);
  }

  remove(id) {
    this.list = this.list.filter((one) => one.id !== id);
    store.removeItem(PREFIX + id);
  }

  write(one) {
    const text = JSON.stringify(one);
    for (let gone = 0; ; gone += 1) {
      const oldest = this.list.findLast((each) => each !== one && each !== this.held);
      const others = this.list.filter((each) => each !== one);
      const size = others.reduce((sum, each) => sum + (store.getItem(PREFIX + each.id)?.length ?? 0), text.length);
      const fits = this.list.length <= MOST && size <= MOST_CHARACTERS;
      try {
        if (fits || !oldest) store.setItem(PREFIX + one.id, text);
        if (fits || !oldest) return gone;
      } catch (error) {
        // The browser's own limit: drop the oldest, and give up with the last, which is then only shown.
        if (error.name !== "QuotaExceededError" || !oldest) return gone;
      }
      this.remove(oldest.id);
    }
  }

  /** Take over what another tab has kept under a key, or that it has removed it. */
  refresh(key) {
    const known = this.get(key.slice(PREFIX.length));
    const now = stored(key);
    if (known !== null && known === this.held) return;
    if (now === null) this.list = this.list.filter((one) => one !== known);
    else if (known === null) this.list.push(now);
    else Object.assign(known, now);
    this.sort();
  }

  sort() {
    this.list.sort((a, b) => b.changed - a.changed);
  }

  save() {
    const body = { format: FORMAT, version: 1, conversations: this.list };
    download(`quire-conversations-${new Date().toISOString().slice(0, 10)}.json`, JSON.stringify(body, null, 1));
  }

  /** Add the conversations of a saved file; of one that is there already, the later. Returns how many were added.
   *  Throws an Error that says what is wrong with the file. */
  async load(file) {
    if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than anything this page saves`);
    const found = saved(await file.text());
    if (!found.length) throw new Error(`${file.name} has no conversations saved by this page`);
    const later = found.filter((one) => one.changed > (this.get(one.id)?.changed ?? -1));
    for (const one of later) {
      this.list = [...this.list.filter((each) => each.id !== one.id), one];
      this.sort();
      this.write(one);
    }
    return later.length;
  }
}

const fresh = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

/** The conversation under a key; null if it is something else. */
function stored(key) {
  try {
    const one = conversation(JSON.parse(store.getItem(key)));
    return one.messages.length && one.id === key.slice(PREFIX.length) ? one : null;
  } catch {
    return null;
  }
}

/** The conversations in a saved file's text; none where it is something else. */
function saved(text) {
  try {
    const found = JSON.parse(text);
    if (found?.format !== FORMAT || found.version !== 1) return [];
    return found.conversations.map(conversation).filter((one) => one.messages.length);
  } catch {
    return [];
  }
}

function conversation(one) {
  const messages = one.messages.filter((each) => ROLES.includes(each.role) && typeof each.content === "string");
  return {
    id: String(one.id),
    title: String(one.title).slice(0, 200),
    changed: Number(one.changed) || 0,
    messages: messages.map(message),
  };
}

/** A message as the page made it: fields of another type are left out. */
function message(given) {
  const made = { role: given.role, content: given.content };
  for (const name of ["reasoning", "finish", "tool_call_id"]) if (typeof given[name] === "string") made[name] = given[name];
  for (const name of ["first", "seconds", "tokens", "thought"]) if (Number.isFinite(given[name])) made[name] = given[name];
  if (Array.isArray(given.tool_calls)) made.tool_calls = given.tool_calls.map(toolCall);
  if (Array.isArray(given.images)) made.images = given.images.filter((one) => /^data:image\/[a-z]+;base64,/.test(one));
  return made;
}

function toolCall(call) {
  const { name, arguments: given } = call?.function ?? {};
  return { id: String(call?.id ?? ""), type: "function", function: { name: String(name ?? ""), arguments: String(given ?? "") } };
}
