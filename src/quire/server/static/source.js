// Where pictures come from: this server's stream, that of a server behind it, or a saved file.

import { Tape } from "./tape.js";
import { World } from "./world.js";

export class Source {
  /** name: what the page calls it. requests: the path at which the server explains requests. */
  constructor(name, requests) {
    Object.assign(this, { name, requests });
    this.world = new World();
    this.tape = new Tape();
    this.offset = 0;
    this.live = true;
    this.why = "nothing has come yet";
    this.whole = null;
  }

  /** A saved file. Throws an Error that says what is wrong with it. */
  static async read(file) {
    const made = new Source(file.name, null);
    made.tape = await Tape.read(file);
    made.live = false;
    made.why = null;
    made.whole = made.tape.world(made.tape.end, Infinity);
    return made;
  }

  /** Take in the text of the next frame, which is returned. */
  take(text) {
    const frame = JSON.parse(text);
    if (frame.why) {
      this.why = frame.why;
      return frame;
    }
    this.why = null;
    this.world.apply(frame);
    this.tape.add(text, frame);
    this.offset = frame.at / 1e6 - performance.now() / 1e3;
    return frame;
  }

  /** What is known of a request; null if nothing is. */
  async explain(id) {
    const kept = this.tape.stories.get(id) ?? null;
    if (!this.live) return kept;
    try {
      const response = await fetch(`${this.requests}/${encodeURIComponent(id)}/explain`);
      if (!response.ok) return kept;
      const explanation = await response.json();
      this.tape.stories.set(id, explanation);
      return explanation;
    } catch {
      return kept;
    }
  }

  /** The world to measure and the seconds [from, to] of it: all of a file, the last `span` of a stream. */
  stretch(span) {
    if (this.whole) return [this.whole, this.tape.begin, this.tape.end];
    const to = this.world.now?.running ? this.world.at : Math.max(this.world.at, performance.now() / 1e3 + this.offset);
    return [this.world, to - span, to];
  }
}
