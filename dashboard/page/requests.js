/* The table of requests, newest first. A click on a request opens its timeline below it. */
import { get } from "./feed.js";
import { bytes, fillBar, isOlder, keepNewest, make, ms, number, place, say, shortened } from "./text.js";

const SHOWN = 100;
const PHASES = ["router", "earlier_attempts", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference"];
const LABELS = { earlier_attempts: "on earlier nodes" };
const UNDER_WAY = new Set(["queued", "prefill", "transfer", "decode"]);

const since = (from, to) => (from == null || to == null ? null : to - from);

const CELLS = [
  ["state", (one) => (one.earlier_nodes?.length ? `${one.state}, moved` : one.state)],
  ["number", (one) => number(one.prompt_tokens)],
  ["number wide", (one) => number(one.cached_tokens)],
  ["number wide", (one) => number(one.generated_tokens)],
  ["wide", (one) => `${one.prefill ? `${one.prefill} → ` : ""}${one.decode ?? "–"}`],
  ["number", (one) => ms(since(one.accepted_ms, one.first_token_ms))],
  ["number wide", (one) => ms(since(one.first_token_ms, one.second_token_ms))],
  ["number", (one) => ms(since(one.accepted_ms, one.ended_ms))],
];

const isMoving = (one) => UNDER_WAY.has(one.state);

export class Requests {
  constructor(table) {
    this.body = table.tBodies[0];
    this.rows = new Map(); // id -> table row and newest summary
    this.held = null; // summaries that arrive while a row is pressed, because a new row would move it away
    this.body.onpointerdown = () => { this.held ??= []; };
    window.onpointerup = window.onpointercancel = () => setTimeout(() => this.release());
  }

  /* Adds new and changed summaries, in any order. */
  add(summaries) {
    if (this.held) return void this.held.push(...summaries);
    for (const one of summaries) {
      if (!this.rows.has(one.id)) {
        if (isOlder(this.rows, SHOWN, one)) continue;
        this.rows.set(one.id, this.newRow(one));
      }
      this.fill(this.rows.get(one.id), one);
    }
    keepNewest(this.rows, SHOWN);
  }

  release() {
    const held = this.held ?? [];
    this.held = null;
    this.add(held);
  }

  /* Whether the request has ended according to the table, but not according to this summary, which is older. */
  hasEnded(one) {
    const known = this.rows.get(one.id)?.one;
    return known && !isMoving(known) && isMoving(one) && one.generated_tokens <= known.generated_tokens;
  }

  /* The ids of the requests under way. */
  moving() {
    return [...this.rows.values()].filter((row) => isMoving(row.one)).map((row) => row.one.id);
  }

  /* Removes requests that the router no longer knows. */
  forget(ids) {
    for (const row of ids.map((id) => this.rows.get(id)).filter(Boolean)) {
      this.close(row);
      row.root.remove();
      this.rows.delete(row.one.id);
    }
  }

  newRow(one) {
    const button = make("button", { type: "button", "aria-expanded": "false", title: one.id }, shortened(one.id));
    const cells = CELLS.map(([name]) => make("td", { class: name }));
    const where = make("td", { class: "wide where" });
    const root = make("tr", {}, make("td", {}, button), ...cells, where);
    const row = { one, button, cells, where, root, detail: null, isLoading: false, isStale: false };
    root.addEventListener("click", () => (row.detail ? this.close(row) : this.open(row)));
    place(this.body, this.rows, row);
    return row;
  }

  fill(row, one) {
    const wasMoving = isMoving(row.one);
    row.one = one;
    row.cells[0].dataset.state = one.state;
    CELLS.forEach(([, read], index) => say(row.cells[index], read(one)));
    showPhases(row.where, one);
    if (row.detail && (isMoving(one) || wasMoving)) this.load(row);
  }

  open(row) {
    row.detail = make("tr", { class: "timeline" }, make("td", { colspan: String(CELLS.length + 2) }, "…"));
    row.button.setAttribute("aria-expanded", "true");
    row.root.after(row.detail);
    this.load(row);
  }

  close(row) {
    row.detail?.remove();
    row.detail = null;
    row.button.setAttribute("aria-expanded", "false");
  }

  /* Fetches the timeline of a row. Only one fetch runs at a time; calls in the meantime cause another one. */
  async load(row) {
    row.isStale = row.isLoading;
    if (row.isLoading) return;
    row.isLoading = true;
    const timeline = await get(`v1/requests/${encodeURIComponent(row.one.id)}/timeline`);
    row.isLoading = false;
    const cell = row.detail?.firstChild;
    if (!cell) return;
    if (timeline) showTimeline(cell, timeline);
    else if (cell.childElementCount === 0) cell.replaceChildren("The router has no timeline of this request.");
    if (row.isStale) this.load(row);
  }

  /* Opens the row of a request, and moves the focus to it. Returns whether the row exists. */
  reveal(id) {
    const row = this.rows.get(id);
    if (row && !row.detail) this.open(row);
    row?.button.focus();
    row?.root.scrollIntoView({ block: "center" });
    return Boolean(row);
  }

  redraw() {
    for (const row of this.rows.values()) if (row.detail) this.load(row);
  }
}

const named = (phases) => PHASES.filter((name) => phases[name] > 0.005)
  .map((name) => [name, `${LABELS[name] ?? name.replace("_", " ")} ${ms(phases[name])} ms`]);

/* Shows the phases of a request as a bar or, if they are unknown, the state or the error as text. */
function showPhases(cell, one) {
  const phases = one.phases_ms;
  cell.title = phases ? named(phases).map(([, text]) => text).join(", ") : one.message ?? "";
  if (!phases) {
    say(cell, one.message ? errorText(one) : isMoving(one) ? "running" : one.state === "finished" ? "not recorded" : "–");
    return;
  }
  if (!cell.firstElementChild) cell.replaceChildren(make("div", { class: "bar phases", role: "img" }));
  const bar = cell.firstElementChild, parts = PHASES.map((name) => [name, Math.max(0, phases[name] ?? 0)]);
  bar.setAttribute("aria-label", cell.title || "Where the time went");
  fillBar(bar, parts, parts.reduce((sum, [, amount]) => sum + amount, 0));
}

const errorText = (one) => `${one.status ? `${one.status}: ` : ""}${one.message}`;

function spanText(span, from) {
  const what = { chunk: `prompt chunk of ${number(span.tokens)} tokens`, decode: `${number(span.tokens)} tokens generated`,
    transfer: "KV transfer", queued: "queued", wait: "waited" }[span.kind] ?? span.kind;
  const cause = span.cause ? ` (${span.cause})` : "";
  return `${ms(span.start_ms - from)} ms: ${what}${cause}, ${ms(span.end_ms - span.start_ms)} ms${span.node ? ` on ${span.node}` : ""}`;
}

function showTimeline(cell, timeline) {
  const from = timeline.accepted_ms, starts = timeline.spans.map((span) => span.start_ms);
  const to = Math.max(from + 0.1, timeline.ended_ms ?? timeline.last_token_ms ?? 0, ...starts,
    ...timeline.spans.map((span) => span.end_ms ?? 0));
  const spans = timeline.spans.map((span) => ({ ...span, end_ms: span.end_ms ?? to })); // open spans
  const facts = [timeline.id, timeline.reason && `placed: ${timeline.reason}`,
    timeline.finish && !timeline.message && `finish: ${timeline.finish}`, timeline.attempts > 1 && `${timeline.attempts} attempts`,
    ...(timeline.earlier_nodes ?? []).map((nodes) => `moved from ${nodes.filter(Boolean).join(" → ")}`),
    timeline.longest_gap_ms && `longest pause between tokens ${ms(timeline.longest_gap_ms)} ms`];
  const moved = timeline.transfer;
  if (moved) {
    facts.push(`${bytes(moved.bytes)} of KV over ${moved.channel}, ${ms(moved.hidden_ms)} ms hidden, ${ms(moved.exposed_ms)} ms exposed`);
  }
  const text = make("p", {}, facts.filter(Boolean).join(" · "));
  if (timeline.message) text.prepend(make("b", { class: timeline.state }, errorText(timeline)), " · ");
  const legend = timeline.phases_ms && make("ul", { class: "legend phases-legend" },
    ...named(timeline.phases_ms).map(([name, phase]) => make("li", { class: name }, phase)));
  if (!spans.length) {
    cell.replaceChildren(text);
    return;
  }
  const canvas = make("canvas", { role: "img", "aria-label": "Timeline of the request; the list below has the same content" });
  const wasOpen = cell.querySelector("details")?.open ?? false;
  const list = make("details", {}, make("summary", {}, `${spans.length} spans`),
    make("ol", { "aria-label": "Spans", tabindex: "0" }, ...spans.map((span) => make("li", {}, spanText(span, from)))));
  list.open = wasOpen;
  cell.replaceChildren(...[text, legend, canvas, list].filter(Boolean));
  const chart = { rows: Strip.rowsOf(spans), from, to };
  Strip.gantt(canvas, chart);
  canvas.addEventListener("mousemove", (event) => {
    const span = Strip.spanAt(chart, event.offsetX, event.offsetY, canvas.clientWidth);
    canvas.title = span ? spanText(span, from) : "";
  });
}
