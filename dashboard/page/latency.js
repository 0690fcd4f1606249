/* TTFT, TBT and TTST with their SLOs: p50 and p99 of the last minute, as numbers and as charts. */
import { term } from "./terms.js";
import { make, ms, number, say } from "./text.js";

const KINDS = [
  ["ttft_ms", "TTFT", "time to first token"],
  ["tbt_ms", "TBT", "time between tokens"],
  ["ttst_ms", "TTST", "first to second token"],
];
const SECONDS = 60;

export class Latency {
  constructor(place) {
    this.place = place;
    this.panels = KINDS.map(([key, short, long]) => {
      const p50 = make("b"), p99 = make("b"), note = make("p", { class: "note" }), chart = make("div", { class: "chart", role: "img" });
      const values = make("span", {}, p50, " p50\u2003", p99, " p99");
      place.append(make("div", { class: "latency" }, make("h3", {}, term(key.slice(0, -3), short), make("span", {}, ` ${long}`)),
        make("p", {}, values), note, chart));
      return { key, short, p50, p99, values, note, chart, points: [], plot: null };
    });
    new ResizeObserver(() => this.rebuild()).observe(place);
  }

  /* Adds a point with the `latency` of the status and this browser's time. */
  add(latency) {
    for (const panel of this.panels) {
      const { p50 = null, p99 = null, n = 0 } = latency?.[panel.key] ?? {};
      const slo = latency?.slo?.[panel.key] || null, over = slo !== null && p99 !== null && p99 > slo;
      panel.points.push([Date.now() / 1000, p50, p99, slo]);
      if (panel.points.length > SECONDS) panel.points.shift();
      say(panel.p50, `${ms(p50)} ms`);
      say(panel.p99, `${ms(p99)} ms`);
      panel.values.hidden = !n;
      panel.chart.classList.toggle("empty", panel.points.every(([, , worst]) => worst === null));
      panel.p99.className = over ? "bad" : "";
      const limit = slo ? `SLO of ${ms(slo)} ms` : "";
      say(panel.note, n ? `${limit && `${over ? "over" : "within"} the ${limit}; `}${number(n)} samples`
        : `No samples${limit && `; ${limit}`}`);
      panel.chart.setAttribute("aria-label", `${panel.short} of the last minute: ${n ? `p50 ${ms(p50)}, p99 ${ms(p99)} ms` : "no samples"}`);
      panel.plot?.setData(columns(panel.points));
    }
  }

  /* Draws the charts again after the theme or the width has changed. */
  rebuild() {
    for (const panel of this.panels) {
      panel.plot?.destroy();
      panel.plot = new uPlot(options(panel.chart), columns(panel.points), panel.chart);
    }
  }
}

const columns = (points) => [0, 1, 2, 3].map((index) => points.map((point) => point[index]));

function options(chart) {
  const { decode, over, line } = Strip.coloursOf(chart);
  const soft = getComputedStyle(chart).getPropertyValue("--soft").trim();
  const axis = { stroke: soft, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const now = () => Date.now() / 1000;
  return {
    width: chart.clientWidth, height: 78, padding: [6, 4, 6, 0], legend: { show: false }, cursor: { show: false },
    scales: { x: { range: () => [now() - SECONDS, now()] }, y: { range: (_, __, most) => [0, (most || 1) * 1.08] } },
    axes: [{ ...axis, show: false }, { ...axis, size: 66, space: 26, values: (_, marks) => marks.map((mark) => `${mark.toLocaleString("en")} ms`) }],
    series: [
      {},
      { stroke: soft, width: 1.5, points: { show: false } },
      { stroke: decode, width: 1.5, points: { show: false } },
      { stroke: over, width: 1, dash: [4, 4], points: { show: false } },
    ],
  };
}
