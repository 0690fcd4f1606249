/* KV transfers from prefill to decode nodes: those in progress, and the latest completed ones. The numbers come from
   request summaries, which add up all pushes of a request. */
import { bytes, isOlder, keepNewest, make, ms, number, place, say, shortened } from "./text.js";

const SHOWN = 10;

const isMoving = (one) => one.state === "prefill" || one.state === "transfer";
const stateOf = (one) => (isMoving(one) ? "in flight" : one.state === "failed" || one.state === "cancelled" ? one.state : "done");

const CELLS = [
  ["", (one) => shortened(one.id)],
  ["", (one) => `${one.prefill} → ${one.decode}`],
  ["", stateOf],
  ["number wide", (one) => bytes(one.transfer.bytes)],
  ["number wide", ({ transfer }) => number(transfer.busy_ms > 0 ? transfer.bytes / transfer.busy_ms / 1e3 : null)],
  ["number wide", (one) => ms(one.transfer.hidden_ms)],
  ["number", (one) => (isMoving(one) ? "–" : ms(one.transfer.exposed_ms))],
  ["wide", (one) => one.transfer.channel],
];

export class Transfers {
  constructor(table, note) {
    Object.assign(this, { body: table.tBodies[0], note, rows: new Map(), moving: new Set() });
  }

  add(summaries) {
    for (const one of summaries) if (one.transfer) this.put(one);
    keepNewest(this.rows, SHOWN);
    say(this.note, this.rows.size ? `${this.moving.size || "None"} in flight. The latest are listed.`
      : "Nothing has been handed over yet.");
  }

  /* Removes requests that the router no longer knows. */
  forget(ids) {
    for (const id of ids) {
      this.moving.delete(id);
      this.rows.get(id)?.root.remove();
      this.rows.delete(id);
    }
  }

  put(one) {
    if (isMoving(one)) this.moving.add(one.id);
    else this.moving.delete(one.id);
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
