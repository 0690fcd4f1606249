/* The sections with curves and bars. A section without data shows the reason. */

const KINDS = [
  ["ttft_ms", "Time to first token"], ["ttst_ms", "Time from first to second token"], ["tbt_ms", "Time between tokens"],
];

/* Return the arms that have a curve in `table`, each with its index among all arms, which selects its colour. */
const curvesIn = (table, key) =>
  names.map((name, index) => ({ index, name, ...get(table, name) })).filter((each) => each[key]?.length);

/* Return a chart that `draw` fills after layout, and a line below it with the values under the pointer. */
function chart(label, hint, curves, unit, draw, format = percent) {
  const host = h("div", { class: "chart", role: "img", "aria-label": label });
  const readout = h("p", { class: "readout", "aria-hidden": "true" }, hint);
  const pointed = (x, values) => {
    const each = () => curves.map((curve, i) => `${curve.name} ${format(values[i])}`).join(", ");
    readout.textContent = x === null ? hint : `${unit(x)}: ${each()}`;
  };
  after.push(() => draw(host, pointed));
  return [host, readout];
}

function attainment() {
  const found = curvesIn(report.curves.attainment, "rate");
  if (!found.length)
    return none("Measured at one rate only. --find-capacity measures attainment against rate, and each arm's capacity.");
  const label = "Share of requests within the SLO against rate, one line per arm; the figures are in the table below";
  const hint = "Shaded: from the lowest to the highest seed. Dashed: the target.";
  const rows = found.flatMap(({ name, rate, share, low, high }) =>
    rate.map((_, i) =>
      [armName(name), figure(rate[i]), percent(share[i]), `${percent(low[i])} to ${percent(high[i])}`]));
  const draw = (host, pointed) => against(host, found, report.slo.attainment, pointed);
  return [
    legend("line"),
    chart(label, hint, found, (x) => `At ${figure(x)}/s`, draw),
    more("Figures", table("Attainment against rate", ["Arm", "#Rate, /s", "#Attainment", "#Lowest to highest seed"], rows)),
  ];
}

function efficiency() {
  const found = curvesIn(report.frontier, "rate");
  if (!found.length) return none("Measured at one rate only. --find-capacity measures each arm at several rates.");
  const label = "Tokens/s per device against tokens/s per user, one line per arm; the figures are in the table below";
  const hint = "Each point is a rate. Right: faster answers. Up: more tokens from each device.";
  const draw = (host, pointed) => tradeOff(host, found, pointed);
  const rows = found.flatMap(({ name, rate, per_user: user, per_device: device }) =>
    rate.map((_, i) => [armName(name), figure(rate[i]), figure(user[i]), figure(device[i])]));
  return [
    h("h3", {}, "Tokens/s of each device, against tokens/s of each user"),
    legend("line"),
    chart(label, hint, found, (x) => `${figure(x)} tokens/s per user`, draw, figure),
    more("Figures", table("Tokens/s", ["Arm", "#Rate, /s", "#Per user", "#Per device"], rows)),
    splits(),
  ];
}

/* The capacity of each arm, in the order of the number of prefill nodes. */
function splits() {
  const capacity = ({ name }) => get(get(report.summary, name), "capacity_rps") ?? {};
  const found = report.arms.filter((arm) => isThere(arm.prefill) && isThere(capacity(arm).mean));
  const most = Math.max(0, ...found.map((arm) => capacity(arm).mean));
  if (found.length < 2 || !most) return null;
  const bound = (arm) => ({ above: "at least ", below: "less than " }[capacity(arm).bounded] ?? "");
  const line = (arm) => [
    barName(arm.name, `${nodesOf(arm)}: ${bound(arm)}${figure(capacity(arm).mean)}/s`),
    bar([[arm.prefill ? "prefill" : "decode", "capacity", capacity(arm).mean]], most, (value) => `${figure(value)}/s`),
  ];
  const ordered = found.sort((a, b) => a.prefill - b.prefill);
  return [h("h3", {}, "Capacity by the number of prefill nodes"), h("div", { class: "bars" }, ordered.map(line))];
}

