/* The sections with text and tables. A section without data shows the reason. */

function verdict() {
  const { sentence, figures, cause, flips } = report.verdict, banners = [];
  const differing = report.parity.facts.filter((fact) => !fact.equal && !fact.declared).map((fact) => fact.fact);
  if (!report.valid) banners.push(["Invalid", "The figures do not support a verdict."]);
  if (!report.parity.equal)
    banners.push(["Not comparable", `The arms differ in undeclared facts: ${differing.join(", ") || "see Parity"}.`]);
  const rows = [["Figures", figures], ["Why", cause], ["Where it flips", flips?.join("; ")]];
  const known = banners.length ? [] : rows.filter(([, content]) => content);
  const isListed = banners.length > 0 && report.problems.length > 0;
  return [
    banners.map(([title, why]) => h("div", { class: "banner", role: "alert" }, h("strong", {}, title), " ", why)),
    report.problems.length ? h("ul", {}, report.problems.map((each) => h("li", {}, each))) : null,
    isListed ? null : h("p", { class: banners.length ? "doubted" : "sentence" }, sentence),
    report.notes?.length ? h("ul", { class: "notes" }, report.notes.map((each) => h("li", {}, each))) : null,
    known.length ? table("The verdict in detail; brackets are 95 % intervals over the seeds", [], known) : null,
    h("dl", { class: "facts" }, facts().map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact)))),
  ];
}

function facts() {
  const { traffic, slo, runs } = report, seeds = new Set(runs.map((run) => run.seed)).size;
  const tokens = (of) => `${figure(of.mean)} mean, ${figure(of.p50)} p50, ${figure(of.p99)} p99`;
  const scaled = [1, null].includes(traffic.scale_tokens) ? "" : `, lengths × ${figure(traffic.scale_tokens)}`;
  const rate = traffic.rate === null ? "" : ` at ${figure(traffic.rate)}/s`;
  const limit = (name, ms) => (ms ? `${name} ≤ ${figure(ms)} ms` : `any ${name}`);
  const limits = `${limit("TTFT", slo.ttft_ms)} and ${limit(`TBT ${slo.tbt_of ?? "p99"}`, slo.tbt_ms)}`;
  return [
    ["Traffic", traffic.name + scaled],
    ["Load", `${plural(traffic.num_requests, "request")}${rate} over ${figure(traffic.duration_s)} s, open loop`],
    ["Prompt tokens", tokens(traffic.prompt_tokens)],
    ["Output tokens", tokens(traffic.output_tokens)],
    ["SLO", `${limits} for ${percent(slo.attainment)} of requests`],
    ["Runs", `${plural(runs.length, "run")}, ${plural(seeds, "seed")}, ${report.on}`],
    ["Created", report.created],
    ...(traffic.laps > 1 ? [["Trace", `repeated: a row is used up to ${figure(traffic.laps)} times in a run`]] : []),
    ["Prompts changed", `${figure(traffic.cut)} cut short, ${figure(traffic.refused)} left out`],
  ];
}

function arms() {
  const known = (of) => Object.keys(of).filter((metric) => of[metric].mean !== null);
  const measured = new Set(Object.values(report.summary).flatMap(known));
  const shown = ORDER.filter((metric) => measured.has(metric));
  const estimate = (name, metric) => {
    const own = get(get(report.summary, name), metric);
    if (!own || own.mean === null) return "–";
    const beyond = { above: "≥ ", below: "< " }[own.bounded]; // the capacity lies beyond the measured rates
    if (beyond) return beyond + valueOf(metric, own.mean);
    if (own.low === null || own.high === null || own.low === own.high) return valueOf(metric, own.mean);
    const bounds = `(${valueOf(metric, own.low)} to ${valueOf(metric, own.high)})`.replaceAll(" %", "");
    return [valueOf(metric, own.mean), h("small", {}, bounds)];
  };
  const topCause = ({ name }) => {
    const [top] = Object.entries(get(report.miss_causes, name) ?? {}).sort((a, b) => b[1] - a[1]);
    return top ? `${top[0]} (${top[1]})` : "–";
  };
  const settings = (arm) => Object.entries(arm.settings).map(([name, value]) => `${name}=${text(value)}`).join(", ");
  const row = (label, of) => [label, ...report.arms.map(of)];
  const heads = ["", ...names.map((name) => ({ number: armName(name) }))];
  return [
    table("Each arm: the mean over seeds, and its interval", heads, [
      row("Nodes", nodesOf),
      row("Devices", (arm) => figure(arm.devices)),
      row("Policy", (arm) => arm.policy ?? "–"),
      row("Settings", (arm) => settings(arm) || "defaults"),
      ...shown.map((metric) => row(term(headOf(metric)), (arm) => estimate(arm.name, metric))),
      row("Main miss cause", topCause),
    ]),
    shown.length ? definitions(shown.map(labelOf)) : none("No run of any arm was valid, so there are no figures."),
  ];
}

