/* The simulator's page. A run is computed by the router (`POST v1/simulate`) or, in the page that needs no server, by
   `batonSimulate`. The settings are in the URL's fragment, so that a link shares them. */
import { make, ms, number, percent, say } from "./text.js";
import { TOUR } from "./tour.js";

const place = (id) => document.getElementById(id);
const form = place("settings"), fields = form.elements;
const NAMES = ["device", "prefill", "decode", "policy", "budget", "rate", "requests", "prompt", "answer", "seed",
  "ttft_slo_ms", "tbt_slo_ms", "trace"];
const BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
const TRAFFIC = ["rate", "requests", "prompt", "answer", "seed", "trace"], MOST_TOURED = 6;
const TEXTS = new Set(["device", "policy", "trace"]), MOST_ROWS = 14, MOST_RUNS = 30, SMOOTH = 50;
const read = (name) => name === "budget" ? 2 ** Number(fields.budget.value)
  : TEXTS.has(name) ? fields[name].value : Number(fields[name].value);
const query = () => Object.fromEntries(NAMES.map((name) => [name, read(name)]));
const DEFAULTS = query();
const QUICK_MS = 300, FEWEST = 60, REST_MS = 100; // see `refresh`
let run = null, playing = 0, timer = 0, newest = 0, stop = new AbortController(), perMs = 0.5, toured = "";

/* ---- settings and the URL ---- */

function fill(settings) {
  for (const [name, value] of Object.entries({ ...DEFAULTS, ...settings })) {
    if (!NAMES.includes(name)) continue;
    const field = fields[name];
    if (name === "budget") field.value = Math.round(Math.log2(Number(value) || DEFAULTS.budget));
    else {
      if (field.tagName === "SELECT" && ![...field.options].some((each) => each.value === value)) field.add(new Option(value));
      field.value = value;
    }
  }
  say(place("budget-shown"), number(read("budget")));
}

function fragment() {
  const changed = Object.entries(query()).filter(([name, value]) => value !== DEFAULTS[name]);
  return new URLSearchParams(changed.map(([name, value]) => [name, String(value)])).toString();
}

function fromFragment() {
  fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
}

function choices(select, values) {
  if (select.options.length >= values.length) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => new Option(value)));
  select.value = chosen;
}

/* ---- runs ---- */

async function askRouter(settings, signal) {
  const answer = await fetch("v1/simulate", { method: "POST", body: JSON.stringify(settings), signal });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error?.message ?? found.error ?? `the router answered ${answer.status}`);
  return found;
}

const simulate = (settings) => (globalThis.batonSimulate ?? askRouter)(settings, stop.signal);

/* Stops what runs, and returns a function that tells whether nothing newer has begun. */
function begin() {
  stop.abort();
  stop = new AbortController();
  const own = ++newest;
  return () => own === newest;
}

function state(name, text) {
  place("state").dataset.state = name;
  say(place("state"), text);
}

/* Runs the settings. First runs and shows only as many requests as take about QUICK_MS, at the speed of the last run, so
   that the page follows a control that moves. */
async function refresh() {
  const isNewest = begin();
  if (!form.checkValidity()) {
    const field = form.querySelector("input:invalid");
    fail(`${field.closest("label").firstChild.textContent.trim()}: ${field.validationMessage}`);
    return;
  }
  const settings = query(), few = Math.max(FEWEST, Math.floor(QUICK_MS * perMs));
  history.replaceState(null, "", `#${fragment()}`);
  state("busy", "simulating");
  try {
    if (few < settings.requests / 1.5) {
      const found = await simulate({ ...settings, requests: few });
      if (!isNewest()) return;
      show(found, settings);
      state("busy", `first ${number(few)} requests; simulating ${number(settings.requests)}`);
    }
    const began = performance.now(), found = await simulate(settings);
    if (!isNewest()) return;
    show(found, settings);
    remember(settings, found.figures);
    const took = performance.now() - began;
    perMs = found.requests.length / took;
    state("done", `${number(found.requests.length)} requests in ${ms(took)} ms`);
  } catch (error) {
    if (isNewest()) fail(error.message);
  }
}

function fail(text) {
  state("failed", "no result");
  place("summary").dataset.state = "failed";
  say(place("summary"), text);
}

