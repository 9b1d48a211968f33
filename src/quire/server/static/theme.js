// Light, dark, or as the system has it; remembered by the browser.

const NAMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

/** Make a button of it. changed() is called whenever the colours are others. */
export function theme(button, changed) {
  let chosen = NAMES.includes(localStorage.getItem("quire-theme")) ? localStorage.getItem("quire-theme") : "auto";
  const apply = () => {
    const dark = chosen === "dark" || (chosen === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[chosen];
    button.title = `Colours: ${chosen}`;
    button.setAttribute("aria-label", `Colours: ${chosen}. Change`);
    changed();
  };
  button.addEventListener("click", () => {
    chosen = NAMES[(NAMES.indexOf(chosen) + 1) % NAMES.length];
    localStorage.setItem("quire-theme", chosen);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
