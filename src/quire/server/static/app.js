// The page: the stream comes in, every panel is drawn from one picture, and what is chosen is chosen in all of them.

import { Chat } from "./chat.js";
import { Comparison } from "./compare.js";
import { element, forgetColours } from "./draw.js";
import { Figures } from "./figures.js";
import { Timeline } from "./timeline.js";
import { Pages } from "./pages.js";
import { signedIn } from "./session.js";
import { Source } from "./source.js";
import { Steps } from "./steps.js";
import { Story } from "./story.js";
import { download } from "./tape.js";
import { theme } from "./theme.js";

const DELAY = 0.1;
const FRAME = 1000 / 30;
const STORIES = 48;

const find = (id) => document.getElementById(id);

const here = new Source("this server", "v1/requests");

/** What is looked at: a source and its world at a moment (seconds), how much time, which request. live: it moves. */
const view = {
  source: here,
  world: here.world,
  at: 0,
  span: 15,
  chosen: null,
  live: true,
  own: null,
  owned: new Set(),
  isOwn: (request) => view.own !== null && (request.id.startsWith(`${view.own.answer}-`) || request.id === view.own.request),
  owns: (number) => view.source === here && view.owned.has(number),
};
/** Servers behind this one; files that are open instead. */
let behind = [];
let files = [];
let stream = null;
let others = null;

const figures = new Figures(find("figures"));
const timeline = new Timeline(find("requests"), choose);
const steps = new Steps(find("steps"), choose);
const pages = new Pages(find("pages"), choose);
const story = new Story(find("story"), (id) => view.source.explain(id), numberOf);
const comparison = new Comparison(find("compare"), look);
const chat = new Chat(find("chat"), { own: (ids) => own(ids), pick: () => chooseOwn(), signIn: () => enter() });

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
  const frame = here.take(text);
  if (frame.whole?.facts.servers && !others) listenBehind(frame.whole.facts.servers);
  if (!files.length && view.source === here && here.world.facts) introduce(here.world);
  if (view.own === null) return;
  for (const request of here.world.requests.values()) if (view.isOwn(request)) view.owned.add(request.number);
}

/** Follow the servers behind this one: a message is the number of one, a space, and a frame of it. */
function listenBehind(names) {
  behind = names.map((name, i) => new Source(name.replace(/^https?:\/\//, ""), `ui/servers/${i}/requests`));
  others = new EventSource("ui/servers");
  others.onmessage = ({ data }) => {
    const source = behind[Number.parseInt(data, 10)];
    source?.take(data.slice(data.indexOf(" ") + 1));
    if (view.source === source && view.live && source.world.facts) introduce(source.world);
  };
  if (files.length) return;
  comparison.show([here, ...behind]);
  comparison.choose(view.source);
}

function say(is, text) {
  const name = files.length ? "a saved file" : view.live ? text : "paused";
  find("state").dataset.is = files.length || !view.live ? "held" : is;
  find("state").textContent = name;
}

function introduce({ facts }) {
  const own = `${facts.device}, ${facts.dtype}, ${facts.max_model_len} tokens of context, ${facts.budget} a step`;
  const about = facts.about ?? own;
  document.body.classList.toggle("elsewhere", !facts.pages);
  const model = find("model");
  if (model.textContent === `${chat.model} ${about}`) return;
  model.replaceChildren(element("b", { text: chat.model }), ` ${about}`);
}

/** Let the panels show one of several sources. */
function look(source) {
  view.source = source;
  comparison.choose(source);
  view.chosen = null;
  story.show(null);
  if (view.live) view.world = source.world;
  else move(find("when").value / 1000);
  if (view.world.facts) introduce(view.world);
}

// -------------------------------------------------------------------- choosing

function choose(number) {
  const request = view.world.requests.get(number) ?? null;
  if (request === null) return;
  view.chosen = number;
  turn("engine");
  story.show(request);
}

/** An answer's id begins those of an engine's requests; in front of other servers a request goes by its own id. */
function own(ids) {
  if (view.own?.answer === ids.answer) return;
  view.own = ids;
  view.owned.clear();
}

function chooseOwn() {
  if (view.source !== here) look(here);
  const mine = [...view.world.requests.values()].find((request) => view.isOwn(request));
  if (mine) choose(mine.number);
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
  if (files.length && !on) {
    files = [];
    comparison.show([here, ...behind]);
    look(here);
  }
  view.live = !on;
  find("pause").setAttribute("aria-pressed", String(on));
  find("pause").textContent = on ? "Live" : "Pause";
  find("tape").hidden = !on;
  if (on) move(1);
  else view.world = view.source.world;
  say("live", "live");
}

/** To a moment of the tape: 0 is its beginning, 1 its end. */
function move(share) {
  const from = view.source.tape;
  view.at = from.begin + share * (from.end - from.begin);
  view.world = from.world(view.at, view.span);
  find("when").value = String(Math.round(1000 * share));
  find("moment").textContent = `−${(from.end - view.at).toFixed(1)} s`;
}

async function save() {
  const { source } = view;
  const recent = [...source.world.requests.values()].slice(-STORIES);
  await Promise.all(recent.map((request) => source.explain(request.id)));
  download(`quire-${new Date().toISOString().replace(/[:.]/g, "-")}.json`, source.tape.file());
}

/** Show a saved file, or two side by side. */
async function open(given) {
  const notice = find("notice");
  notice.hidden = true;
  try {
    if (given.length > 2) throw new Error("Open one file, or two to compare them.");
    files = await Promise.all([...given].map((file) => Source.read(file)));
  } catch (error) {
    notice.textContent = error.message;
    notice.hidden = false;
    return;
  }
  comparison.show(files);
  view.live = false;
  look(files[0]);
  hold(true);
}

// -------------------------------------------------------------------- the loop

let drawn = 0;

function draw(now) {
  requestAnimationFrame(draw);
  if (now - drawn < FRAME) return;
  drawn = now;
  comparison.draw(view);
  if (!view.world.facts) return;
  if (view.live) {
    view.world = view.source.world;
    view.at = now / 1e3 + view.source.offset - DELAY;
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
  if (models.ok) chat.offer((await models.json()).data);
  listen();
}

function wire() {
  find("pause").addEventListener("click", () => hold(view.live));
  find("when").addEventListener("input", (event) => move(event.target.value / 1000));
  find("save").addEventListener("click", save);
  find("open").addEventListener("click", () => find("file").click());
  find("file").addEventListener("change", (event) => {
    if (event.target.files.length) open([...event.target.files]);
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
// On a phone a keyboard would come up.
if (!find("chat").hidden && matchMedia("(pointer: fine)").matches) find("say").focus();
