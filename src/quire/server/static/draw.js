// What every picture needs: sharp canvases, the theme's colours, a colour for each request, and numbers as words.

const root = document.documentElement;
const known = new Map();

/** A theme colour by its name in page.css. */
export function colour(name) {
  if (!known.has(name)) known.set(name, getComputedStyle(root).getPropertyValue(`--${name}`).trim());
  return known.get(name);
}

/** The theme changed: look again. */
export function forgetColours() {
  known.clear();
}

/** A request's own colour: hues a golden angle apart, of one lightness. strength 1 is full, 0 is the panel's own. */
export function owner(number, strength = 1, lighter = 0) {
  const light = Number(colour("owner-light")) + lighter;
  const hue = (number * 137.508 + 20) % 360;
  return `oklch(${light} ${colour("owner-chroma")} ${hue} / ${strength})`;
}

/** A canvas as large as it is shown, in CSS pixels; its cleared 2d context. */
export function fit(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const wide = Math.max(1, Math.round(width * ratio));
  const high = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${height}px`;
  }
  const to = canvas.getContext("2d");
  to.setTransform(ratio, 0, 0, ratio, 0, 0);
  to.clearRect(0, 0, width, height);
  return to;
}

/** A line under which the area is tinted, through values from left to right; null values are gaps. */
export function spark(canvas, values, tint, most = Math.max(...values, 0)) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width) return;
  const to = fit(canvas, width, height);
  if (values.length < 2 || most <= 0) return;
  const step = width / (values.length - 1);
  const line = new Path2D();
  values.forEach((value, i) => line.lineTo(i * step, height - 1.5 - (value / most) * (height - 4)));
  const area = new Path2D(line);
  area.lineTo(width, height);
  area.lineTo(0, height);
  to.globalAlpha = 0.16;
  to.fillStyle = tint;
  to.fill(area);
  to.globalAlpha = 1;
  to.strokeStyle = tint;
  to.lineWidth = 1.5;
  to.lineJoin = "round";
  to.stroke(line);
}

/** An element with a class, text and children, none of it ever parsed as HTML. */
export function element(tag, about = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name === "tint") made.style.background = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Seconds as a reader wants them: 850 µs, 12.5 ms, 3.2 s. */
export function time(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0";
  if (seconds < 0.00095) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.00995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1e3)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${Math.round(seconds)} s`;
}

/** A count as a reader wants it: 950, 12.3 k, 4.5 M. */
export function count(number) {
  if (number < 10000) return String(Math.round(number));
  return number < 1e6 ? `${(number / 1e3).toFixed(1)} k` : `${(number / 1e6).toFixed(1)} M`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

/** "1 token", "2 tokens". */
export const some = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
