// Light, dark, or as the system has it; remembered by the browser.

import { store } from "./storage.js";

const NAMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

/** Make a button of it. changed() is called whenever the colours are others. */
export function theme(button, changed) {
  let chosen = NAMES.includes(store.getItem("quire-theme")) ? store.getItem("quire-theme") : "auto";
  const apply = () => {
    const dark = chosen === "dark" || (chosen === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = `Theme: ${chosen}`;
    button.title = "Light, dark, or as the system has it";
    changed();
  };
  button.addEventListener("click", () => {
    chosen = NAMES[(NAMES.indexOf(chosen) + 1) % NAMES.length];
    store.setItem("quire-theme", chosen);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
