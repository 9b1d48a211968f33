// The page pool as a map: a cell for each KV block, coloured by whose it is, by how many hold it, or by its depth.

import { colour, count, element, fit, owner, percent, some } from "./draw.js";

const LARGEST = 36;
const SMALLEST = 5;
const GLOW = 0.7;

export class Pages {
  constructor(section, pick) {
    this.box = section.querySelector(".map");
    this.canvas = section.querySelector("canvas");
    this.count = section.querySelector(".count");
    this.key = section.querySelector(".key");
    this.by = "owner";
    this.cell = LARGEST;
    this.across = 1;
    this.keyed = "";
    section.querySelector("fieldset").addEventListener("change", (event) => {
      this.by = event.target.value;
    });
    this.canvas.addEventListener("click", (event) => {
      const page = this.at(event);
      if (page && this.world.holders[page] >= 0 && this.world.owners[page]) pick(this.world.owners[page]);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      this.canvas.title = this.about(this.at(event));
    });
  }

  at(event) {
    const column = Math.floor(event.offsetX / this.cell);
    const page = Math.floor(event.offsetY / this.cell) * this.across + column + 1;
    return column < this.across && page < this.world.holders.length ? page : 0;
  }

  about(page) {
    if (!page) return "";
    const { holders, owners, places, facts } = this.world;
    if (holders[page] < 0) return `block ${page}: empty`;
    const from = places[page] * facts.page_size;
    const whose = `request ${owners[page]}'s tokens ${from} to ${from + facts.page_size - 1}`;
    const held = holders[page] ? some(holders[page], "holder") : "kept for prompts that begin the same";
    return `block ${page}: ${whose}, ${held}`;
  }

  draw(view) {
    const { world } = view;
    this.world = world;
    const pages = world.holders.length - 1;
    if (pages < 1) return;
    this.measure(pages);
    const to = fit(this.canvas, this.across * this.cell, Math.ceil(pages / this.across) * this.cell);
    this.canvas.style.width = `${this.across * this.cell}px`;
    const gap = this.cell > 8 ? 2 : 1;
    const deepest = Math.max(8, world.places.reduce((a, b) => Math.max(a, b), 0));
    for (let page = 1; page <= pages; page += 1) {
      const x = ((page - 1) % this.across) * this.cell;
      const y = Math.floor((page - 1) / this.across) * this.cell;
      this.paint(to, view, page, x, y, this.cell - gap, deepest);
    }
    this.tell(world, pages);
  }

  /** The largest cells with which all pages fit. */
  measure(pages) {
    const { clientWidth: width, clientHeight: height } = this.box;
    let cell = LARGEST;
    while (cell > SMALLEST && Math.ceil(pages / Math.floor(width / cell)) * cell > height) cell -= 1;
    this.cell = cell;
    this.across = Math.max(1, Math.floor(width / cell));
  }

  paint(to, view, page, x, y, size, deepest) {
    const { world } = view;
    const holders = world.holders[page];
    const number = world.owners[page];
    to.fillStyle = this.fill(holders, number, world.places[page] / deepest);
    to.beginPath();
    to.roundRect(x, y, size, size, size > 9 ? 3 : 1);
    to.fill();
    if (holders < 0) return;
    const fresh = 1 - (view.at - world.changed[page]) / GLOW;
    if (holders > 0 && fresh > 0 && fresh <= 1) {
      to.globalAlpha = 0.5 * fresh;
      to.fillStyle = colour("panel");
      to.fill();
      to.globalAlpha = 1;
    }
    if (holders > 1) this.shared(to, holders, x, y, size);
    if (number === view.chosen || view.owns(number)) {
      to.strokeStyle = colour("ink");
      to.lineWidth = size > 9 ? 2 : 1;
      to.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    }
  }

  /** How many hold it: a figure where there is room, else a dot. */
  shared(to, holders, x, y, size) {
    to.fillStyle = colour("ground");
    if (size >= 15) {
      to.font = `600 ${Math.round(size * 0.55)}px system-ui, sans-serif`;
      to.textAlign = "center";
      to.textBaseline = "middle";
      to.fillText(String(Math.min(holders, 99)), x + size / 2, y + size / 2 + 0.5);
    } else {
      to.fillRect(x + size / 2 - 1, y + size / 2 - 1, 2.5, 2.5);
    }
  }

  fill(holders, number, depth) {
    if (holders < 0) return colour("empty");
    if (this.by === "sharing") return holders ? ramp(Math.min(1, Math.log2(holders) / 5)) : faint(0);
    if (this.by === "depth") return holders ? ramp(depth) : faint(depth);
    return owner(number, holders ? 1 : 0.3);
  }

  tell(world, pages) {
    const found = world.pageCount();
    const all = world.facts.all_pages ?? pages;
    const more = all > pages ? `, the first ${count(pages)} of ${count(all)}` : "";
    const size = `${some(world.facts.page_size, "token")} each${more}`;
    const used = percent(found.held / Math.max(1, pages));
    const says = `${count(found.held)} held (${used}), ${count(found.shared)} of them shared; ` +
      `${count(found.cached)} cached, ${count(found.empty)} empty; ${size}`;
    if (this.count.textContent !== says) this.count.textContent = says;
    this.canvas.setAttribute("aria-label", `Map of KV blocks: ${says}`);
    const theme = `${this.by} ${colour("ground")}`;
    if (this.keyed !== theme) this.explain();
    this.keyed = theme;
  }

  explain() {
    const swatch = (tint, text) => element("span", {}, element("i", { tint }), text);
    const through = (...tints) => `linear-gradient(90deg, ${tints.join(", ")})`;
    const gradient = element("i", { class: "ramp", tint: through(ramp(0), ramp(0.5), ramp(1)) });
    const empty = swatch(colour("empty"), "empty");
    const parts = {
      owner: () => [
        swatch(through(owner(1), owner(2), owner(3)), "a request"),
        swatch(through(owner(1, 0.3), owner(2, 0.3), owner(3, 0.3)), "cached"),
        empty,
        element("span", { text: "a number: sequences that hold it" }),
      ],
      sharing: () => [element("span", {}, "1 holder", gradient, "32"), swatch(faint(0), "cached"), empty],
      depth: () => [element("span", {}, "start of the prompt", gradient, "deepest"), swatch(faint(0.5), "cached"), empty],
    }[this.by]();
    this.key.replaceChildren(...parts);
  }
}

/** From teal over blue to magenta, in even steps. */
function ramp(share, alpha = 1) {
  const light = Number(colour("owner-light")) + 0.08 - 0.2 * share;
  return `oklch(${light} 0.15 ${190 + 150 * share} / ${alpha})`;
}

const faint = (share) => ramp(share, 0.28);