function show(found, settings) {
  run = { ...found, settings };
  for (const node of run.nodes) node.passes = expanded(node.steps);
  const waiting = run.requests.flatMap((one) => [[one.at_ms, 1], [one.begun_ms, -1]]).sort((a, b) => a[0] - b[0]);
  let count = 0;
  run.queue = waiting.map(([at, change]) => [at, count += change]);
  run.ended = run.requests.filter((one) => one.end_ms !== undefined).sort((a, b) => a.end_ms - b.end_ms);
  run.last = run.requests.at(-1).at_ms; // the window ends here or earlier, because the cluster runs empty after it
  run.end = Math.max(1, ...run.requests.map((one) => one.end_ms ?? one.at_ms));
  choices(fields.device, run.devices);
  choices(fields.policy, run.policies);
  summarize();
  place("lanes").replaceChildren(...run.nodes.map((node) => make("div", { class: "lane" }, make("span", {}, nameOf(node)),
    make("canvas", { role: "img", "aria-label": `Steps of ${nameOf(node)}` }))));
  draw();
}

const nameOf = (node) => run.settings.prefill ? node.name : node.name.replace("decode", "node");

/* Divides a stretch of equal steps into steps, as [start, duration, prompt tokens, decodes]. */
function expanded(steps) {
  return steps.flatMap(([start, total, prompt, decodes, length]) => length === 1 ? [[start, total, prompt, decodes]]
    : Array.from({ length }, (_, index) => [start + (index * total) / length, total / length, prompt, decodes]));
}

function summarize() {
  const { figures, settings } = run, { attainment, late, stalled, counted } = figures;
  const failed = run.requests.filter((one) => one.error).length;
  const causes = [late && `${number(late)} got their first token after ${number(settings.ttft_slo_ms)} ms`,
    stalled && `${number(stalled)} waited over ${number(settings.tbt_slo_ms)} ms between tokens`,
    failed && `${number(failed)} failed: ${run.requests.find((one) => one.error).error}`].filter(Boolean);
  place("summary").dataset.state = "done";
  say(place("summary"), `${percent(attainment)} of ${number(counted)} requests met the limits.`
    + (causes.length ? ` Of the others, ${causes.join(", and ")}.` : ""));
  const tile = (name, value, note, bad) => make("div", { "data-bad": String(Boolean(bad)) }, make("dt", {}, name),
    make("dd", {}, value), make("dd", { class: "note" }, note));
  place("figures").replaceChildren(
    tile("Within the limits (SLO)", percent(attainment), `of ${number(counted)} requests, without the first tenth`, attainment < 0.9),
    tile("Time to first token (TTFT)", `${ms(figures.ttft_ms.p50)} ms`, `median; p99 ${ms(figures.ttft_ms.p99)} ms`,
      figures.ttft_ms.p50 > settings.ttft_slo_ms),
    tile("Time between tokens (TBT p99)", `${ms(figures.tbt_ms.p50)} ms`, `median request; p99 ${ms(figures.tbt_ms.p99)} ms`,
      figures.tbt_ms.p50 > settings.tbt_slo_ms),
    tile("Answers", `${number(figures.tokens_per_s_per_gpu)}`, "tokens/s per GPU"),
    tile("Simulated", `${number(figures.span_s, 1)} s`, "from the first request to the last token"));
}

function remember(settings, figures) {
  const { prefill, decode, policy, budget } = settings, isTrace = settings.trace.trim() !== "";
  const cells = [prefill ? `${prefill} prefill, ${decode} decode` : `${decode} co-located`, policy];
  const numbers = [number(settings.budget), ...(isTrace ? ["trace", "", ""]
    : [number(settings.rate, 1), number(settings.prompt), number(settings.answer)]), percent(figures.attainment),
  ms(figures.ttft_ms.p50), ms(figures.ttft_ms.p99), ms(figures.tbt_ms.p50), ms(figures.tbt_ms.p99)];
  place("runs").prepend(make("tr", {}, ...cells.map((text) => make("td", {}, text)),
    ...numbers.map((text) => make("td", { class: "number" }, text))));
  while (place("runs").children.length > MOST_RUNS) place("runs").lastChild.remove();
  const traffic = JSON.stringify(TRAFFIC.map((name) => settings[name]));
  if (traffic !== toured) place("tour-runs").replaceChildren(); // runs with other traffic cannot be compared
  toured = traffic;
  const shown = [percent(figures.attainment), `${ms(figures.ttft_ms.p50)} ms`, `${ms(figures.tbt_ms.p50)} ms`];
  place("tour-runs").append(make("tr", {}, make("td", {}, `${cells[0]}, ${policy}, budget ${number(budget)}`),
    ...shown.map((text) => make("td", { class: "number" }, text))));
  while (place("tour-runs").children.length > MOST_TOURED) place("tour-runs").firstChild.remove();
}

