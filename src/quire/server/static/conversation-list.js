// The list of the conversations that this browser keeps: open, rename, delete, export and import.

import { element, some } from "./draw.js";

export class ConversationList {
  /** chat: has `current`, `open(conversation)` and `tell(text)`. */
  constructor(drawer, kept, chat) {
    Object.assign(this, { drawer, kept, chat });
    this.find = (query) => drawer.querySelector(query);
    const file = this.find("input");
    this.find("#export").addEventListener("click", () => kept.save());
    this.find("#import").addEventListener("click", () => file.click());
    file.addEventListener("change", () => this.import(file));
  }

  show() {
    const rows = this.kept.list.map((one) => {
      const button = (text, label, action) => {
        const made = element("button", { type: "button", text, "aria-label": label });
        made.addEventListener("click", action);
        return made;
      };
      const open = button(one.title, `Open ${one.title}`, () => this.chat.open(one));
      open.className = "name";
      if (one === this.chat.current) open.setAttribute("aria-current", "true");
      const rename = button("Rename", `Rename ${one.title}`, () => this.rename(one));
      const remove = button("Delete", `Delete ${one.title}`, () => this.remove(one));
      return element("li", {}, open, rename, remove);
    });
    this.find("ul").replaceChildren(...rows);
    this.find("#export").disabled = !rows.length;
  }

  rename(one) {
    const title = prompt("Name of the conversation", one.title)?.trim();
    if (!title) return;
    this.kept.rename(one, title);
    this.show();
  }

  remove(one) {
    if (!confirm(`Delete “${one.title}”? This cannot be undone.`)) return;
    this.kept.remove(one.id);
    if (one === this.chat.current) this.chat.open(this.kept.list[0] ?? this.kept.create());
    else this.show();
  }

  async import(input) {
    try {
      const count = await this.kept.load(input.files[0]);
      if (count) this.chat.open(this.kept.list[0]);
      this.chat.tell(count ? `${some(count, "conversation")} imported.` : "All of its conversations are here already.");
    } catch (error) {
      this.chat.tell(error.message);
    }
    input.value = "";
  }
}