function nodesOf({ prefill, decode }) {
  if (prefill === null || decode === null) return "–";
  return prefill ? `${prefill} prefill, ${decode} decode` : `${decode} co-located`;
}

/* Draw a difference as a dot within its interval, in percent of the other arm, on a scale of ±`reach`. */
function interval(low, high, middle, reach) {
  const at = (value) => 50 + 50 * Math.max(-1, Math.min(1, value / reach));
  const place = (kind, left, width) => {
    const part = h("i", { class: kind });
    part.style.left = left + "%";
    if (width !== undefined) part.style.width = Math.max(0.5, width) + "%";
    return part;
  };
  const shape = Math.abs(middle) > reach ? "beyond" : "within"; // "beyond": a hollow dot at the edge of the scale
  const line = low === null || high === null ? null : place("reach", at(low), at(high) - at(low));
  const dot = place(`dot ${shape}`, at(middle));
  return h("span", { class: "forest", "aria-hidden": "true" }, place("zero", 50), line, dot);
}

function differences(comparisons) {
  if (!comparisons.length) return none("No pair of arms has enough valid runs to compare.");
  const pairs = new Map();
  for (const each of comparisons) {
    const pair = `${each.arm} minus ${each.against}`;
    pairs.set(pair, [...(pairs.get(pair) ?? []), each]);
  }
  return [...pairs].map(([pair, rows]) => pairTable(pair, rows.sort((a, b) => rank(a.metric) - rank(b.metric))));
}

function pairTable(pair, rows) {
  const ends = (each) => [each.percent, each.percent_low, each.percent_high];
  const reach = Math.min(100, Math.max(5, ...rows.flatMap(ends).map((end) => Math.abs(end ?? 0))));
  const amount = (metric, own) => (own !== null && SHARES.has(metric) ? own * 100 : own);
  const value = (each, key, unit = "") => signed(amount(each.metric, each[key]), unit);
  const scale = `Interval within ±${figure(reach)} %`;
  const heads = ["Figure", "#Difference", "#Interval", "#Percent", scale, "#p (Holm)", "Result"];
  const says = (each) => (each.low === null ? "not decided" : each.says); // fewer than two pairs have no interval
  return table(pair, heads, rows.map((each) => [
    term(labelOf(each.metric)),
    value(each, "difference", SHARES.has(each.metric) ? " points" : " " + unitOf(each.metric)),
    each.low === null || each.high === null ? "–" : `${value(each, "low")} to ${value(each, "high")}`,
    signed(each.percent, " %"),
    each.percent === null ? "" : interval(each.percent_low, each.percent_high, each.percent, reach),
    each.p < 0.0001 ? "< 0.0001" : figure(each.p, 2),
    [chip(says(each), says(each).split(" ")[0]), each.note ? h("small", {}, each.note) : null],
  ]));
}

function proof() {
  const moved = [...new Set([...names, ...report.runs.map((run) => run.arm)])].map((name) => {
    const kept = report.runs.filter((run) => run.arm === name && run.kv);
    const total = (field) => kept.reduce((sum, run) => sum + run.kv[field], 0);
    const each = total("blocks") ? bytes(total("bytes") / total("blocks")) : "–";
    const counts = [kept.length, total("handoffs"), total("blocks")].map(whole);
    return [armName(name), ...counts, bytes(total("bytes")), each];
  });
  const { compared, different, num_different: count, equal } = report.tokens, { control } = report;
  const label = equal ? "all agree" : `${plural(count, "request")} differ`;
  const heads = ["Arm", "#Runs", "#Handoffs", "#Blocks", "#Bytes", "#Bytes per block"];
  const listed = () => h("ul", {}, different.map((each) => h("li", {}, h("code", {}, text(each)))));
  return [
    table("KV transferred between nodes, over all runs", heads, moved),
    h("h3", {}, "Same answers"),
    compared
      ? h("p", {}, chip(equal ? "equal" : "different", equal ? "plain" : "bad"),
          ` The answers to ${plural(compared, "request")} were compared token by token across arms; ${label}.`)
      : none("No answers were compared across arms."),
    count ? more("Requests whose answers differ", listed()) : null,
    count > different.length ? none(`${whole(count - different.length)} more are in report.json`) : null,
    h("h3", {}, "Negative control"),
    control
      ? h("p", {}, "The first arm against a copy of itself: ", h("strong", {}, control.says))
      : none("Not run. --control compares the first arm with a copy of itself, which must not differ."),
    control?.comparisons?.length ? more("Figures", differences(control.comparisons)) : null,
  ];
}

