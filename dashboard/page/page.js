/* The dashboard, which shows the router's event stream. Its state is bounded. The strip is drawn once per frame,
   everything else when an event arrives. */
import { startChat } from "./chat.js";
import { get, listen } from "./feed.js";
import { Lanes } from "./lanes.js";
import { Latency } from "./latency.js";
import { showEvents, showNodes, showTotals } from "./nodes.js";
import { Requests } from "./requests.js";
import { clock, inOrder, isGone, number, say, sayWithCode, span } from "./text.js";
import { startTheme } from "./theme.js";
import { Transfers } from "./transfers.js";

const place = (id) => document.getElementById(id);

const lanes = new Lanes(place("lanes"), place("step"), () => pause(true));
const latency = new Latency(place("latency"));
const requests = new Requests(place("requests"));
const transfers = new Transfers(place("transfers"), place("in-flight"));
let paused = false, model = "", summary = "Waiting for the router.", heard = new Date();

const handlers = { status: showStatus, requests: showRequests };

listen("events", (kind, data) => {
  heard = new Date();
  if (kind === "steps") lanes.add(data.node, data.steps);
  else if (!paused) handlers[kind](data);
}, (state) => {
  if (place("link").dataset.state === state) return;
  document.body.dataset.link = place("link").dataset.state = state;
  say(place("link"), state === "live" ? "live" : "router gone, trying again");
  freezeLanes();
  if (state === "live") {
    lanes.reload();
    transfers.moving.clear();
    loadRequests();
  }
  showSummary();
});

const isRouterGone = () => place("link").dataset.state === "gone";

/* Loads the latest requests. Removes requests in progress that the router does not know, because it has restarted. */
async function loadRequests(isAsked = false) {
  const moving = requests.moving();
  const answer = await get("v1/requests?limit=100");
  if (!answer || (paused && !isAsked)) return;
  const listed = new Set(answer.requests.map((one) => one.id)), unknown = moving.filter((id) => !listed.has(id));
  requests.forget(unknown);
  transfers.forget(unknown);
  showRequests({ requests: answer.requests.filter((one) => !requests.hasEnded(one)) });
}

function showSummary() {
  const gone = `The router has not answered since ${clock(heard)}. The data below is older.`;
  sayWithCode(place("summary"), isRouterGone() ? gone : summary);
  document.title = isRouterGone() ? "Baton · router gone" : `Baton${model && ` · ${model}`}`;
}

function freezeLanes() {
  lanes.freeze(paused || isRouterGone());
}

function showStatus(status) {
  const { version, started_ms: started, max_model_len: length } = status.router ?? {};
  model = status.model;
  summary = status.summary ?? "";
  showSummary();
  say(place("model"), [model, length && `up to ${number(length)} tokens`, status.mode, version && `Baton ${version}`,
    started && `up ${span(Date.now() - started)}`].filter(Boolean).join(" · "));
  showTotals(place("totals"), status.totals);
  showEvents(place("events"), status.events);
  showNodes(place("nodes"), status.nodes);
  const nodes = inOrder(status.nodes).filter((node) => !isGone(node));
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
  freezeLanes();
  place("pause").setAttribute("aria-pressed", String(on));
  say(place("pause"), on ? "Resume" : "Pause");
  if (!on) loadRequests();
}

startChat(() => model, async (id) => {
  if (!requests.reveal(id)) await loadRequests(true);
  requests.reveal(id);
});

place("pause").addEventListener("click", () => pause(!paused));
place("window").addEventListener("change", (event) => { lanes.windowMs = Number(event.target.value); });
addEventListener("resize", () => requests.redraw());
startTheme(() => {
  latency.rebuild();
  requests.redraw();
});

requestAnimationFrame(function frame(now) {
  lanes.draw(now);
  requestAnimationFrame(frame);
});
