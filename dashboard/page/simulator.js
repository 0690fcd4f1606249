/* The simulator's page. A run is computed by the router (`POST v1/simulate`) or, in the page that needs no server, by
   `batonSimulate`. The settings are in the URL's fragment, so that a link shares them. */
import { make, ms, number, percent, say } from "./text.js";
import { startTheme } from "./theme.js";
import { TOUR } from "./tour.js";

const place = (id) => document.getElementById(id);
const form = place("settings"), fields = form.elements;
const NAMES = ["device", "prefill", "decode", "policy", "budget", "rate", "requests", "prompt", "answer", "seed",
  "ttft_slo_ms", "tbt_slo_ms", "trace"];
const BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
const TRAFFIC = ["rate", "requests", "prompt", "answer", "seed", "trace"], MOST_TOURED = 10;
const TEXTS = new Set(["device", "policy", "trace"]), MOST_ROWS = 14, MOST_RUNS = 30, SMOOTH = 50;
const read = (name) => name === "budget" ? 2 ** Number(fields.budget.value)
  : TEXTS.has(name) ? fields[name].value : Number(fields[name].value);
const query = () => Object.fromEntries(NAMES.map((name) => [name, read(name)]));
const DEFAULTS = query();
const BEST = "The best budget is the one with the most requests within the limits. Among equally good budgets, it is the one "
  + "that stays farthest below the limits: the p99 of TTFT and of TBT are divided by their limits, and the larger ratio counts.";
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
  describe();
}

/* Shows the chosen budget, what the chosen policy does, and how the best budget is chosen. */
function describe() {
  say(place("budget-shown"), number(read("budget")));
  say(place("policy-shown"), place(`policy-${read("policy")}`)?.textContent ?? "");
  say(place("best-shown"), BEST);
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

/* Stops the current run, and returns a function that returns true until a newer run begins. */
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

/* Runs the settings. If this takes longer than about QUICK_MS (at the speed of the last run), first shows a run of fewer
   requests, so that the page follows a slider while it moves. */
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
  for (const node of run.nodes) {
    node.passes = expanded(node.steps);
    node.pauses = pausesOf(node);
  }
  const waiting = run.requests.flatMap((one) => [[one.at_ms, 1], [one.begun_ms, -1]]).sort((a, b) => a[0] - b[0]);
  let count = 0;
  run.queue = waiting.map(([at, change]) => [at, count += change]);
  const ended = run.requests.filter((one) => one.end_ms !== undefined);
  const points = (name, time) => ended.map((one) => [time(one), one[name]]).sort((a, b) => a[0] - b[0]);
  run.ttft = points("ttft_ms", (one) => one.at_ms + one.ttft_ms);
  run.tbt = points("tbt_ms", (one) => one.end_ms);
  run.last = run.requests.at(-1).at_ms; // the window ends here or earlier, because later steps only finish the last requests
  run.end = Math.max(1, ...run.requests.map((one) => one.end_ms ?? one.at_ms));
  choices(fields.device, run.devices);
  choices(fields.policy, run.policies);
  summarize();
  place("lanes").replaceChildren(...run.nodes.map((node) => make("div", { class: "lane" }, make("span", {}, nameOf(node)),
    make("canvas", { role: "img", "aria-label": `Steps of ${nameOf(node)}` }))));
  draw();
}

const nameOf = (node) => run.settings.prefill ? node.name : node.name.replace("decode", "node");

/* Divides each group of equal steps into steps [start, duration, prompt tokens, decodes]. */
function expanded(steps) {
  return steps.flatMap(([start, total, prompt, decodes, length]) => length === 1 ? [[start, total, prompt, decodes]]
    : Array.from({ length }, (_, index) => [start + (index * total) / length, total / length, prompt, decodes]));
}

/* Returns the times [from, to] in which answers of a node wait for a token for longer than the limit. */
function pausesOf(node) {
  const limit = run.settings.tbt_slo_ms, pauses = [];
  const answers = run.requests.flatMap((one) => one.spans ?? []).filter((each) => each.kind === "decode" && each.node === node.name);
  let before = 0;
  for (const [start, duration, , decodes] of node.passes) {
    const end = start + duration;
    if (!decodes) continue;
    if (end - before > limit) {
      const open = answers.filter((each) => each.start_ms < end && each.end_ms >= end);
      const from = Math.max(before, Math.min(...open.map((each) => each.start_ms)));
      if (end - from > limit) pauses.push([from, end]);
    }
    before = end;
  }
  return pauses;
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
  const tile = (name, value, ...note) => make("div", {}, make("dt", {}, name), make("dd", {}, value),
    make("dd", { class: "note" }, ...note));
  const time = (value, limit) => make("span", { class: value > limit ? "bad" : "" }, `${ms(value)} ms`);
  place("figures").replaceChildren(
    tile("Within the limits (SLO)", percent(attainment),
      `of ${number(counted)} requests; the first tenth, which meets an empty cluster, is not counted`),
    tile("Time to first token (TTFT)", time(figures.ttft_ms.p50, settings.ttft_slo_ms),
      "median; p99 ", time(figures.ttft_ms.p99, settings.ttft_slo_ms)),
    tile("Time between tokens (TBT p99)", time(figures.tbt_ms.p50, settings.tbt_slo_ms),
      "median request; p99 ", time(figures.tbt_ms.p99, settings.tbt_slo_ms)),
    tile("Answers", `${number(figures.tokens_per_s_per_gpu)}`, "tokens/s per GPU"),
    tile("Simulated", `${number(figures.span_s, 1)} s`, "from the first request to the last token"));
}