function runs() {
  if (!report.runs.length) return none("There are no runs.");
  const state = (run) => {
    if (!run.valid) return chip("invalid", "bad");
    return run.overloaded ? chip("overloaded", "bad") : chip("valid", "plain");
  };
  const shown = ["attainment", "ttft_p99_ms", "tbt_p99_ms", "client_lag_p99_ms"];
  const counts = ["#Arrived", "#Finished", "#Failed", ...shown.map((metric) => "#" + headOf(metric))];
  const heads = ["#Order", "State", "Arm", "#Seed", "#Window, s", ...counts, "Problems"];
  const cells = (run) => [
    figure(run.position), state(run), armName(run.arm), String(run.seed),
    run.window_s ? run.window_s.map((each) => figure(each)).join("\u00a0to\u00a0") : "–",
    whole(run.arrived), whole(run.finished), whole(run.failed),
    ...shown.map((metric) => valueOf(metric, get(run.metrics, metric))),
    run.problems.length ? h("span", { class: "long" }, run.problems.join("; ")) : "–",
  ];
  const ordered = [...report.runs].sort((a, b) => a.position - b.position);
  return table("Every run, in order", heads, ordered.map(cells));
}

function parity() {
  const state = (fact) => {
    if (fact.equal) return chip("equal", "plain");
    return fact.declared ? chip("treatment", "too") : chip("differs", "bad");
  };
  const valuesOf = (fact) => names.map((name) => text(get(fact.values, name) ?? "–"));
  const found = report.parity.facts.map((fact) => [fact.fact, state(fact), ...valuesOf(fact)]);
  const environment = Object.entries(report.environment).map(([name, value]) => [name, text(value)]);
  return [
    found.length ? table("Facts of the arms", ["Fact", "State", ...names], found) : none("No facts were collected."),
    environment.length ? table("Environment", ["Fact", "Value"], environment) : none("No environment was recorded."),
    h("p", {}, `Seeds: ${[...new Set(report.runs.map((run) => run.seed))].join(", ") || "none"}.`),
    command("Repeat this comparison", report.repro),
  ];
}

function command(title, line) {
  const code = h("code", {}, line), label = h("span", { role: "status" });
  const copy = async () => {
    getSelection().selectAllChildren(code); // without clipboard access (local files), the user can copy the selection
    const written = navigator.clipboard?.writeText(line) ?? Promise.reject(new Error("no clipboard"));
    const done = await written.then(() => true, () => document.execCommand("copy"));
    label.textContent = done ? "copied" : "selected: press Ctrl+C";
  };
  const button = h("button", { type: "button", onclick: copy }, "Copy");
  const heading = h("p", {}, h("b", {}, title), " ", button, " ", label);
  return h("div", { class: "command" }, heading, h("pre", { tabindex: "0" }, code));
}

const GUIDE = [
  ["Intervals", `For each seed, every arm gets the same arrivals, and differences are calculated seed by seed. A
    difference is too close to call if its interval contains zero or if it is under 3 %. The intervals of figures, and
    of differences between shares, stay within possible values (Wilson's interval); all others are Student's.`],
  ["Invalid, overloaded", `A run whose client was late or whose node died is invalid and left out. A run whose queue
    kept growing is overloaded and has no latencies, because they would depend on its duration.`],
  ["Other files", "report.json has every figure, requests.jsonl every request; a trace.json opens in Perfetto."],
  ["Scope", "The result holds for this hardware, model and traffic. Repeat the comparison with yours."],
];
const listed = (rows) => h("dl", { class: "guide" }, rows.map(([name, label]) => [h("dt", {}, name), h("dd", {}, label)]));
const guide = () => listed(GUIDE);
/* Return the definitions of the terms in some labels, as text. */
const definitions = (labels) => listed(TERMS.filter(([name]) => labels.some((label) => label.includes(name))));
