// What is sent with each message besides the conversation: model, system prompt, sampling and tools.

import { store } from "./storage.js";

const KEY = "quire-chat-settings";
const NUMBERS = ["temperature", "top_p", "max_tokens"];

export class ChatSettings {
  /** form: has a field for each name below; an empty one means the server's default. */
  constructor(form) {
    this.form = form;
    this.models = [];
    const kept = read(store.getItem(KEY));
    for (const name of ["system", "tools", ...NUMBERS]) form.elements[name].value = kept[name] ?? "";
    this.chosen = kept.model ?? "";
    form.addEventListener("input", () => this.keep());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  keep() {
    this.chosen = this.form.elements.model.value || this.chosen;
    const values = Object.fromEntries(["system", "tools", ...NUMBERS].map((name) => [name, this.form.elements[name].value]));
    store.setItem(KEY, JSON.stringify({ ...values, model: this.chosen }));
    this.check();
  }

  /** The models that the server serves, as /v1/models has them. */
  offer(models) {
    const { model } = this.form.elements;
    this.models = models;
    const names = models.map(({ id }) => id);
    model.replaceChildren(...names.map((name) => new Option(name, name)));
    model.value = names.includes(this.chosen) ? this.chosen : names[0];
  }

  /** Whether the chosen model reads images. */
  get readsImages() {
    const found = this.models.find(({ id }) => id === this.model);
    return found?.architecture?.input_modalities?.includes("image") ?? false;
  }

  get model() {
    return this.form.elements.model.value;
  }

  /** The tools as a list. Throws an Error where their text is not one. */
  get tools() {
    const text = this.form.elements.tools.value.trim();
    if (!text) return [];
    let tools;
    try {
      tools = JSON.parse(text);
    } catch (error) {
      throw new Error(`The tools in the settings are not JSON: ${error.message}`);
    }
    if (!Array.isArray(tools)) throw new Error("The tools in the settings are not a JSON list.");
    return tools;
  }

  check() {
    let wrong = "";
    try {
      this.tools;
    } catch (error) {
      wrong = error.message;
    }
    this.form.querySelector(".wrong").textContent = wrong;
  }

  /** The body of a request for these messages. */
  request(messages) {
    const system = this.form.elements.system.value.trim();
    // Before the models are known, the server's own is asked.
    const model = this.model || undefined;
    const asked = { model, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
    for (const name of NUMBERS) {
      const value = this.form.elements[name].value;
      if (value !== "") asked[name] = Number(value);
    }
    return this.tools.length ? { ...asked, tools: this.tools } : asked;
  }
}

/** Settings in a text; none where it is something else. */
function read(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}
