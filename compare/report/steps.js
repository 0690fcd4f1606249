/* The strip: the steps of each arm on one time axis, and the running requests below them. */

const GANTT_ROWS = 12, NARROW_PX = 560, SHORTEST_MS = 20;
const labelWidth = () => (innerWidth < NARROW_PX ? 64 : 112);

/* Chunks are painted over transfers, so that the exposed part of a transfer stays visible. */
const LAYERS = ["transfer", "queued", "wait", "decode", "chunk"];

const inLayers = (spans) => spans.sort((a, b) => LAYERS.indexOf(a.kind) - LAYERS.indexOf(b.kind));

/* Draw one request's spans, one row per node. */
function gantt(spans) {
  const canvas = h("canvas", { class: "gantt", role: "img", "aria-label": "Timeline of this request" });
  const from = Math.min(...spans.map((span) => span.start_ms)), to = Math.max(...spans.map((span) => span.end_ms));
  drawings.push(() => Strip.gantt(canvas, { rows: Strip.rowsOf(spans), from, to, labelWidth: labelWidth() }));
  return canvas;
}

/* Return the visible part of the period. Every change of it calls `moved`, and then each function in `painters`. */
function windowOf(since, until, moved) {
  const view = { from: since, to: until, painters: [] };
  const show = (from, wanted) => {
    const width = Math.min(until - since, Math.max(SHORTEST_MS, wanted));
    view.from = Math.max(since, Math.min(from, until - width));
    view.to = view.from + width;
    moved();
    view.painters.forEach((each) => each());
  };
  const width = () => view.to - view.from;
  return Object.assign(view, {
    show,
    centre: (time, wanted = width()) => show(time - wanted / 2, wanted),
    move: (share) => show(view.from + share * width(), width()),
    zoom: (factor) => show((view.from + view.to) / 2 - (factor * width()) / 2, factor * width()),
    place: () => (until - since > width() ? (view.from - since) / (until - since - width()) : 0),
    slide: (share) => show(since + share * (until - since - width()), width()),
  });
}

/* Draw one node's steps. A click selects a step. The arrow keys select an adjacent step (left and right) or the nearest
   step over the SLO (up and down). */
function lane(node, steps, sloMs, view, most, onPick) {
  const label = `Steps of ${node}: ${steps.length}. Use the arrow keys to move between them.`;
  const canvas = h("canvas", { class: "lane", tabindex: "0", role: "img", "aria-label": label });
  const own = { passes: steps, sloMs, maxTokens: most, selected: -1 };
  const draw = () => Strip.draw(canvas, Object.assign(own, { from: view.from, to: view.to }));
  const pick = (index) => {
    const step = steps[index];
    if (!step) return;
    own.selected = index;
    onPick(node, step);
    if (step[0] < view.from || step[0] + step[1] > view.to) view.centre(step[0] + step[1] / 2);
    else draw();
  };
  canvas.addEventListener("click", (event) => pick(Strip.passAt(own, event.offsetX, canvas.clientWidth)));
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const late = /Up|Down/.test(event.key);
    let index = own.selected < 0 ? Strip.firstAfter(steps, view.from) - (way > 0 ? 1 : 0) : own.selected;
    do index += way;
    while (late && steps[index] && !Strip.isOver(steps[index], sloMs));
    pick(index);
  });
  view.painters.push(draw);
  return h("div", { class: "lane-row" }, h("span", { class: "lane-name", title: node }, node), canvas);
}

function requestsUnderWay(requests, view) {
  const canvas = h("canvas", { class: "gantt", role: "img", "aria-label": "Running requests, one row each" });
  const left = h("p", { class: "note" });
  view.painters.push(() => {
    const { from, to } = view;
    const rows = requests.map((each) => ({ label: "…" + each.id.slice(-6), spans: inLayers(Strip.clipped(each.spans, from, to)) }));
    const seen = rows.filter((row) => row.spans.length), more = seen.length - GANTT_ROWS;
    Strip.gantt(canvas, { rows: seen.slice(0, GANTT_ROWS), from, to, labelWidth: labelWidth() });
    const hidden = `${plural(more, "more request")} with a timeline not drawn here: zoom in to see them`;
    left.textContent = more > 0 ? hidden : "";
  });
  return [canvas, left];
}

