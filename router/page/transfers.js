/* KV on its way from prefill to decode nodes: what is in flight, and the latest that arrived. It reads the requests'
   summaries, whose numbers are of all pushes of a request together. */
import { bytes, make, ms, rate, say, shortened } from "./text.js";

const SHOWN = 10;

const isMoving = (one) => one.state === "prefill" || one.state === "transfer";

const CELLS = [
  ["", (one) => shortened(one.id)],
  ["", (one) => `${one.prefill} → ${one.decode}`],
  ["", (one) => (isMoving(one) ? "in flight" : "done")],
  ["number", (one) => bytes(one.transfer.bytes)],
  ["number", (one) => rate(one.transfer.bytes, one.transfer.busy_ms)],
  ["number", (one) => ms(one.transfer.hidden_ms)],
  ["number", (one) => (isMoving(one) ? "–" : ms(one.transfer.exposed_ms))],
  ["wide", (one) => one.transfer.channel],
];

export class Transfers {
  constructor(table, note) {
    Object.assign(this, { body: table.tBodies[0], note, rows: new Map() });
  }

  add(summaries) {
    for (const one of [...summaries].sort((a, b) => a.accepted_ms - b.accepted_ms)) if (one.transfer) this.put(one);
    while (this.rows.size > SHOWN) {
      const [id, row] = this.rows.entries().next().value;
      row.root.remove();
      this.rows.delete(id);
    }
    const moving = [...this.rows.values()].filter((row) => isMoving(row.one)).length;
    say(this.note, this.rows.size ? `${moving || "None"} in flight. Hidden is time during the prefill, exposed after it.`
      : "Nothing has been handed over yet.");
  }

  put(one) {
    let row = this.rows.get(one.id);
    if (!row) {
      const root = make("tr", {}, ...CELLS.map(([name]) => make("td", { class: name })));
      row = { root };
      this.rows.set(one.id, row);
      this.body.prepend(root);
    }
    row.one = one;
    CELLS.forEach(([, read], index) => say(row.root.cells[index], read(one)));
  }
}
