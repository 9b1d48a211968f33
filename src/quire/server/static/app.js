// The page: the stream comes in, every panel is drawn from one picture, and what is chosen is chosen in all of them.

import { Chat } from "./chat.js";
import { element, forgetColours } from "./draw.js";
import { Figures } from "./figures.js";
import { Timeline } from "./timeline.js";
import { Pages } from "./pages.js";
import { signedIn } from "./session.js";
import { Steps } from "./steps.js";
import { Story } from "./story.js";
import { Tape, download } from "./tape.js";
import { theme } from "./theme.js";
import { World } from "./world.js";

const DELAY = 0.1;
const FRAME = 1000 / 30;
const STORIES = 48;

const find = (id) => document.getElementById(id);

const live = new World();

/** What is looked at: a world, a moment (seconds), how much time, which request. live: the moment moves. */
const view = {
  world: live,
  at: 0,
  span: 15,
  chosen: null,
  live: true,
  own: null,
  owned: new Set(),
  isOwn: (request) => view.own !== null && request.id.startsWith(`${view.own}-`),
  owns: (number) => view.owned.has(number),
};
const tape = new Tape();
let saved = null;
let offset = 0;
let stream = null;

const figures = new Figures(find("figures"));
const timeline = new Timeline(find("requests"), choose);
const steps = new Steps(find("steps"), choose);
const pages = new Pages(find("pages"), choose);
const story = new Story(find("story"), explain, numberOf);
const chat = new Chat(find("chat"), { own: (id) => own(id), pick: () => chooseOwn(), signIn: () => enter() });

// -------------------------------------------------------------------- the stream

function listen() {
  stream?.close();
  stream = new EventSource("ui/events");
  stream.onopen = () => say("live", "live");
  stream.onmessage = (event) => take(event.data);
  stream.onerror = () => {
    say("lost", "not connected");
    if (stream.readyState === EventSource.CLOSED) setTimeout(enter, 2000);
  };
}

function take(text) {
  const frame = JSON.parse(text);
  live.apply(frame);
  tape.add(text, frame);
  offset = frame.at / 1e6 - performance.now() / 1e3;
  if (!saved && live.facts) introduce(live);
  if (view.own === null) return;
  for (const request of live.requests.values()) if (view.isOwn(request)) view.owned.add(request.number);
}

function say(is, text) {
  const held = saved ? "a saved file" : view.live ? text : "held";
  find("state").dataset.is = saved || !view.live ? "held" : is;
  find("state").textContent = held;
}

function introduce({ facts }) {
  const own = `${facts.device}, ${facts.dtype}, ${facts.max_model_len} tokens of context, ${facts.budget} a step`;
  const about = facts.about ?? own;
  document.body.classList.toggle("elsewhere", !facts.pages);
  const model = find("model");
  if (model.textContent === `${chat.model} ${about}`) return;
  model.replaceChildren(element("b", { text: chat.model }), ` ${about}`);
}

// -------------------------------------------------------------------- choosing

function choose(number) {
  const request = view.world.requests.get(number) ?? null;
  if (request === null) return;
  view.chosen = number;
  turn("engine");
  story.show(request);
}

function own(id) {
  if (view.own === id) return;
  view.own = id;
  view.owned.clear();
}

function chooseOwn() {
  const mine = [...view.world.requests.values()].find((request) => view.isOwn(request));
  if (mine) choose(mine.number);
}

async function explain(id) {
  const kept = (saved ?? tape).stories.get(id) ?? null;
  if (saved) return kept;
  try {
    const response = await fetch(`v1/requests/${encodeURIComponent(id)}/explain`);
    if (!response.ok) return kept;
    const explanation = await response.json();
    tape.stories.set(id, explanation);
    return explanation;
  } catch {
    return kept;
  }
}

function numberOf(id) {
  for (const request of view.world.requests.values()) if (request.id === id) return request.number;
  return null;
}

/** Show the chat or the engine. The address says which, so that a link or a reload leads to the same. */
function turn(name) {
  for (const each of ["chat", "engine"]) {
    find(each).hidden = each !== name;
    find(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    find(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  document.body.dataset.view = name;
  history.replaceState(null, "", name === "chat" ? location.pathname : "#engine");
}

// -------------------------------------------------------------------- holding, saving, opening

function hold(on) {
  if (saved && !on) saved = null;
  view.live = !on;
  find("pause").setAttribute("aria-pressed", String(on));
  find("pause").textContent = on ? "Live" : "Pause";
  find("tape").hidden = !on;
  if (on) move(1);
  else view.world = live;
  say("live", "live");
}

/** To a moment of the tape: 0 is its beginning, 1 its end. */
function move(share) {
  const from = saved ?? tape;
  view.at = from.begin + share * (from.end - from.begin);
  view.world = from.world(view.at, view.span);
  find("when").value = String(Math.round(1000 * share));
  find("moment").textContent = `−${(from.end - view.at).toFixed(1)} s`;
}

async function save() {
  const recent = [...live.requests.values()].slice(-STORIES);
  await Promise.all(recent.map((request) => explain(request.id)));
  download(`quire-${new Date().toISOString().replace(/[:.]/g, "-")}.json`, (saved ?? tape).file());
}

async function open(file) {
  const notice = find("notice");
  notice.hidden = true;
  try {
    saved = await Tape.read(file);
  } catch (error) {
    notice.textContent = error.message;
    notice.hidden = false;
    return;
  }
  view.chosen = null;
  story.show(null);
  hold(true);
}

// -------------------------------------------------------------------- the loop

let drawn = 0;

function draw(now) {
  requestAnimationFrame(draw);
  if (now - drawn < FRAME || !view.world.facts) return;
  drawn = now;
  if (view.live) {
    view.world = live;
    view.at = now / 1e3 + offset - DELAY;
  }
  if (find("engine").hidden) return;
  for (const panel of [figures, timeline, steps, pages, story]) panel.draw(view);
}

async function enter() {
  if (!(await signedIn())) return;
  const requests = await fetch("v1/requests");
  if (requests.status === 403) {
    say("lost", (await requests.json()).error.message);
    return;
  }
  const models = await fetch("v1/models");
  if (models.ok) chat.settings.offer((await models.json()).data.map((model) => model.id));
  listen();
}

function wire() {
  find("pause").addEventListener("click", () => hold(view.live));
  find("when").addEventListener("input", (event) => move(event.target.value / 1000));
  find("save").addEventListener("click", save);
  find("open").addEventListener("click", () => find("file").click());
  find("file").addEventListener("change", (event) => {
    if (event.target.files[0]) open(event.target.files[0]);
    event.target.value = "";
  });
  find("span").addEventListener("change", (event) => {
    view.span = Number(event.target.value);
    if (!view.live) move(find("when").value / 1000);
  });
  for (const name of ["chat", "engine"]) find(`tab-${name}`).addEventListener("click", () => turn(name));
  document.querySelector(".views").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    turn(find("chat").hidden ? "chat" : "engine");
    document.querySelector(".views [aria-selected=true]").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== " " || event.target.closest("button, input, textarea, select, [role=slider], #chat")) return;
    if (find("engine").hidden) return;
    event.preventDefault();
    hold(view.live);
  });
  theme(find("theme"), forgetColours);
}

wire();
turn(location.hash === "#engine" ? "engine" : "chat");
enter();
requestAnimationFrame(draw);
