/* The table of requests, newest first. A click on a request opens its timeline below it. */
import { get } from "./feed.js";
import { bytes, fillBar, isOlder, keepNewest, make, ms, number, place, say, shortened } from "./text.js";

const SHOWN = 100;
const PHASES = ["router", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference", "retry"];
const UNDER_WAY = new Set(["queued", "prefill", "transfer", "decode"]);

const since = (from, to) => (from == null || to == null ? null : to - from);

const CELLS = [
  ["state", (one) => one.state],
  ["number", (one) => number(one.prompt_tokens)],
  ["number wide", (one) => number(one.cached_tokens)],
  ["number wide", (one) => number(one.generated_tokens)],
  ["wide", (one) => (one.prefill ? `${one.prefill} → ${one.decode ?? "–"}` : one.decode ?? "–")],
  ["number", (one) => ms(since(one.accepted_ms, one.first_token_ms))],
  ["number wide", (one) => ms(since(one.first_token_ms, one.second_token_ms))],
  ["number", (one) => ms(since(one.accepted_ms, one.ended_ms))],
];

const isMoving = (one) => UNDER_WAY.has(one.state);

export class Requests {
  constructor(table) {
    this.body = table.tBodies[0];
    this.rows = new Map(); // id -> table row and newest summary
  }

  /* Adds new and changed summaries, in any order. */
  add(summaries) {
    for (const one of summaries) {
      if (!this.rows.has(one.id)) {
        if (isOlder(this.rows, SHOWN, one)) continue;
        this.rows.set(one.id, this.newRow(one));
      }
      this.fill(this.rows.get(one.id), one);
    }
    keepNewest(this.rows, SHOWN);
  }

  newRow(one) {
    const button = make("button", { type: "button", "aria-expanded": "false", title: one.id }, shortened(one.id));
    const cells = CELLS.map(([name]) => make("td", { class: name }));
    const bar = make("div", { class: "bar phases", role: "img" });
    const root = make("tr", {}, make("td", {}, button), ...cells, make("td", { class: "wide" }, bar));
    const row = { one, button, cells, bar, root, detail: null, isLoading: false, isStale: false };
    root.addEventListener("click", () => (row.detail ? this.close(row) : this.open(row)));
    place(this.body, this.rows, row);
    return row;
  }

  fill(row, one) {
    const wasMoving = isMoving(row.one);
    row.one = one;
    row.cells[0].dataset.state = one.state;
    CELLS.forEach(([, read], index) => say(row.cells[index], read(one)));
    const phases = one.phases_ms, parts = PHASES.map((name) => [name, Math.max(0, phases?.[name] ?? 0)]);
    if (phases) {
      fillBar(row.bar, parts, parts.reduce((sum, [, amount]) => sum + amount, 0));
      row.bar.setAttribute("aria-label", phaseText(phases));
      row.bar.title = phaseText(phases);
    }
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
    else cell.replaceChildren("The timeline of this request is no longer kept.");
    if (row.isStale) this.load(row);
  }

  redraw() {
    for (const row of this.rows.values()) if (row.detail) this.load(row);
  }
}

const phaseText = (phases) => PHASES.filter((name) => phases[name] > 0.005)
  .map((name) => `${name.replace("_", " ")} ${ms(phases[name])} ms`).join(", ");

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
    timeline.finish && `finish: ${timeline.finish}`, timeline.attempts > 1 && `${timeline.attempts} attempts`];
  const moved = timeline.transfer;
  if (moved) {
    facts.push(`${bytes(moved.bytes)} of KV over ${moved.channel}, ${ms(moved.hidden_ms)} ms hidden, ${ms(moved.exposed_ms)} ms exposed`);
  }
  if (timeline.phases_ms) facts.push(phaseText(timeline.phases_ms));
  const canvas = make("canvas", { role: "img", "aria-label": "Timeline of the request; the list below has the same content" });
  const wasOpen = cell.querySelector("details")?.open ?? false;
  const list = make("details", {}, make("summary", {}, `${spans.length} spans`),
    make("ol", {}, ...spans.map((span) => make("li", {}, spanText(span, from)))));
  list.open = wasOpen;
  cell.replaceChildren(make("p", {}, facts.filter(Boolean).join(" · ")), canvas, list);
  const chart = { rows: Strip.rowsOf(spans), from, to };
  Strip.gantt(canvas, chart);
  canvas.addEventListener("mousemove", (event) => {
    const span = Strip.spanAt(chart, event.offsetX, event.offsetY, canvas.clientWidth);
    canvas.title = span ? spanText(span, from) : "";
  });
}