async function findBest() {
  const isNewest = begin(), tried = [];
  place("best").disabled = true;
  try {
    for (const budget of BUDGETS) {
      state("busy", `trying ${number(budget)} tokens`);
      const settings = { ...query(), budget }, { figures } = await simulate(settings);
      if (!isNewest()) return;
      remember(settings, figures);
      tried.push({ budget, figures });
    }
    const better = (a, b) => b.figures.attainment - a.figures.attainment || a.figures.ttft_ms.p99 - b.figures.ttft_ms.p99;
    fill({ ...query(), budget: tried.sort(better)[0].budget });
  } catch (error) {
    if (isNewest()) fail(error.message);
    return;
  } finally {
    place("best").disabled = false;
  }
  refresh();
}

/* ---- drawing ---- */

function draw() {
  if (!run) return;
  const at = (Number(place("time").value) / 1000) * run.end, width = Number(place("window").value) || run.end;
  const from = Math.max(0, Math.min(at, run.last) - width), to = from + width;
  say(place("time-shown"), `${number(at / 1000, 1)} s`);
  const most = Math.max(...run.nodes.map((node) => node.passes.reduce((high, pass) => Math.max(high, pass[2] + pass[3]), 1)));
  [...place("lanes").children].forEach((lane, index) => {
    const passes = run.nodes[index].passes.slice(0, Strip.firstAfter(run.nodes[index].passes, at) + 1);
    Strip.draw(lane.lastChild, { passes, from, to, sloMs: run.settings.tbt_slo_ms, maxTokens: most, selected: -1 });
  });
  plot(place("queue"), run.queue.filter(([time]) => time <= at), 0, true);
  const ended = run.ended.filter((one) => one.end_ms <= at);
  for (const [name, limit] of [["ttft", run.settings.ttft_slo_ms], ["tbt", run.settings.tbt_slo_ms]]) {
    const values = ended.map((one) => one[`${name}_ms`]);
    plot(place(name), ended.map((one, index) => [one.end_ms, values[index]]), limit, false);
    say(place(`${name}-shown`), values.length ? `so far: p50 ${ms(share(values, 0.5))} ms, p99 ${ms(share(values, 0.99))} ms` : "no answer yet");
  }
  const active = run.requests.filter((one) => one.at_ms <= to && (one.end_ms ?? one.at_ms) >= from && one.at_ms <= at);
  const rows = evenly(active, MOST_ROWS);
  say(place("gantt-title"), `Requests from ${number(from / 1000, 1)} to ${number(to / 1000, 1)} s`);
  Strip.gantt(place("gantt"), { rows: rows.map((one) => rowOf(one, from, Math.min(to, at))), from, to, labelWidth: 52 });
}

const evenly = (all, most) => all.length <= most ? all
  : Array.from({ length: most }, (_, index) => all[Math.floor((index * all.length) / most)]);

