// What this browser keeps for the page. Where it keeps nothing (all cookies blocked), the page's own memory stands in.

class Memory {
  constructor() {
    this.values = new Map();
  }

  getItem(key) {
    return this.values.get(key) ?? null;
  }

  setItem(key, text) {
    this.values.set(key, text);
  }

  removeItem(key) {
    this.values.delete(key);
  }

  keys() {
    return [...this.values.keys()];
  }
}

function usable(name) {
  try {
    const found = window[name];
    found.setItem("quire-probe", "");
    found.removeItem("quire-probe");
    return found;
  } catch {
    return new Memory();
  }
}

export const store = usable("localStorage");

/** Of this tab alone. */
export const tabStore = usable("sessionStorage");

/** All keys of `store`. */
export const storedKeys = () => (store instanceof Memory ? store.keys() : Object.keys(store));