/* Adds a run to both tables, and removes an earlier run with the same settings. Returns the new rows. */
function remember(settings, figures) {
  const key = JSON.stringify(settings);
  for (const row of document.querySelectorAll("#runs tr, #tour-runs tr")) if (row.dataset.run === key) row.remove();
  const { prefill, decode, policy, budget } = settings, isTrace = settings.trace.trim() !== "";
  const cells = [prefill ? `${prefill} prefill, ${decode} decode` : `${decode} co-located`, policy];
  const numbers = [number(settings.budget), ...(isTrace ? ["trace", "", ""]
    : [number(settings.rate, 1), number(settings.prompt), number(settings.answer)]), percent(figures.attainment),
  ms(figures.ttft_ms.p50), ms(figures.ttft_ms.p99), ms(figures.tbt_ms.p50), ms(figures.tbt_ms.p99)];
  place("runs").prepend(make("tr", { "data-run": key }, ...cells.map((text) => make("td", {}, text)),
    ...numbers.map((text) => make("td", { class: "number" }, text))));
  while (place("runs").children.length > MOST_RUNS) place("runs").lastChild.remove();
  const traffic = JSON.stringify(TRAFFIC.map((name) => settings[name]));
  if (traffic !== toured) place("tour-runs").replaceChildren(); // runs with other traffic cannot be compared
  toured = traffic;
  const shown = [percent(figures.attainment), ms(figures.ttft_ms.p50), ms(figures.tbt_ms.p50)];
  place("tour-runs").append(make("tr", { "data-run": key }, make("td", {}, `${cells[0]}, ${policy}, budget ${number(budget)}`),
    ...shown.map((text) => make("td", { class: "number" }, text))));
  while (place("tour-runs").children.length > MOST_TOURED) place("tour-runs").firstChild.remove();
  return [place("runs").firstChild, place("tour-runs").lastChild];
}

async function findBest() {
  const isNewest = begin(), tried = [];
  place("best").disabled = true;
  try {
    for (const budget of BUDGETS) {
      state("busy", `trying ${number(budget)} tokens`);
      const settings = { ...query(), budget }, found = await simulate(settings);
      if (!isNewest()) return;
      const { attainment, ttft_ms, tbt_ms } = found.figures;
      const used = Math.max(ttft_ms.p99 / settings.ttft_slo_ms, tbt_ms.p99 / settings.tbt_slo_ms);
      tried.push({ settings, found, attainment, used, rows: remember(settings, found.figures) });
    }
  } catch (error) {
    if (isNewest()) fail(error.message);
    return;
  } finally {
    place("best").disabled = false;
  }
  const [best, next] = tried.sort((a, b) => b.attainment - a.attainment || a.used - b.used);
  const { settings, found: { figures } } = best;
  fill(settings);
  history.replaceState(null, "", `#${fragment()}`);
  show(best.found, settings);
  for (const row of best.rows) row.classList.add("best");
  state("done", `${BUDGETS.length} budgets tried`);
  say(place("best-shown"), `${number(settings.budget)} tokens: ${percent(best.attainment)} within both limits, `
    + (next.attainment < best.attainment ? "the largest share" : `and the largest margin: TTFT p99 ${ms(figures.ttft_ms.p99)} of `
    + `${number(settings.ttft_slo_ms)} ms, TBT p99 ${ms(figures.tbt_ms.p99)} of ${number(settings.tbt_slo_ms)} ms`) + ".");
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
    Strip.draw(lane.lastChild, { passes, from, to, sloMs: 0, maxTokens: most, selected: -1 });
    const context = lane.lastChild.getContext("2d"), scale = lane.lastChild.clientWidth / width;
    context.fillStyle = Strip.coloursOf(lane.lastChild).over;
    for (const [start, end] of run.nodes[index].pauses)
      if (end > from && start < Math.min(to, at))
        context.fillRect((start - from) * scale, 0, Math.max(1, (Math.min(end, at) - start) * scale - 1), 4);
  });
  plot(place("queue"), run.queue.filter(([time]) => time <= at), 0, true);
  for (const [name, limit] of [["ttft", run.settings.ttft_slo_ms], ["tbt", run.settings.tbt_slo_ms]]) {
    const points = run[name].filter(([time]) => time <= at), last = points.slice(-SMOOTH).map(([, value]) => value);
    plot(place(name), points, limit, false);
    say(place(`${name}-shown`), last.length
      ? `last ${last.length}: p50 ${ms(share(last, 0.5))} ms, p99 ${ms(share(last, 0.99))} ms` : "no answer yet");
  }
  const active = run.requests.filter((one) => one.at_ms <= to && (one.end_ms ?? one.at_ms) >= from && one.at_ms <= at);
  const rows = evenly(active, MOST_ROWS);
  const shown = `from ${number(from / 1000, 1)} to ${number(to / 1000, 1)} s`;
  say(place("steps-title"), `Steps ${shown}`);
  say(place("gantt-title"), `Requests ${shown}` + (rows.length < active.length ? `: a sample, ${rows.length} of ${number(active.length)}` : ""));
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
  return { label: one.id, spans: Strip.clipped([waiting, ...(one.spans ?? [])], from, to) };
}