function share(values, part) {
  const sorted = [...values].sort((a, b) => a - b), at = part * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

function rowOf(one, from, to) {
  const waiting = { kind: "queued", node: "", start_ms: one.at_ms, end_ms: one.begun_ms };
  const spans = [waiting, ...(one.spans ?? [])].filter((each) => each.end_ms > from && each.start_ms < to)
    .map((each) => ({ ...each, start_ms: Math.max(each.start_ms, from), end_ms: Math.min(each.end_ms, to) }));
  return { label: one.id, spans };
}

/* Draws points, or steps if `isLine`, over the whole run; with a line at `limit`, and running p50 and p99. */
function plot(canvas, points, limit, isLine) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext("2d"), colours = Strip.coloursOf(canvas);
  context.scale(ratio, ratio);
  const top = 1.15 * Math.max(limit, 1, ...points.map((point) => point[1]));
  const x = (time) => (time / run.end) * width, y = (value) => height - 2 - (value / top) * (height - 16);
  const line = (colour, rows) => {
    context.strokeStyle = colour;
    context.beginPath();
    rows.forEach(([time, value], index) => context[index ? "lineTo" : "moveTo"](x(time), y(value)));
    context.stroke();
  };
  if (limit) {
    context.setLineDash([4, 3]);
    line(colours.over, [[0, limit], [run.end, limit]]);
    context.setLineDash([]);
  }
  if (isLine) line(colours.ink, points.flatMap(([time, value], index) => index ? [[time, points[index - 1][1]], [time, value]] : [[time, value]]));
  else {
    context.fillStyle = colours.decode;
    for (const [time, value] of points) context.fillRect(x(time) - 1, y(value) - 1, 2, 2);
    const running = (part) => points.map(([time], index) =>
      [time, share(points.slice(Math.max(0, index - SMOOTH), index + 1).map((point) => point[1]), part)]);
    line(colours.ink, running(0.5));
    line(colours.prefill, running(0.99));
  }
  context.fillStyle = colours.ink;
  context.font = "11px system-ui, sans-serif";
  context.fillText(isLine ? `at most ${number(Math.max(0, ...points.map((point) => point[1])))}` : `${ms(top / 1.15)} ms`, 4, 11);
  canvas.setAttribute("aria-label", isLine ? "Waiting requests over time" : "Points: requests; lines: p50 and p99 of the last 50");
}

/* ---- playing ---- */

function play(on) {
  cancelAnimationFrame(playing);
  place("play").setAttribute("aria-pressed", String(on));
  say(place("play"), on ? "Pause" : "Play");
  playing = 0;
  if (!on) return;
  const slider = place("time");
  if (Number(slider.value) >= 1000) slider.value = 0;
  let last = performance.now(), at = Number(slider.value);
  playing = requestAnimationFrame(function frame(now) {
    at = Math.min(1000, at + ((now - last) / Math.max(run?.end ?? 1, 20_000)) * 1000);
    last = now;
    slider.value = at;
    draw();
    if (at >= 1000) play(false);
    else playing = requestAnimationFrame(frame);
  });
}

/* ---- the tour ---- */

let step = -1;

function tour(to) {
  step = to;
  const isOpen = step >= 0;
  place("tour").hidden = !isOpen;
  place("intro").hidden = isOpen;
  place("tour-open").setAttribute("aria-expanded", String(isOpen));
  if (!isOpen) return;
  const { title, text, look, settings, tries } = TOUR[step];
  say(place("tour-title"), title);
  place("tour-text").replaceChildren(...text.map((each) => make("p", {}, each)), make("p", { class: "look" }, look));
  place("tour-tries").replaceChildren(...tries.map(([label, changes]) => {
    const button = make("button", { type: "button" }, label);
    button.addEventListener("click", () => { fill({ ...settings, ...changes }); refresh(); });
    return button;
  }));
  place("tour-back").disabled = step === 0;
  place("tour-next").disabled = step === TOUR.length - 1;
  fill(settings);
  refresh();
}

place("tour-open").addEventListener("click", () => tour(step < 0 ? 0 : -1));
place("tour-close").addEventListener("click", () => tour(-1));
place("tour-back").addEventListener("click", () => tour(step - 1));
place("tour-next").addEventListener("click", () => tour(step + 1));

/* ---- the rest ---- */

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  say(place("theme"), theme === "dark" ? "Light" : "Dark");
  draw();
}

form.addEventListener("input", () => {
  say(place("budget-shown"), number(read("budget")));
  clearTimeout(timer);
  timer = setTimeout(refresh, REST_MS);
});
form.addEventListener("submit", (event) => event.preventDefault());
place("best").addEventListener("click", findBest);
place("time").addEventListener("input", () => { play(false); draw(); });
place("window").addEventListener("change", draw);
place("play").addEventListener("click", () => play(!playing));
place("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
place("share").addEventListener("click", async () => {
  const isCopied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  say(place("share"), isCopied ? "Copied" : "The address bar has the link");
  setTimeout(() => say(place("share"), "Copy link"), 2000);
});
addEventListener("hashchange", () => { fromFragment(); refresh(); });
addEventListener("resize", draw);
place("home").hidden = Boolean(globalThis.batonSimulate);
setTheme(dark.matches ? "dark" : "light");
fromFragment();
refresh();