/* Measured and simulated figures of the same periods. */
function prediction() {
  const found = names.filter((name) => Object.keys(get(report.prediction, name) ?? {}).length);
  if (!found.length)
    return none(`Not compared. A session with --on emulated, or with --on live and --emulate FILE, also simulates each of
      its periods.`);
  const rows = found.flatMap((name) => Object.entries(report.prediction[name]).map(([metric, row]) => {
    const isShare = SHARES.has(metric), difference = row.simulated - row.measured;
    const error = isShare ? signed(100 * difference, " points") : signed(100 * difference / row.measured, " %");
    return [armName(name), headOf(metric), valueOf(metric, row.measured), valueOf(metric, row.simulated), error, whole(row.periods)];
  }));
  const heads = ["Arm", "Figure", "#Measured", "#Simulated", "#Error", "#Periods"];
  return table("Means over the valid periods of each arm, and those of simulations with the same traffic", heads, rows);
}

function curves() {
  const one = ([metric, title]) => {
    const found = curvesIn(get(report.curves.ecdf, metric), "x"), caption = h("figcaption", {}, title);
    if (!found.length) return h("figure", {}, caption, none("No valid run has a value of this latency."));
    const label = `${title}: cumulative share, one line per arm; the percentiles are in the table of arms`;
    const hint = "Share of intervals up to this length. Point at the curves for figures.";
    const draw = (host, pointed) => ecdf(host, found, report.slo[metric] || null, pointed);
    return h("figure", {}, caption, chart(label, hint, found, (x) => `≤ ${figure(x)} ms`, draw));
  };
  return [legend("line"), h("div", { class: "charts" }, KINDS.map(one))];
}

/* For each phase: the CSS class of its colour, its label, and its name in the report. */
const PHASES = [
  ["client", "client lag", "client"], ["router", "router", "router"], ["queue", "prefill queue", "prefill_queue"],
  ["prefill", "prefill", "prefill"], ["transfer", "transfer, exposed", "transfer_exposed"],
  ["wait", "decode queue", "decode_queue"], ["decode", "decode", "decode"], ["over", "interference", "interference"],
  ["retry", "failed attempts", "retry"],
];

function phases() {
  const partsOf = (of) => PHASES.map(([kind, label, name]) => [kind, label, get(of, name) ?? 0]);
  const sum = (parts) => parts.reduce((total, [, , value]) => total + value, 0);
  const found = names.filter((name) => sum(partsOf(get(report.phases, name)?.mean)) > 0);
  if (!found.length) return none("No phases: no request finished, or the router's records were not fetched.");
  const row = (name, which) => ({ name, which, parts: partsOf(report.phases[name][which]) });
  const rows = found.flatMap((name) => [row(name, "mean"), row(name, "missed")]);
  const longest = Math.max(...rows.map((row) => sum(row.parts))), inMs = (value) => figure(value) + " ms";
  const used = PHASES.filter((_, i) => rows.some((row) => row.parts[i][2] > 0));
  const counted = ({ name, which }) => {
    const of = report.phases[name].requests;
    if (which === "missed") return of ? `mean of the ${whole(of.missed)} that missed` : "mean of those that missed";
    return of ? `mean of the ${whole(of.mean)} that finished, of ${whole(of.arrived)}` : "mean of those that finished";
  };
  const line = ({ name, which, parts }) => [
    barName(which === "mean" ? name : null, counted({ name, which })),
    sum(parts) ? bar(parts, longest, inMs) : none("no request missed its SLO"),
  ];
  const figures = PHASES.map(([, label], i) => [label, ...rows.map((row) => figure(row.parts[i][2]))]);
  const total = ({ parts }) => figure(sum(parts));
  const heads = ["Phase", ...rows.map(({ name, which }) => `#${name}, ${which}`)];
  const left = ({ median, p99 }) => `median ${figure(median)} ms, p99 ${figure(p99)} ms`;
  return [
    key(used),
    h("div", { class: "bars" }, rows.map(line)),
    more("Figures", table("Mean milliseconds per request", heads, [...figures, ["sum", ...rows.map(total)]])),
    h("p", { class: "note" }, `The phases of a request sum to its end-to-end time. The means leave out failed
        requests, which have no phases. Residual: `,
      found.map((name) => `${name} ${left(report.phases[name].residual_ms)}`).join("; "), "."),
    causes(),
  ];
}