/* Draws a chart of the whole run: a step line if `isLine`, otherwise points with their running p50 and p99. A `limit`
   other than 0 becomes a dashed line. */
function plot(canvas, points, limit, isLine) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext("2d"), colours = Strip.coloursOf(canvas);
  context.scale(ratio, ratio);
  const top = 1.15 * Math.max(limit, 1, ...points.map((point) => point[1]));
  const x = (time) => (time / run.end) * width, y = (value) => height - 16 - (value / top) * (height - 30);
  const line = (colour, rows) => {
    context.strokeStyle = colour;
    context.beginPath();
    rows.forEach(([time, value], index) => context[index ? "lineTo" : "moveTo"](x(time), y(value)));
    context.stroke();
  };
  context.font = "11px system-ui, sans-serif";
  const label = (text, colour, left, base, align) => {
    Object.assign(context, { fillStyle: colour, textAlign: align });
    context.fillText(text, left, base);
  };
  line(colours.line, [[0, 0], [run.end, 0]]);
  for (const part of [0, 0.25, 0.5, 0.75, 1])
    label(`${number((part * run.end) / 1000, 1)} s`, colours.ink, part * (width - 8) + 4, height - 4,
      part === 0 ? "left" : part === 1 ? "right" : "center");
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
      [time, share(points.slice(Math.max(0, index + 1 - SMOOTH), index + 1).map((point) => point[1]), part)]);
    line(colours.ink, running(0.5));
    line(colours.prefill, running(0.99));
  }
  label(isLine ? `at most ${number(Math.max(0, ...points.map((point) => point[1])))}` : `${ms(top / 1.15)} ms`, colours.ink, 4, 11, "left");
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
  place("tour").hidden = place("tour-bar").hidden = !isOpen;
  place("intro").hidden = isOpen;
  place("tour-open").setAttribute("aria-expanded", String(isOpen));
  if (!isOpen) return;
  const { title, text, look, settings, tries } = TOUR[step];
  say(place("tour-title"), title);
  place("tour-text").replaceChildren(...text.map((each) => make("p", {}, ...linked(each))));
  say(place("tour-look"), look);
  place("tour-tries").replaceChildren(...tries.map(([label, changes]) => {
    const button = make("button", { type: "button" }, label);
    button.addEventListener("click", () => { fill({ ...settings, ...changes }); refresh(); });
    return button;
  }));
  place("tour-back").disabled = step === 0;
  place("tour-next").disabled = step === TOUR.length - 1;
  if (place("tour").getBoundingClientRect().top < 0) place("tour").scrollIntoView();
  fill(settings);
  refresh();
}

/* Makes links of [text](URL). */
const linked = (text) => text.split(/\[(.+?)\]\((.+?)\)/).map((part, index, parts) => index % 3 === 0 ? part
  : index % 3 === 1 ? make("a", { href: parts[index + 1] }, part) : null).filter(Boolean);

place("tour-open").addEventListener("click", () => tour(step < 0 ? 0 : -1));
place("tour-close").addEventListener("click", () => tour(-1));
place("tour-back").addEventListener("click", () => tour(step - 1));
place("tour-next").addEventListener("click", () => tour(step + 1));

/* ---- the rest ---- */

form.addEventListener("input", () => {
  describe();
  clearTimeout(timer);
  timer = setTimeout(refresh, REST_MS);
});
form.addEventListener("submit", (event) => event.preventDefault());
place("best").addEventListener("click", findBest);
place("time").addEventListener("input", () => { play(false); draw(); });
place("window").addEventListener("change", draw);
place("play").addEventListener("click", () => play(!playing));
place("share").addEventListener("click", async () => {
  const isCopied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  say(place("share"), isCopied ? "Copied" : "The address bar has the link");
  setTimeout(() => say(place("share"), "Copy link"), 2000);
});
addEventListener("hashchange", () => { fromFragment(); refresh(); });
addEventListener("resize", draw);
place("home").hidden = Boolean(globalThis.batonSimulate);
startTheme(draw);
fromFragment();
refresh();
