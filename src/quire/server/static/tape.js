// What was seen, kept as frames: to hold the picture, to go back in it, to save it to a file and open it again.

import { World } from "./world.js";

const KEEP_SECONDS = 300;
const KEEP_BYTES = 24e6;
const LARGEST_FILE = 96e6;
const FORMAT = "quire live page";

export class Tape {
  constructor() {
    this.frames = [];
    this.bytes = 0;
    this.stories = new Map();
  }

  get begin() {
    return this.frames.length ? this.frames[0].at : 0;
  }

  get end() {
    return this.frames.length ? this.frames.at(-1).at : 0;
  }

  /** Keep a frame as it came. The oldest go, up to the next whole one: a picture can only begin with such a one. */
  add(text, frame) {
    if (!this.frames.length && !frame.whole) return;
    const epoch = frame.whole?.epoch ?? this.frames.at(-1).epoch;
    if (this.frames.length && this.frames.at(-1).epoch !== epoch) this.clear();
    this.frames.push({ at: frame.at / 1e6, whole: Boolean(frame.whole), epoch, text });
    this.bytes += text.length;
    const next = this.frames.findIndex((kept, i) => i > 0 && kept.whole);
    const old = next > 0 && this.frames[next].at < this.end - KEEP_SECONDS;
    if (next > 0 && (old || this.bytes > KEEP_BYTES)) {
      for (const gone of this.frames.splice(0, next)) this.bytes -= gone.text.length;
    }
  }

  clear() {
    this.frames = [];
    this.bytes = 0;
    this.stories.clear();
  }

  /** How things stood at a moment, with what led there over `span` seconds; Infinity: with all that was seen. */
  world(at, span) {
    let from = 0;
    this.frames.forEach((frame, i) => {
      if (frame.whole && frame.at <= at - span) from = i;
    });
    const world = new World(span === Infinity);
    for (const frame of this.frames.slice(from)) {
      if (frame.at > at && world.epoch !== null) break;
      world.apply(JSON.parse(frame.text));
    }
    return world;
  }

  /** A file's text. stories: explanations of requests, by id. */
  file() {
    const head = { format: FORMAT, version: 1, saved: new Date().toISOString() };
    const stories = JSON.stringify(Object.fromEntries(this.stories));
    const frames = this.frames.map((frame) => frame.text).join(",\n");
    return `${JSON.stringify(head).slice(0, -1)},\n"stories":${stories},\n"frames":[\n${frames}\n]}\n`;
  }

  /** The tape in a saved file. Throws an Error that says what is wrong with it. */
  static async read(file) {
    if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than anything this page saves`);
    let saved;
    try {
      saved = JSON.parse(await file.text());
    } catch {
      throw new Error(`${file.name} is not JSON`);
    }
    if (saved?.format !== FORMAT || !Array.isArray(saved.frames) || !saved.frames[0]?.whole) {
      throw new Error(`${file.name} was not saved by this page`);
    }
    if (saved.version !== 1) throw new Error(`${file.name} was saved by a newer version of this page`);
    const tape = new Tape();
    for (const frame of saved.frames) tape.frames.push(kept(frame));
    for (const [id, story] of Object.entries(saved.stories ?? {})) tape.stories.set(id, story);
    tape.world(tape.end, KEEP_SECONDS);
    return tape;
  }
}

function kept(frame) {
  // Files that were saved before version 0.2 have another name for events.
  frame.events ??= frame.told;
  return { at: frame.at / 1e6, whole: Boolean(frame.whole), epoch: frame.whole?.epoch, text: JSON.stringify(frame) };
}

/** Let the browser keep a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
