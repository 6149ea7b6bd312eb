// Light or dark: as the system says, unless one is chosen here.

const KEPT = "rollmesh-theme";
const ORDER = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

export function themeName() {
  const kept = localStorage.getItem(KEPT);
  return ORDER.includes(kept) ? kept : "auto";
}

/** `light` or `dark`, as it is shown now. */
export function theme() {
  const name = themeName();
  return name === "auto" ? (system.matches ? "dark" : "light") : name;
}

export function applyTheme() {
  document.documentElement.dataset.theme = theme();
}

export function nextTheme() {
  localStorage.setItem(KEPT, ORDER[(ORDER.indexOf(themeName()) + 1) % ORDER.length]);
  applyTheme();
}

system.addEventListener("change", () => {
  applyTheme();
  dispatchEvent(new Event("themechange"));
});
