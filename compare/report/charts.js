/* Charts of curves, drawn with uPlot. The page's colours are read at every redraw, because the theme may change. */

const DASHES = [[], [7, 3], [2, 3]]; // as in the legend: solid, dashed, dotted
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const lineOf = (index) =>
  ({ stroke: colour("arm-" + (index % 6)), width: 2, dash: DASHES[index % 3], points: { show: false } });
const together = (curves, key) => [...new Set(curves.flatMap((curve) => curve[key]))].sort((a, b) => a - b);

/* Draw `data`. `options` returns {height, scales, x, series, bands, draw, pointed(index or null, data)}. */
function plot(host, data, options) {
  let chart = null;
  const axis = (own) => {
    const line = { stroke: colour("line"), width: 1 };
    return { stroke: colour("muted"), grid: line, ticks: line, font: "11px system-ui, sans-serif", ...own };
  };
  const shares = { size: 46, values: (_, all) => all.map((share) => Math.round(share * 100) + "%") };
  const draw = () => {
    chart?.destroy();
    const { height = 240, scales, x, y = shares, series, bands, draw: painted, pointed } = options();
    const hooks = { draw: [painted], setCursor: [({ cursor, data: rows }) => pointed(cursor.idx ?? null, rows)] };
    chart = new uPlot({
      width: Math.max(200, host.clientWidth), height, legend: { show: false },
      cursor: { y: false, points: { show: false } }, scales, axes: [axis({ size: 34, ...x }), axis(y)],
      series: [{}, ...series], bands: bands ?? [], hooks,
    }, data, host);
  };
  drawings.push(draw);
}

/* Draw a dashed line across the plot at `value` of an axis, with its label. */
function rule(chart, axis, value, label) {
  const { ctx: pen, bbox: { left, top, width, height } } = chart, unit = devicePixelRatio;
  const at = Math.round(chart.valToPos(value, axis, true)), gap = 4 * unit;
  pen.save();
  pen.strokeStyle = pen.fillStyle = colour("over");
  pen.lineWidth = unit;
  pen.setLineDash([4 * unit, 3 * unit]);
  pen.beginPath();
  pen.moveTo(axis === "x" ? at : left, axis === "x" ? top : at);
  pen.lineTo(axis === "x" ? at : left + width, axis === "x" ? top + height : at);
  pen.stroke();
  pen.font = `${11 * unit}px system-ui, sans-serif`;
  pen.textAlign = "left";
  pen.textBaseline = "bottom";
  const wide = pen.measureText(label).width, fits = at + gap + wide < left + width;
  if (axis === "x") pen.fillText(label, fits ? at + gap : at - gap - wide, top + height - gap);
  else pen.fillText(label, left + width - wide - gap, at - 2);
  pen.restore();
}

/* Return ticks of a logarithmic axis at 1, 2 and 5 times the powers of ten, or only at the powers if there are many. */
function logTicks(low, high) {
  const ticks = [], steps = Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    ticks.push(...steps.map((step) => step * 10 ** power).filter((tick) => tick >= low && tick <= high));
  return ticks;
}

/* Return a step curve's height at each of `xs`. It is 0 before the first point. Points and `xs` are sorted. */
function stepsAt(xs, curve) {
  let next = 0;
  return xs.map((x) => {
    while (next < curve.x.length && curve.x[next] <= x) next++;
    return next ? curve.y[next - 1] : 0;
  });
}

/* Draw empirical distributions over log x. curves = [{index, name, x, y}]; if `sloMs` is null, draw no SLO line. */
function ecdf(host, curves, sloMs, pointed) {
  const xs = together(curves, "x"), last = xs[xs.length - 1];
  const least = Math.min(0.1, last / 10); // a logarithmic axis cannot show the gaps of 0 ms between tokens of one read
  const low = Math.max(least, Math.min(xs[0], sloMs ?? xs[0]) * 0.9), high = Math.max(last, sloMs ?? 0) * 1.15;
  const time = (ms) => (ms >= 1000 ? `${+(ms / 1000).toPrecision(3)} s` : `${+ms.toPrecision(3)} ms`);
  plot(host, [xs, ...curves.map((curve) => stepsAt(xs, curve))], () => ({
    scales: { x: { time: false, distr: 3, log: 10, range: [low, high] }, y: { range: [0, 1.01] } },
    x: { splits: () => logTicks(low, high), filter: (_, all) => all, values: (_, all) => all.map(time) },
    series: curves.map((curve) => ({ ...lineOf(curve.index), paths: uPlot.paths.stepped({ align: 1 }) })),
    draw: (chart) => { if (sloMs !== null) rule(chart, "x", sloMs, `SLO ${time(sloMs)}`); },
    pointed: (at, rows) => (at === null ? pointed(null) : pointed(xs[at], rows.slice(1).map((row) => row[at]))),
  }));
}

/* Draw attainment against rate, with a band per curve. curves = [{index, name, rate, share, low, high}]. */
function against(host, curves, wanted, pointed) {
  const xs = together(curves, "rate"), last = xs[xs.length - 1];
  const at = (curve, key) => xs.map((x) => curve[key][curve.rate.indexOf(x)] ?? null);
  const data = [xs, ...curves.flatMap((curve) => [at(curve, "share"), at(curve, "high"), at(curve, "low")])];
  const edge = { width: 0, points: { show: false }, spanGaps: true };
  const line = ({ index }) => ({ ...lineOf(index), points: { show: true, size: 6 }, spanGaps: true });
  const band = ({ index }, i) => ({ series: [3 * i + 2, 3 * i + 3], fill: colour("arm-" + (index % 6)) + "2e" });
  plot(host, data, () => ({
    height: 280,
    scales: { x: { time: false, range: [xs[0] * 0.95, last * 1.05] }, y: { range: [0, 1.05] } },
    x: { values: (_, all) => all.map((rate) => `${+rate.toPrecision(4)}/s`) },
    series: curves.flatMap((curve) => [line(curve), edge, edge]),
    bands: curves.map(band),
    draw: (chart) => rule(chart, "y", wanted, `target ${+(100 * wanted).toPrecision(3)}%`),
    pointed: (i, rows) => (i === null ? pointed(null) : pointed(xs[i], curves.map((_, number) => rows[3 * number + 1][i]))),
  }));
}

/* Draw tokens/s per device against tokens/s per user, a point per rate. curves = [{index, name, per_user, per_device}]. */
function tradeOff(host, curves, pointed) {
  const xs = together(curves, "per_user"), at = (curve) => xs.map((x) => curve.per_device[curve.per_user.indexOf(x)] ?? null);
  const most = Math.max(...curves.flatMap((curve) => curve.per_device)), short = (value) => +value.toPrecision(4);
  plot(host, [xs, ...curves.map(at)], () => ({
    height: 280,
    scales: { x: { time: false, range: [xs[0] * 0.95, xs[xs.length - 1] * 1.05] }, y: { range: [0, most * 1.1] } },
    x: { values: (_, all) => all.map(short) },
    y: { size: 60, values: (_, all) => all.map(short) },
    series: curves.map(({ index }) => ({ ...lineOf(index), points: { show: true, size: 6 }, spanGaps: true })),
    draw: () => {},
    pointed: (i, rows) => (i === null ? pointed(null) : pointed(xs[i], rows.slice(1).map((row) => row[i]))),
  }));
}
