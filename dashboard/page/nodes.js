/* One card per node: its activity and its KV blocks, or, for a node that is lost or has left, the reason. */
import { clock, fillBar, inOrder, isGone, make, number, percent, say, span } from "./text.js";
import { term } from "./terms.js";

const cards = new Map();

const FACTS = [
  ["Batch", "batch", (node) => batchText(node)],
  ["Queue", "queue", (node) => number(node.waiting)],
  ["Busy", "busy", (node) => percent(node.busy)],
  ["Steps/s", "steps", (node) => number(node.steps_per_s)],
  ["Tokens/s", "tokens", (node) => number(node.tokens_per_s)],
  ["Budget", "budget", (node) => number(node.budget || null)],
];

function batchText(node) {
  const batch = node.batch;
  if (!batch || !node.running) return number(node.running ?? 0);
  return [batch.decodes ? `${batch.decodes} dec` : "", batch.prefills ? `${number(batch.tokens - batch.decodes)} tok` : ""]
    .filter(Boolean).join(" + ") || number(node.running);
}

export function showNodes(place, unsorted) {
  const nodes = inOrder(unsorted), wanted = new Set(nodes.map((node) => node.id));
  for (const [id, card] of cards) if (!wanted.has(id)) { card.root.remove(); cards.delete(id); }
  nodes.forEach((node, index) => {
    if (!cards.has(node.id)) cards.set(node.id, newCard(place, node.id));
    const card = cards.get(node.id);
    if (place.children[index] !== card.root) place.insertBefore(card.root, place.children[index]);
    fill(card, node);
    for (const each of card.root.querySelectorAll(".term")) each.tabIndex = index ? -1 : 0; // Tab stops at one card's terms
  });
  if (!nodes.length) say(place, "No node has joined yet.");
  else if (place.firstChild?.nodeType === Node.TEXT_NODE) place.firstChild.remove();
}

function newCard(place, id) {
  const role = make("span"), state = make("span"), reason = make("p"), kv = make("span");
  const bar = make("div", { class: "bar", role: "img", "aria-label": "KV blocks" });
  const values = FACTS.map(() => make("dd"));
  const list = make("dl", {}, ...FACTS.map(([name, key], index) => make("div", {}, make("dt", {}, term(key, name)), values[index])));
  const live = make("div", {}, list, make("p", { class: "kv" }, term("kv", "KV"), kv), bar);
  const root = make("article", { class: "node", "aria-label": `Node ${id}` }, make("h3", {}, make("b", { title: id }, id), role, state), live, reason);
  place.append(root);
  return { root, role, state, reason, live, values, kv, bar };
}

function fill(card, node) {
  const { cached = 0, owned = 0, reserved = 0, quarantined = 0, total = 0 } = node.blocks ?? {};
  const gone = isGone(node);
  card.root.dataset.role = node.role;
  card.root.dataset.state = node.state;
  say(card.role, node.role ?? "");
  say(card.state, gone && node.since_ms ? `${node.state} ${span(Date.now() - node.since_ms)} ago` : node.state);
  card.live.hidden = gone;
  card.reason.hidden = !gone;
  say(card.reason, node.reason ?? "");
  if (gone) return;
  FACTS.forEach(([, , read], index) => say(card.values[index], read(node)));
  card.values[5].title = node.budget_reason ?? "";
  const held = reserved + quarantined;
  const text = `${number(owned)} owned, ${number(held)} reserved, ${number(cached)} cached of ${number(total)}`;
  say(card.kv, ` ${text}`);
  card.bar.setAttribute("aria-label", `KV: ${text} blocks`);
  fillBar(card.bar, [["owned", owned], ["reserved", held], ["cached", cached]], total);
}

const TOTALS = [
  ["requests_per_s", "Requests/s"], ["prompt_tokens_per_s", "Prompt tokens/s"], ["generated_tokens_per_s", "Generated tokens/s"],
  ["queued", "Queued"], ["running", "Running"], ["refused_per_s", "Refused/s"], ["failed_per_s", "Failed/s"],
];

/* Rates are those of the last 10 s, counts those of the last 60 s. */
export function showTotals(place, totals) {
  if (!totals) return;
  if (!place.children.length) {
    place.append(...TOTALS.map(([key, name]) => make("div", { class: key }, make("dt", {}, name), make("dd"), make("dd", { class: "note" }))));
  }
  TOTALS.forEach(([key], index) => {
    const [, value, note] = place.children[index].children, amount = totals[key], kind = key.replace("_per_s", "");
    say(value, number(amount, kind !== key && amount < 100 ? 1 : 0));
    if (["refused", "failed"].includes(kind)) say(note, `${number(totals[kind])} in 60 s`);
    place.children[index].dataset.any = String(Boolean(totals[kind] ?? 0));
  });
}

/* Shows the events, newest first. */
export function showEvents(place, events = []) {
  const newest = JSON.stringify(events.at(-1) ?? null); // the number alone repeats after a restart of the router
  if (place.dataset.newest === newest) return;
  place.dataset.newest = newest;
  place.replaceChildren(...events.toReversed().map((event) => make("li", { class: event.kind },
    make("time", {}, clock(new Date(event.time_ms))), event.text)));
  if (!events.length) place.append(make("li", {}, "No events yet."));
}
