// One turn of a conversation as it is shown: text, reasoning, tool calls, notes and buttons.

import { element, some, time } from "./draw.js";
import { Markdown, codeBlock, copyText } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

export class Turn {
  /** actions: the buttons' texts and what they do. */
  constructor(message, actions) {
    this.message = message;
    this.text = element("div", { class: "text" });
    this.thoughts = element("details", { class: "thoughts" }, element("summary"), element("div", { class: "text" }));
    this.calls = element("div", { class: "calls" });
    this.images = element("div", { class: "images" }, ...(message.images ?? []).map(image));
    this.notes = element("p", { class: "notes" });
    this.buttons = element("div", { class: "actions" });
    this.markdown = new Markdown(this.text);
    this.box = element("article", { class: message.role, "aria-label": NAMES[message.role] });
    this.box.append(this.images, this.thoughts, this.text, this.calls, this.notes, this.buttons);
    this.next = 0;
    this.frame = null;
    this.addButtons(actions);
    this.show();
  }

  addButtons(actions) {
    const copy = element("button", { type: "button", text: "Copy" });
    copy.addEventListener("click", () => copyText(this.message.content, copy));
    this.buttons.append(copy);
    for (const [text, action] of Object.entries(actions)) {
      const button = element("button", { type: "button", class: text.toLowerCase(), text });
      button.addEventListener("click", action);
      this.buttons.append(button);
    }
  }

  /** Show what has come with one of the next frames: drawing takes at most a tenth of the time. */
  grow(drawn) {
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      if (now < this.next) return this.grow(drawn);
      this.show();
      drawn();
      this.next = now + 9 * (performance.now() - now);
    });
  }

  /** Show the message as it is now. */
  show() {
    const { message } = this;
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    if (message.role === "assistant") this.markdown.update(message.content);
    else this.text.textContent = message.content;
    this.thoughts.hidden = !message.reasoning;
    if (message.reasoning) {
      const done = message.content || message.finish;
      this.thoughts.firstChild.textContent = done ? thought(message.thought) : "Thinking …";
      this.thoughts.lastChild.textContent = message.reasoning;
    }
    this.calls.replaceChildren(...(message.tool_calls ?? []).map(toolCall));
    this.notes.textContent = notes(message);
    this.box.classList.toggle("waiting", message.role === "assistant" && !message.finish);
  }
}

const image = (url, i) => element("img", { src: url, alt: `Image ${i + 1} of the message` });

function toolCall({ function: { name, arguments: given } }) {
  let text = given;
  try {
    text = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // Not complete yet, or not JSON: as it came.
  }
  return element("div", {}, element("p", {}, "Calls ", element("b", { text: name })), codeBlock(text, "arguments"));
}

/** A server in front of another gets short thoughts in one piece, which says nothing of their duration. */
const thought = (seconds) => (seconds > 0 ? `Thought for ${time(seconds)}` : "Thoughts");

/** How long an answer took and why it ended, where that is not its natural end. */
function notes({ role, finish, tokens, first, seconds }) {
  if (role !== "assistant" || !finish) return "";
  const said = [];
  if (finish === "length") said.push("Cut off at the limit of tokens: raise it in the settings, or ask to continue");
  if (finish === "stopped") said.push("Stopped");
  if (finish === "failed") said.push("Incomplete");
  if (tokens) said.push(some(tokens, "token"));
  if (first) said.push(`first token after ${time(first)}`);
  if (tokens > 1 && seconds > first) said.push(`${((tokens - 1) / (seconds - first)).toFixed(1)} tokens/s`);
  return said.join(" · ");
}
