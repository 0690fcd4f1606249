/* The dashboard, which shows the router's event stream. Its state is bounded. The strip is drawn once per frame,
   everything else when an event arrives. */
import { get, listen } from "./feed.js";
import { Lanes } from "./lanes.js";
import { Latency } from "./latency.js";
import { showNodes } from "./nodes.js";
import { Requests } from "./requests.js";
import { inOrder, number, say, sayWithCode } from "./text.js";
import { Transfers } from "./transfers.js";

const place = (id) => document.getElementById(id);

const lanes = new Lanes(place("lanes"), place("pass"), () => pause(true));
const latency = new Latency(place("latency"));
const requests = new Requests(place("requests"));
const transfers = new Transfers(place("transfers"), place("in-flight"));
let paused = false;

const handlers = { status: showStatus, requests: showRequests };

listen("events", (kind, data) => {
  if (kind === "steps") lanes.add(data.node, data.steps);
  else if (!paused) handlers[kind](data);
}, (state) => {
  if (place("link").dataset.state === state) return;
  place("link").dataset.state = state;
  say(place("link"), state === "live" ? "live" : "router gone, trying again");
  if (state === "live" && !paused) loadRequests();
});

async function loadRequests() {
  const answer = await get("v1/requests?limit=100");
  if (answer && !paused) showRequests(answer);
}

function showStatus(status) {
  sayWithCode(place("summary"), status.summary ?? "");
  say(place("model"), `${status.model} · ${status.mode} · ${number(status.requests?.running)} running`);
  document.title = `Baton · ${status.model}`;
  const nodes = inOrder(status.nodes);
  showNodes(place("nodes"), nodes);
  lanes.arrange(nodes.map((node) => node.id));
  for (const node of nodes) if (node.steps) lanes.fill(node.id);
  lanes.sloMs = status.latency?.slo?.tbt_ms || 0;
  latency.add(status.latency);
}

function showRequests({ requests: changed }) {
  requests.add(changed);
  transfers.add(changed);
}

function pause(on) {
  paused = on;
  lanes.freeze(on);
  place("pause").setAttribute("aria-pressed", String(on));
  say(place("pause"), on ? "Resume" : "Pause");
  if (!on) loadRequests();
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  say(place("theme"), theme === "dark" ? "Light" : "Dark");
  latency.rebuild();
  requests.redraw();
}

/* Stores `theme`, if given, and returns the stored theme: null if there is none, or if the browser forbids storage. */
function stored(theme) {
  try {
    if (theme) localStorage.setItem("baton-theme", theme);
    return localStorage.getItem("baton-theme");
  } catch {
    return null;
  }
}

place("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  stored(theme);
  setTheme(theme);
});
dark.addEventListener("change", () => stored() || setTheme(dark.matches ? "dark" : "light"));
place("pause").addEventListener("click", () => pause(!paused));
place("window").addEventListener("change", (event) => { lanes.windowMs = Number(event.target.value); });
addEventListener("resize", () => requests.redraw());
setTheme(stored() ?? (dark.matches ? "dark" : "light"));

requestAnimationFrame(function frame(now) {
  lanes.draw(now);
  requestAnimationFrame(frame);
});
