/* One card per node: its activity and its KV blocks. */
import { fillBar, make, number, percent, say } from "./text.js";

const cards = new Map();

const FACTS = [
  ["Batch", (node) => batchText(node)],
  ["Queue", (node) => number(node.waiting)],
  ["Busy", (node) => percent(node.busy)],
  ["Passes/s", (node) => number(node.steps_per_s)],
  ["Tokens/s", (node) => number(node.tokens_per_s)],
  ["Budget", (node) => number(node.budget)],
];

function batchText(node) {
  const batch = node.batch;
  if (!batch || !node.running) return number(node.running ?? 0);
  return [batch.decodes ? `${batch.decodes} dec` : "", batch.prefills ? `${number(batch.tokens - batch.decodes)} tok` : ""]
    .filter(Boolean).join(" + ") || number(node.running);
}

export function showNodes(place, nodes) {
  const wanted = new Set(nodes.map((node) => node.id));
  for (const [id, card] of cards) if (!wanted.has(id)) { card.root.remove(); cards.delete(id); }
  nodes.forEach((node, index) => {
    if (!cards.has(node.id)) cards.set(node.id, newCard(place, node.id));
    const card = cards.get(node.id);
    if (place.children[index] !== card.root) place.insertBefore(card.root, place.children[index]);
    fill(card, node);
  });
  if (!nodes.length) say(place, "No node has joined yet.");
  else if (place.firstChild?.nodeType === Node.TEXT_NODE) place.firstChild.remove();
}

function newCard(place, id) {
  const role = make("span"), state = make("span"), kv = make("p", { class: "kv" });
  const bar = make("div", { class: "bar", role: "img" });
  const values = FACTS.map(() => make("dd"));
  const list = make("dl", {}, ...FACTS.map(([name], index) => make("div", {}, make("dt", {}, name), values[index])));
  const root = make("article", { class: "node", "aria-label": `Node ${id}` },
    make("h3", {}, id, role, state), list, kv, bar);
  place.append(root);
  return { root, role, state, values, kv, bar };
}

function fill(card, node) {
  const { free = 0, cached = 0, owned = 0, reserved = 0, quarantined = 0, total = 0 } = node.blocks ?? {};
  card.root.dataset.role = node.role;
  card.root.dataset.state = node.state;
  say(card.role, node.role);
  say(card.state, node.state);
  FACTS.forEach(([, read], index) => say(card.values[index], read(node)));
  card.values[5].title = node.budget_reason ?? "";
  const held = reserved + quarantined;
  const text = `KV: ${number(owned)} owned, ${number(held)} reserved, ${number(cached)} cached, ${number(free)} free`;
  say(card.kv, text);
  card.bar.setAttribute("aria-label", `${text}, of ${number(total)} blocks`);
  fillBar(card.bar, [["owned", owned], ["reserved", held], ["cached", cached]], total);
}
