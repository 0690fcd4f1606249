/* The theme of a page: that of the browser, until the button `theme` is pressed. The choice is kept for later visits. */
const button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");

/* Stores `theme`, if given, and returns the stored theme: null if there is none, or if the browser forbids storage. */
function stored(theme) {
  try {
    if (theme) localStorage.setItem("baton-theme", theme);
    return localStorage.getItem("baton-theme");
  } catch {
    return null;
  }
}

/* Sets the theme, now and at each change. `redraw()` is called after it. */
export function startTheme(redraw) {
  const root = document.documentElement;
  const set = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    redraw();
  };
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    stored(theme);
    set(theme);
  });
  dark.addEventListener("change", () => stored() || set(dark.matches ? "dark" : "light"));
  set(stored() ?? (dark.matches ? "dark" : "light"));
}
