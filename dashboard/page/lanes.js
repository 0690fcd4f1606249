/* The live strip: one lane per node, each with a bounded ring of passes, drawn once per frame by strip.js. */
import { get } from "./feed.js";
import { counted, make, ms, number, say } from "./text.js";

const KEPT = 20000, KEPT_MS = 70000; // kept passes per node, and their time: the longest window and a margin
const LAG_MS = 400; // the strip ends this long before the newest pass, because records arrive in batches
const LABEL_MS = 500;
const HISTORY = 1000; // earlier passes to load per node
const FORGET_MS = 0.05; // decrease of the skew per batch of records, because clocks drift apart

/* Columns of a step as the router sends it. */
const [NUMBER, START, DURATION, HOST, PREDICTED, BUDGET, REASON, PREFILLS, PREFILL_TOKENS, DECODES, , PREEMPTED,
  , , , , , , DRAFTED, ACCEPTED] = Array(20).keys();

/* `place` holds the lanes, and `panel` shows the chosen pass. `picked()` is called when a pass is chosen. */
export class Lanes {
  constructor(place, panel, picked) {
    Object.assign(this, { place, panel, picked, windowMs: 10000, sloMs: 0, lanes: new Map(), chosen: null });
    this.skew = -Infinity; // the nodes' clock minus this browser's
    this.frozenAt = null;
    this.labelled = 0;
  }

  /* Adds the new rows of a `steps` event. After a reconnect, rows may repeat. */
  add(node, rows) {
    const { passes } = this.laneOf(node);
    for (const row of rows) if (!passes.length || row[START] > passes.at(-1)[0]) passes.push(passOf(row));
    if (!passes.length) return;
    const newest = passes.at(-1)[0] + passes.at(-1)[1];
    const old = Math.max(passes.length - KEPT, Strip.firstAfter(passes, newest - KEPT_MS));
    if (old > KEPT / 4) passes.splice(0, old);
    this.skew = Math.max(this.skew - FORGET_MS, newest - Date.now());
  }

  /* Loads, once per lane and connection, the steps from before the connection. */
  async fill(id) {
    const lane = this.laneOf(id);
    if (lane.isFilled) return;
    lane.isFilled = true;
    const answer = await get(`v1/steps?node=${encodeURIComponent(id)}&limit=${HISTORY}`), first = lane.passes[0]?.[0];
    lane.isFilled = answer !== null;
    const before = (answer?.steps ?? []).filter((row) => first === undefined || row[START] < first);
    lane.passes.unshift(...before.map(passOf));
  }

  /* Drops all steps after a reconnect, because the steps from the time without a connection are missing. */
  reload() {
    for (const lane of this.lanes.values()) Object.assign(lane, { passes: [], isFilled: false });
  }

  /* Keeps one lane for each of the ids, in their order. */
  arrange(ids) {
    for (const [id, lane] of this.lanes) if (!ids.includes(id)) { lane.root.remove(); this.lanes.delete(id); }
    ids.map((id) => this.laneOf(id).root).forEach((root, index) => {
      if (this.place.children[index] !== root) this.place.insertBefore(root, this.place.children[index]);
    });
  }

  laneOf(id) {
    if (!this.lanes.has(id)) this.lanes.set(id, this.newLane(id));
    return this.lanes.get(id);
  }

  newLane(id) {
    const label = make("small");
    const canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": `Steps of ${id}; arrow keys choose one` });
    const lane = { id, label, canvas, passes: [], shown: null, root: make("div", { class: "lane" }, make("span", {}, `${id} `, label), canvas) };
    canvas.addEventListener("click", (event) => {
      const index = Strip.passAt(this.view(lane), event.offsetX, canvas.clientWidth);
      if (index >= 0) this.choose(lane, this.view(lane).passes[index]);
    });
    canvas.addEventListener("keydown", (event) => this.key(lane, event));
    this.place.append(lane.root);
    return lane;
  }