function causes() {
  const count = (name, cause) => get(get(report.miss_causes, name), cause) ?? 0;
  const all = new Set(names.flatMap((name) => Object.keys(get(report.miss_causes, name) ?? {})));
  if (!all.size) return none("No request missed its SLO.");
  const total = (cause) => names.reduce((sum, name) => sum + count(name, cause), 0);
  const ordered = [...all].sort((a, b) => total(b) - total(a));
  const rows = ordered.map((cause) => [cause, ...names.map((name) => whole(count(name, cause)))]);
  return table("Why requests missed their SLO", ["Cause", ...names.map((name) => "#" + name)], rows);
}

function devices() {
  const nodes = names.flatMap((name) =>
    nodesIn(get(report.busy, name)).map(([node, own], i) => ({ name, node, own, first: i === 0 })));
  if (!nodes.length) return none("No busy shares: no step records were fetched for these runs.");
  const partsOf = (own) => [["prefill", "prefill", own.prefill ?? 0], ["decode", "decode", own.decode ?? 0],
    ["wait", "idle, blocked", own.idle_blocked ?? 0], ["idle", "idle, empty", own.idle_empty ?? 0]];
  const line = ({ name, node, own, first }) =>
    [barName(first ? name : null, `${node}, ${percent(own.busy)} busy`), bar(partsOf(own), 1, percent)];
  const heads = ["Arm", "Node", ...partsOf({}).map(([, label]) => "#" + label)];
  const shares = (own) => partsOf(own).map(([, , share]) => percent(share));
  const rows = nodes.map(({ name, node, own }) => [armName(name), node, ...shares(own)]);
  const figures = more("Figures", table("Shares of the window", heads, rows));
  return [key(partsOf({})), h("div", { class: "bars" }, nodes.map(line)), figures];
}

function worst() {
  if (!report.worst.length) return none("No finished request has a timeline: the router's records were not fetched.");
  const between = (each, from, to) =>
    (isThere(each[from]) && isThere(each[to]) ? `${figure(each[to] - each[from])} ms` : "–");
  const one = (each) => {
    const drawing = each.spans.length ? gantt(each.spans) : none("No spans were recorded.");
    const ttft = between(each, "accepted_ms", "first_token_ms");
    const ttst = between(each, "first_token_ms", "second_token_ms");
    const sizes = `${figure(each.prompt_tokens)} prompt and ${figure(each.generated_tokens)} output tokens`;
    const line = ` TTFT ${ttft}, TTST ${ttst}, end to end ${between(each, "accepted_ms", "ended_ms")}; ${sizes}`;
    const left = each.spans_left_out ? none(`${plural(each.spans_left_out, "short span")} not drawn`) : null;
    return h("li", {}, h("p", {}, armName(each.arm), " ", h("code", {}, each.id), line), drawing, left);
  };
  const kinds = [["queue", "queued"], ["prefill", "prompt chunk"], ["transfer", "KV transfer"], ["decode", "decode"],
    ["behind", "waiting behind a prompt chunk"], ["landing", "waiting for a transfer"], ["room", "waiting for blocks"]];
  return [key(kinds), h("ol", { class: "worst" }, report.worst.slice(0, 10).map(one))];
}
