/* Adds the sections in order, and handles the theme. */

const SECTIONS = [
  ["verdict", "Verdict", verdict], ["arms", "Arms", arms],
  ["differences", "Differences", () => differences(report.comparisons)],
  ["attainment", "Attainment against rate", attainment], ["efficiency", "Efficiency", efficiency],
  ["strip", "The strip", strip], ["curves", "Latency", curves],
  ["phases", "Where the time goes", phases], ["devices", "Device time", devices], ["prediction", "Simulation", prediction],
  ["proof", "KV and answers", proof],
  ["runs", "Runs", runs], ["worst", "Worst requests", worst], ["parity", "Parity", parity],
  ["guide", "How to read this", guide],
];
const redraw = () => drawings.forEach((each) => each());

function build() {
  const main = document.getElementById("report"), contents = document.getElementById("contents");
  for (const [id, title, content] of SECTIONS) {
    const heading = h("h2", { id: id + "-title" }, title);
    main.append(h("section", { id, "aria-labelledby": heading.id }, heading, content()));
    contents.append(h("a", { href: "#" + id }, title));
  }
  after.forEach((each) => each());
  redraw();
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
}

/* Use the system's theme until the button is pressed. Print in the light theme, with all figures unfolded. */
function keepTheme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => {
    root.dataset.theme = theme;
    button.setAttribute("aria-pressed", theme === "dark");
    redraw();
  };
  let onScreen = null;
  set(system.matches ? "dark" : "light");
  button.addEventListener("click", () => set(root.dataset.theme === "dark" ? "light" : "dark"));
  system.addEventListener("change", () => set(system.matches ? "dark" : "light"));
  addEventListener("beforeprint", () => {
    onScreen = root.dataset.theme;
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    set("light");
  });
  addEventListener("afterprint", () => set(onScreen));
}

keepTheme();
build();
