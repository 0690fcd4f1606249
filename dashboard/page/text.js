/* Formats numbers and makes elements. */

export const number = (value, digits = 0) => value == null ? "–"
  : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

/* Milliseconds with about three digits: 0.12, 4.56, 78.9, 1,234. */
export const ms = (value) => number(value, value == null ? 0 : value < 10 ? 2 : value < 100 ? 1 : 0);

export const percent = (share) => share == null ? "–" : `${Math.round(share * 100)}%`;

export const counted = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;

export function bytes(size) {
  if (size == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (size >= 1024 && unit < 3) { size /= 1024; unit++; }
  return `${number(size, unit && size < 100 ? 1 : 0)} ${units[unit]}`;
}

/* A time as "12 s", "3 min", "5 h 20 min" or "2 d 4 h". */
export function span(duration) {
  const seconds = Math.max(0, Math.round(duration / 1000)), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (minutes < 1) return `${seconds} s`;
  if (hours < 1) return `${minutes} min`;
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/* The time of day as "17:05:09", as in the logs. */
export const clock = (date) => date.toLocaleTimeString([], { hourCycle: "h23" });

export const isGone = (node) => node.state === "lost" || node.state === "left";

/* The nodes sorted: prefill nodes first, nodes that are gone last, and node-2 before node-10. */
export const inOrder = (nodes) => [...nodes].sort((a, b) => isGone(a) - isGone(b)
  || (b.role ?? "").localeCompare(a.role ?? "") || a.id.localeCompare(b.id, "en", { numeric: true }));

/* "cmpl-1234567890abcdef…" -> "1234567890": enough to tell requests apart. */
export const shortened = (id) => id.slice(id.indexOf("-") + 1, id.indexOf("-") + 11);

/* An element with attributes and children. Strings become text, never HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((each) => each != null));
  return element;
}

/* Sets the text only if it differs, to avoid a layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* Sets a text; its parts between backticks become code. */
export function sayWithCode(element, text) {
  if (element.textContent === text.replaceAll("`", "")) return;
  element.replaceChildren(...text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part)));
}

/* ---- rows of a table: id -> {one (a summary), root, …}, the newest on top ---- */

const byAge = (rows) => [...rows.values()].sort((a, b) => a.one.accepted_ms - b.one.accepted_ms);

/* Whether the table is full, and the request `one` is older than all rows. */
export const isOlder = (rows, limit, one) => rows.size >= limit && one.accepted_ms < byAge(rows)[0].one.accepted_ms;

export function place(body, rows, row) {
  body.insertBefore(row.root, byAge(rows).findLast((each) => each.one.accepted_ms <= row.one.accepted_ms)?.root ?? null);
}

/* Removes the oldest rows beyond `limit`, except those with an open detail. */
export function keepNewest(rows, limit) {
  for (const { one, root } of byAge(rows).slice(0, Math.max(0, rows.size - limit)).filter((row) => !row.detail)) {
    root.remove();
    rows.delete(one.id);
  }
}

/* Sets the widths of a bar's parts in percent of `total`; parts = [[class, amount], …]. */
export function fillBar(bar, parts, total) {
  parts.forEach(([name, amount], index) => {
    const part = bar.children[index] ?? bar.appendChild(make("i", { class: name }));
    part.style.width = `${total > 0 ? (100 * amount) / total : 0}%`;
  });
}
