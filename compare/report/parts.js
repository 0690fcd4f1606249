/* Number formats and small elements for all sections. Text is inserted as text nodes, never as markup. */

const report = JSON.parse(document.getElementById("data").textContent);
const names = report.arms.map((arm) => arm.name);
const get = (object, key) => (object && Object.hasOwn(object, key) ? object[key] : null);
const isThere = (value) => value !== null && value !== undefined;
const after = []; // called once, after layout
const drawings = []; // called after layout, and when the page's size or theme changes

// ---- formats

/* Format a figure with three digits, or all of its integer digits; a dash if missing. */
function figure(value, digits = 3) {
  if (!isThere(value)) return "–";
  const places = value === 0 ? 0 : digits - 1 - Math.floor(Math.log10(Math.abs(value)));
  const shown = value.toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.min(places, 4)) });
  return shown.replace("-", "−");
}

function bytes(count) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${figure(count / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const percent = (share) => (isThere(share) ? figure(share * 100) + " %" : "–");
const signed = (value, unit = "") => (isThere(value) ? (value > 0 ? "+" : "") + figure(value) + unit : "–");
const whole = (count) => count.toLocaleString("en");
const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/* Label and unit of each metric, in the order of the tables. */
const METRICS = {
  capacity_rps: ["Capacity", "/s"], attainment: ["Attainment", ""], goodput_rps: ["Goodput", "/s"],
  ttft_p50_ms: ["TTFT p50", "ms"], ttft_p99_ms: ["TTFT p99", "ms"],
  tbt_p50_ms: ["TBT p50", "ms"], tbt_p99_ms: ["TBT p99", "ms"], tbt_max_ms: ["TBT max", "ms"],
  ttst_p50_ms: ["TTST p50", "ms"], ttst_p99_ms: ["TTST p99", "ms"],
  tpot_p50_ms: ["TPOT p50", "ms"], e2e_p50_ms: ["E2E p50", "ms"], fluidity: ["Fluidity", ""],
  throughput_tps: ["Throughput", "tok/s"], exposed_transfer_p50_ms: ["Exposed transfer p50", "ms"],
  hidden_transfer_p50_ms: ["Hidden transfer p50", "ms"], interference_s: ["Interference", "s"],
  client_lag_p99_ms: ["Client lag p99", "ms"],
};
const ORDER = Object.keys(METRICS), SHARES = new Set(["attainment", "fluidity"]);
const rank = (metric) => (ORDER.includes(metric) ? ORDER.indexOf(metric) : ORDER.length);
const labelOf = (metric) => get(METRICS, metric)?.[0] ?? metric;
const unitOf = (metric) => get(METRICS, metric)?.[1] ?? "";
const headOf = (metric) => labelOf(metric) + (unitOf(metric) ? `, ${unitOf(metric)}` : "");
const valueOf = (metric, value) => (SHARES.has(metric) ? percent(value) : figure(value));

/* Explanations of the terms that occur in labels. */
const TERMS = [
  ["Capacity", "The highest rate at which the target share of the requests is within the SLO."],
  ["Attainment", `The share of the requests within the SLO, among all requests that arrived. A failed or late request is
    a miss.`],
  ["Goodput", "Requests per second within the SLO."],
  ["TTFT", `Time to first token, from the scheduled start of a request to its first token at the client. It includes any
    lateness of the client.`],
  ["TBT", "Time between tokens: each gap between two tokens of a request."],
  ["TTST", "Time from first to second token, which includes the KV transfer of a request that was handed off."],
  ["TPOT", "Time per output token: the mean gap of a request, which hides stalls."],
  ["E2E", "End to end: from the scheduled start of a request to its last token."],
  ["Fluidity", "The share of tokens that met their deadline: the TTFT SLO, plus the TBT SLO for each earlier token."],
  ["Exposed transfer", "The part of a KV transfer that delays the request."],
  ["Hidden transfer", "The part of a KV transfer that overlaps the computation of the prompt, and delays nothing."],
  ["Interference", `How much longer decodes took because a prompt chunk shared their step. Disaggregation avoids this,
    at the cost of the exposed transfer.`],
];

// ---- elements

/* Return an element with attributes, listeners ("onclick") and children; null children are left out. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(isThere));
  return element;
}

/* Return a label whose explanation is shown while the pointer or the focus is on it. */
function term(label) {
  const known = TERMS.find(([name]) => label.toLowerCase().includes(name.toLowerCase()));
  if (!known) return label;
  const show = ({ currentTarget: of }) => {
    const tip = document.getElementById("tip"), { left, bottom } = of.getBoundingClientRect();
    tip.textContent = known[1];
    tip.hidden = false;
    tip.style.left = Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = bottom + 4 + "px";
  };
  const hide = () => { document.getElementById("tip").hidden = true; };
  const shown = { onmouseenter: show, onfocus: show, onmouseleave: hide, onblur: hide };
  const onkeydown = ({ key }) => (key === "Escape" ? hide() : null);
  return h("span", { class: "term", tabindex: "0", "aria-describedby": "tip", ...shown, onkeydown }, label);
}

const none = (why) => h("p", { class: "none" }, why);
/* Return entries by node, prefill nodes first. */
function nodesIn(object) {
  const place = ([node]) => (node.startsWith("prefill") ? 0 : 1);
  const inOrder = (a, b) => place(a) - place(b) || a[0].localeCompare(b[0], "en", { numeric: true });
  return Object.entries(object ?? {}).sort(inOrder);
}

const chip = (label, kind) => h("span", { class: "chip " + kind }, label);
const more = (title, ...content) => h("details", {}, h("summary", {}, title), content);

/* Return an arm's name with its colour: a square, or a piece of its curve (kind "line"). */
function armName(name, kind = "swatch") {
  const index = names.indexOf(name);
  const mark = index < 0 ? null : h("span", { class: `${kind} arm-${index % 6}`, "aria-hidden": "true" });
  return h("span", { class: "arm" }, mark, name);
}
const legend = (kind) => h("p", { class: "legend" }, names.map((name) => armName(name, kind)));

/* Return a table that can scroll sideways. A column contains numbers if its head starts with "#" or is {number}. */
function table(caption, heads, rows) {
  const columns = heads.map((head) => {
    const isNumber = typeof head === "string" ? head.startsWith("#") : true;
    return { kind: isNumber ? "number" : null, title: head.number ?? head.replace(/^#/, "") };
  });
  const head = ({ kind, title }) => h(title ? "th" : "td", { scope: title ? "col" : null, class: kind }, title);
  const cell = (content, i) => h(i ? "td" : "th", { class: columns[i]?.kind ?? null, scope: i ? null : "row" }, content);
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), heads.length ? h("thead", {}, h("tr", {}, columns.map(head))) : null,
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
  const mark = () => scroll.classList.toggle("beyond", scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 1);
  scroll.addEventListener("scroll", mark);
  drawings.push(mark);
  return h("div", { class: "wide" }, scroll);
}

const barName = (arm, label) =>
  h("span", { class: "bar-name" }, arm === null ? null : armName(arm), h("small", {}, label));

/* Return a stacked bar. parts = [[class, label, value]]; `full` is the value of the full width. Wide parts without
   hatching show their value. */
function bar(parts, full, format) {
  const shown = parts.filter(([, , value]) => value > 0), words = ([, label, value]) => `${label} ${format(value)}`;
  const piece = (part) => {
    const [kind, , value] = part, hasRoom = value / full > 0.13 && !["queue", "wait"].includes(kind);
    const element = h("span", { class: "part " + kind, title: words(part) }, hasRoom ? format(value) : null);
    element.style.width = `${(100 * value) / full}%`;
    return element;
  };
  return h("div", { class: "bar", role: "img", "aria-label": shown.map(words).join(", ") }, shown.map(piece));
}

function key(parts) {
  const one = ([kind, label]) => h("span", { class: "arm" }, h("span", { class: "swatch part " + kind }), label);
  return h("p", { class: "legend" }, parts.map(one));
}