  key(lane, event) {
    const { passes, to, from } = this.view(lane), last = Strip.firstAfter(passes, to) - 1;
    const at = this.chosen?.id === lane.id ? passes.indexOf(this.chosen.pass) : -1;
    const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at < 0 ? last : at + 1,
      Home: Strip.firstAfter(passes, from), End: last }[event.key];
    if (event.key === "Escape") this.choose(lane, null);
    if (next === undefined || !passes[next]) return;
    event.preventDefault();
    this.choose(lane, passes[next]);
  }

  freeze(on) {
    if (on === (this.frozenAt !== null)) return;
    this.frozenAt = on ? this.edge() : null;
    for (const lane of this.lanes.values()) lane.shown = on ? lane.passes.slice() : null;
  }

  edge() {
    const pixel = this.windowMs / (this.place.clientWidth || 1); // move by whole pixels, so that columns do not flicker
    return this.frozenAt ?? Math.floor((Date.now() + Math.max(this.skew, -1e15) - LAG_MS) / pixel) * pixel;
  }

  view(lane) {
    const to = this.edge(), passes = lane.shown ?? lane.passes;
    const selected = this.chosen?.id === lane.id ? passes.indexOf(this.chosen.pass) : -1;
    return { passes, from: to - this.windowMs, to, sloMs: this.sloMs, maxTokens: this.most, selected };
  }

  /* Draws one frame. All lanes share a scale, so that they can be compared. */
  draw(now) {
    this.most = 8;
    const to = this.edge();
    for (const { passes, shown } of this.lanes.values()) {
      const list = shown ?? passes;
      for (let index = Strip.firstAfter(list, to - this.windowMs); index < list.length; index++) {
        this.most = Math.max(this.most, list[index][2] + list[index][3]);
      }
    }
    const label = now - this.labelled > LABEL_MS;
    if (label) this.labelled = now;
    for (const lane of this.lanes.values()) {
      const count = Strip.draw(lane.canvas, this.view(lane));
      if (label) say(lane.label, counted(count, "step"));
    }
  }

  async choose(lane, pass) {
    this.chosen = pass && { id: lane.id, pass };
    this.panel.hidden = !pass;
    if (!pass) return;
    this.picked();
    this.panel.replaceChildren(...describe(lane.id, pass[4], this.sloMs));
    const step = await get(`v1/steps/${encodeURIComponent(lane.id)}/${pass[4][NUMBER]}`);
    if (this.chosen?.pass !== pass) return;
    this.panel.append(step ? membersOf(step) : make("p", {}, "The requests of this step are no longer kept."));
  }
}

const passOf = (row) => [row[START], row[DURATION], row[PREFILL_TOKENS], row[DECODES], row];

function describe(id, row, sloMs) {
  const parts = [`${ms(row[DURATION])} ms on the device, ${ms(row[HOST])} ms on the host`];
  if (row[PREDICTED]) parts.push(`${ms(row[PREDICTED])} ms predicted`);
  if (row[PREFILLS]) parts.push(`${number(row[PREFILL_TOKENS])} prompt tokens in ${counted(row[PREFILLS], "chunk")}`);
  if (row[DECODES]) parts.push(`${counted(row[DECODES], "decode")}`);
  if (row[DRAFTED]) parts.push(`${number(row[ACCEPTED])} of ${number(row[DRAFTED])} guessed tokens right`);
  if (row[PREEMPTED]) parts.push(`${number(row[PREEMPTED])} preempted`);
  const why = row[REASON] ? ` (${row[REASON]})` : "";
  const over = sloMs && row[DECODES] && row[DURATION] > sloMs ? ` Over the TBT SLO of ${ms(sloMs)} ms.` : "";
  return [
    make("p", {}, make("strong", {}, `Step ${row[NUMBER]} of ${id}: `), parts.join("; ") + "." + over),
    make("p", { class: "note" }, `Budget ${number(row[BUDGET])} tokens${why}.`),
  ];
}

function membersOf(step) {
  return make("ul", { "aria-label": "Members", tabindex: "0" }, ...step.members.map((each) => make("li",
    { class: each.kind === "chunk" ? "prefill" : "decode" },
    `${each.id || "unknown request"} · ${each.kind === "chunk"
      ? `prompt ${number(each.start)}–${number(each.start + each.count)}` : `token ${number(each.start)}`}`)));
}
