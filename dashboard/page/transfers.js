/* KV transfers from prefill to decode nodes: those in progress, and the latest completed ones. The numbers come from
   request summaries, which add up all pushes of a request. */
import { bytes, isOlder, keepNewest, make, ms, place, rate, say, shortened } from "./text.js";

const SHOWN = 10;

const isMoving = (one) => one.state === "prefill" || one.state === "transfer";
const stateOf = (one) => (isMoving(one) ? "in flight" : one.state === "failed" || one.state === "cancelled" ? one.state : "done");

const CELLS = [
  ["", (one) => shortened(one.id)],
  ["", (one) => `${one.prefill} → ${one.decode}`],
  ["", stateOf],
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
    for (const one of summaries) if (one.transfer) this.put(one);
    keepNewest(this.rows, SHOWN);
    const moving = [...this.rows.values()].filter((row) => isMoving(row.one)).length;
    say(this.note, this.rows.size ? `${moving || "None"} in flight. Hidden is time during the prefill, exposed after it.`
      : "Nothing has been handed over yet.");
  }

  put(one) {
    let row = this.rows.get(one.id);
    if (!row) {
      if (isOlder(this.rows, SHOWN, one)) return;
      row = { one, root: make("tr", {}, ...CELLS.map(([name]) => make("td", { class: name }))) };
      place(this.body, this.rows, row);
      this.rows.set(one.id, row);
    }
    row.one = one;
    CELLS.forEach(([, read], index) => say(row.root.cells[index], read(one)));
  }
}