function strip() {
  const { since_ms: since, until_ms: until, whole_ms: all } = report.strip_period;
  const shown = names.filter((name) => Object.values(get(report.strip, name)?.nodes ?? {}).some((rows) => rows.length));
  if (!shown.length) return none("No steps: the router kept no step records, or they were not fetched in time.");
  const rows = shown.flatMap((name) => Object.values(report.strip[name].nodes).flat()), sloMs = report.slo.tbt_ms;
  const most = rows.reduce((max, row) => Math.max(max, row[2] + row[3]), 8);
  const late = rows.filter((row) => Strip.isOver(row, sloMs)).reduce((a, b) => (a && a[1] >= b[1] ? a : b), null);
  const hint = "Click a step, or use the arrow keys: up and down stop only at steps over the SLO.";
  const readout = h("p", { class: "readout", role: "status" }, hint), range = h("output", {});
  const slider = h("input", { type: "range", min: "0", max: "1000", "aria-label": "Position in the period" });
  const view = windowOf(since, until, () => {
    slider.value = 1000 * view.place();
    range.textContent = `${figure(view.from / 1000, 4)} s to ${figure(view.to / 1000, 4)} s`;
  });
  slider.addEventListener("input", () => view.slide(slider.value / 1000));
  drawings.push(() => view.move(0));
  const goToWorst = (width) => view.centre(late ? late[0] + late[1] / 2 : since, width);
  after.push(() => goToWorst(Math.max(2000, 40 * sloMs)));
  const button = (sign, label, onclick) =>
    h("button", { type: "button", "aria-label": /^\w/.test(sign) ? null : label, title: label, onclick }, sign);
  const onPick = (node, [start, duration, prompt, decodes, predicted]) => {
    const over = Strip.isOver([start, duration, prompt, decodes], sloMs) ? "; over the TBT SLO" : "";
    const guess = predicted === null || predicted === undefined ? "" : `, predicted ${figure(predicted)} ms`;
    const work = `${plural(prompt, "prompt token")}, ${plural(decodes, "decode")}`;
    readout.textContent = `${node}: ${figure(duration)} ms at ${figure(start / 1000, 5)} s, ${work}${guess}${over}`;
  };
  const one = (name) => {
    const { nodes, requests, seed, num_requests: numKnown } = report.strip[name];
    const lanes = nodesIn(nodes).map(([node, steps]) => lane(node, steps, sloMs, view, most, onPick));
    const of = requests.length < numKnown ? `${whole(requests.length)} of ` : "";
    const known = `seed ${seed}, ${of}${plural(numKnown, "request")} with a timeline`;
    const title = h("h3", {}, armName(name), h("small", {}, known));
    return h("div", { class: "strip-arm" }, title, lanes, requestsUnderWay(requests, view));
  };
  return [
    h("div", { class: "controls" },
      button("←", "Earlier", () => view.move(-0.5)), button("→", "Later", () => view.move(0.5)),
      button("−", "Show a longer time", () => view.zoom(2)), button("+", "Show a shorter time", () => view.zoom(0.5)),
      button("Whole period", "Show the whole period", () => view.show(since, until - since)),
      late ? button("Worst step", "Go to the longest step that decodes waited for", () => goToWorst()) : null,
      slider, range),
    readout,
    shown.map(one),
    key([["prefill", "prompt tokens"], ["decode", "decodes"], ["over", "decodes in a step over the TBT SLO"],
      ["transfer", "KV transfer, not hidden"], ["queue", "waiting"]]),
    h("p", { class: "note" },
      until - since < all ? `Shown: ${figure(since / 1000)} s to ${figure(until / 1000)} s of ${figure(all / 1000)} s,
        where decodes waited longest; report.json has every step. ` : "",
      `Times begin at each run's start, so the same traffic is at the same position in every arm. Heights show tokens on a
        logarithmic scale. The axis below the requests starts at the left edge.`),
  ];
}
