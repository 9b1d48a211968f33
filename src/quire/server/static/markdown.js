// Markdown of answers as DOM nodes. Text never becomes HTML: every node is made by createElement and createTextNode, links
// have one of three schemes, and images become links, since loading one would tell another server what was answered.
//
// Own code rather than a parser and a sanitizer: those make HTML, which this page never sets, and parse an answer anew
// for every token. Here blocks that are complete stay, and only the last one is made again.

import { element } from "./draw.js";

const DEEPEST = 6;
const LONGEST_INLINE = 20000;
const MOST_ROWS = 2000;
const SCHEMES = ["http:", "https:", "mailto:"];

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const LINK = /!?\[([^[\]\n]{0,500})\]\(((?:[^\s<>()]|\([^\s<>()]{0,200}\)){1,1000})(?: "[^"\n]{0,300}")?\)/y;
const BARE = /https?:\/\/[^\s<>"'`)\]]{1,1000}[^\s<>"'`)\].,;:!?*_~]/y;
const SPECIAL = /[\\`*_~![h]/g;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** An answer that grows: `update` with its whole text as often as it likes; what is complete is not made again. */
export class Markdown {
  constructor(box) {
    this.box = box;
    this.settled = 0;
    this.pending = [];
    this.code = null;
  }

  update(text) {
    const lines = text.slice(this.settled).split("\n");
    const found = split(lines);
    const last = found.at(-1);
    const same = found.length === 1 && last.kind === "code" && last.language === this.language;
    if (this.code && same && last.text.length >= this.code.length) {
      this.code.appendData(last.text.slice(this.code.length));
      return;
    }
    for (const node of this.pending) node.remove();
    const nodes = found.map((block) => build(block, 0));
    this.box.append(...nodes);
    this.pending = nodes.slice(-1);
    this.code = last?.kind === "code" ? nodes.at(-1).querySelector("code").firstChild : null;
    this.language = last?.language;
    if (last) this.settled += lines.slice(0, last.line).reduce((sum, line) => sum + line.length + 1, 0);
  }
}

// ---------------------------------------------------------------------------- blocks

/** The blocks of lines: {kind, line, ...}, line being where one begins. */
function split(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = fence(lines, at) ?? single(lines, at) ?? quote(lines, at) ?? list(lines, at) ?? table(lines, at) ?? paragraph(lines, at);
    block.line = at;
    found.push(block);
    at = block.end;
  }
  return found;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, indent, marks, language] = open;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= marks.length && bare === marks[0].repeat(bare.length) && !line.startsWith("    ");
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const inside = lines.slice(at + 1, end);
  const text = (indent ? inside.map((line) => line.replace(new RegExp(`^ {0,${indent.length}}`), "")) : inside).join("\n");
  return { kind: "code", text, language: language.trim().split(/\s/)[0].slice(0, 30), end: end + 1 };
}

function single(lines, at) {
  const heading = HEADING.exec(lines[at]);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2].trim(), end: at + 1 };
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const deep = line.length - line.trimStart().length;
    if (item && item[1].length <= indent + 1) {
      if (/\d/.test(item[2]) !== ordered || item[1].length < indent) break;
      items.push({ lines: [line.slice(item[0].length)], inner: item[0].length });
    } else if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      if (!/^ {2,}\S/.test(next) && !ITEM.test(next)) break;
      items.at(-1).lines.push("");
    } else if (deep > indent || !starts(lines, end)) {
      items.at(-1).lines.push(line.slice(Math.min(deep, items.at(-1).inner)));
    } else break;
  }
  return { kind: "list", ordered, start: Number.parseInt(first[2], 10) || 1, items, end };
}

function table(lines, at) {
  if (!lines[at].includes("|") || !DIVIDER.test(lines[at + 1] ?? "")) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, end), end };
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()).slice(0, 64);

/** Whether a line begins a block that ends a paragraph. */
function starts(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(lines[at])) || table(lines, at) !== null;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function build(block, depth) {
  const nested = (lines) => {
    if (depth >= DEEPEST) return [document.createTextNode(lines.join("\n"))];
    return split(lines).map((inner) => build(inner, depth + 1));
  };
  switch (block.kind) {
    case "code":
      return codeBlock(block.text, block.language);
    case "heading":
      return element("h3", { class: `level-${block.level}` }, ...inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...nested(block.lines));
    case "list":
      return buildList(block, nested);
    case "table":
      return buildTable(block);
    default:
      return element("p", {}, ...inline(block.text));
  }
}

function buildList(block, nested) {
  const items = block.items.map(({ lines }) => {
    const parts = nested(lines);
    if (parts.length && parts[0].nodeName === "P") parts.splice(0, 1, ...parts[0].childNodes);
    return element("li", {}, ...parts);
  });
  return element(block.ordered ? "ol" : "ul", block.ordered ? { start: String(block.start) } : {}, ...items);
}

function buildTable(block) {
  const row = (tag, texts) => element("tr", {}, ...texts.map((text) => element(tag, {}, ...inline(text))));
  const rows = block.rows.slice(0, MOST_ROWS).map((line) => row("td", cells(line)));
  const made = element("table", {}, element("thead", {}, row("th", block.head)), element("tbody", {}, ...rows));
  const parts = [made];
  const more = block.rows.length - rows.length;
  if (more > 0) parts.push(element("p", { text: `${more} more rows: copy the answer to see them` }));
  return element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, ...parts);
}

/** Code with its language and a button that copies it. */
export function codeBlock(text, language = "") {
  const copy = element("button", { type: "button", text: "Copy", "aria-label": "Copy code" });
  const code = element("code");
  code.append(document.createTextNode(text));
  copy.addEventListener("click", () => copyText(code.textContent, copy));
  const head = element("div", { class: "code-head" }, element("span", { text: language || "code" }), copy);
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code));
}

/** Copy text and say so on a button. Without a secure context (http on another host) a selection is copied instead. */
export async function copyText(text, button) {
  const before = button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { class: "away", "aria-label": "Text to copy" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = before), 1500);
}

// ---------------------------------------------------------------------------- inline

/** Nodes of a paragraph's text. Markers without an end are text, so that a half-finished answer is readable. */
function inline(text, depth = 0) {
  if (text.length > LONGEST_INLINE || depth > DEEPEST) return [document.createTextNode(text)];
  const out = [];
  const missing = new Set();
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) out.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const found = span(text, at, depth, missing);
    if (found === null) {
      plain += text[at];
      at += 1;
    } else if (typeof found.node === "string") {
      plain += found.node;
      at = found.end;
    } else {
      flush();
      out.push(found.node);
      at = found.end;
    }
  }
  flush();
  return out;
}

/** What begins at a special character: {node, end}, or null where it is only a character. */
function span(text, at, depth, missing) {
  const sign = text[at];
  if (sign === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
  if (sign === "`") return codeSpan(text, at, missing);
  if (sign === "h") return /\w/.test(text[at - 1] ?? "") ? null : match(BARE, text, at, ([url]) => link(url, [url]));
  if (sign === "[" || sign === "!") {
    return match(LINK, text, at, ([, label, url]) => link(url, depth < DEEPEST ? inline(label || url, DEEPEST) : [label]));
  }
  for (const [mark, tag] of MARKS) if (text.startsWith(mark, at)) return emphasis(text, at, mark, tag, depth, missing);
  return null;
}

function match(form, text, at, make) {
  form.lastIndex = at;
  const found = form.exec(text);
  return found && { node: make(found), end: at + found[0].length };
}

function codeSpan(text, at, missing) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const mark = "`".repeat(width);
  const end = missing.has(mark) ? -1 : text.indexOf(mark, at + width);
  if (end < 0) {
    missing.add(mark);
    return { node: mark, end: at + width };
  }
  return { node: element("code", { text: text.slice(at + width, end) }), end: end + width };
}

function emphasis(text, at, mark, tag, depth, missing) {
  const from = at + mark.length;
  const inWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
  if (missing.has(mark) || inWord || /\s/.test(text[from] ?? " ")) return { node: mark, end: from };
  const end = text.indexOf(mark, from + 1);
  if (end < 0) missing.add(mark);
  if (end < 0 || /\s/.test(text[end - 1])) return { node: mark, end: from };
  return { node: element(tag, {}, ...inline(text.slice(from, end), depth + 1)), end: end + mark.length };
}

/** A link, or its label alone where the address has another scheme or none. */
function link(address, label) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (url === null || !SCHEMES.includes(url.protocol)) return element("span", { title: address }, ...label);
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...label);
}
