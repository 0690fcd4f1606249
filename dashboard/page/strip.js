/* The strip (forward passes on a time axis) and the Gantt chart of requests, on a canvas. It is a plain script
   without dependencies, so that a report can inline it. It keeps no state.

   A pass is [start_ms, duration_ms, prefill_tokens, num_decodes, …]; passes are sorted by start.
   view = {passes, from, to (ms), sloMs (0: none), maxTokens (0: that of the view), selected (index or -1)}.
   A span is {kind: "queued|chunk|transfer|wait|decode", node, start_ms, end_ms, tokens, cause}.
   chart = {rows: [{label, spans}], from, to (ms), labelWidth (px)}.
   Colours are CSS custom properties of the canvas (--prefill …), or the defaults below (Okabe and Ito's palette for
   colour-blind people). */
"use strict";

const Strip = (() => {
  const COLOURS = {
    prefill: "#e69f00", decode: "#0072b2", over: "#c1121f", transfer: "#009e73", queued: "#8a8f98",
    wait: "#8a8f98", ink: "#1d2126", line: "#d5d9de", "wait-behind": "#e69f00", "wait-transfer": "#009e73",
    "wait-room": "#b0568f",
  };
  const ROW_PX = 22, TRANSFERS = "KV transfer";

  function coloursOf(element) {
    const style = getComputedStyle(element);
    const read = (name) => style.getPropertyValue("--" + name).trim() || COLOURS[name];
    return Object.fromEntries(Object.keys(COLOURS).map((name) => [name, read(name)]));
  }

  /* Sizes the canvas for the screen's pixels, and clears it. Returns {context, width, height} in CSS pixels. */
  function blank(canvas, height = canvas.clientHeight) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return { context, width, height };
  }

  /* Returns the index of the first pass that ends after `time`, by binary search: passes do not overlap. */
  function firstAfter(passes, time) {
    let low = 0, high = passes.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (passes[middle][0] + passes[middle][1] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  const isOver = (pass, sloMs) => sloMs > 0 && pass[3] > 0 && pass[1] > sloMs;

  /* Returns columns at least one pixel wide. Passes that share a pixel become one column, as high as the highest. */
  function columnsOf(view, width) {
    const { passes, from, to, sloMs = 0 } = view, scale = width / (to - from), columns = [];
    let last = null;
    for (let index = firstAfter(passes, from); index < passes.length && passes[index][0] < to; index++) {
      const pass = passes[index], left = Math.floor((pass[0] - from) * scale);
      const right = Math.max(left + 1, Math.floor((pass[0] + pass[1] - from) * scale));
      const over = isOver(pass, sloMs);
      if (last && left < last.right && right - left === 1) {
        last.prefill = Math.max(last.prefill, pass[2]);
        last.decodes = Math.max(last.decodes, pass[3]);
        last.over ||= over;
      } else {
        last = { left: Math.max(left, last ? last.right : -1), right, prefill: pass[2], decodes: pass[3], over };
        last.right = Math.max(last.left + 1, right);
        columns.push(last);
      }
    }
    return columns;
  }

  /* Draws one lane. The height is the logarithm of the tokens, with the prompt chunk above the decodes. Decodes that
     took longer than the SLO are red, with a tick at the top edge. Returns the number of passes in view. */
  function draw(canvas, view) {
    const { context, width, height } = blank(canvas), colours = coloursOf(canvas);
    const columns = columnsOf(view, width);
    const most = view.maxTokens || columns.reduce((max, each) => Math.max(max, each.prefill + each.decodes), 8);
    const high = (tokens) => (Math.log2(1 + tokens) / Math.log2(1 + most)) * (height - 6);
    const paint = (colour, box) => {
      context.fillStyle = colour;
      context.beginPath();
      for (const each of columns) box(each);
      context.fill();
    };
    const decodes = (wanted) => (each) => {
      if (each.decodes && each.over === wanted) bar(context, each, height - high(each.decodes), height);
    };
    context.fillStyle = colours.line;
    context.fillRect(0, height - 1, width, 1);
    paint(colours.decode, decodes(false));
    paint(colours.over, decodes(true));
    paint(colours.prefill, (each) => {
      const below = each.decodes ? high(each.decodes) : 0;
      if (each.prefill) bar(context, each, height - Math.max(high(each.prefill + each.decodes), below + 2), height - below);
    });
    paint(colours.over, (each) => { if (each.over) bar(context, each, 0, 3); });
    const selected = view.passes[view.selected];
    if (selected) {
      const left = ((selected[0] - view.from) / (view.to - view.from)) * width;
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.strokeRect(left - 1, 1, Math.max(3, (selected[1] / (view.to - view.from)) * width + 2), height - 2);
    }
    const first = firstAfter(view.passes, view.from);
    return firstAfter(view.passes, view.to) - first;
  }

  function bar(context, column, top, bottom) {
    const width = column.right - column.left; // wide columns are separated by a gap
    context.rect(column.left, top, width > 3 ? width - 1 : width, bottom - top);
  }

  /* Returns the index of the pass at `x` CSS pixels of a lane `width` wide, or of the nearest pass within 6 px,
     or -1. */
  function passAt(view, x, width) {
    const scale = width / (view.to - view.from), time = view.from + x / scale;
    const index = firstAfter(view.passes, time);
    let best = -1, reach = 6;
    for (const near of [index - 1, index]) {
      const pass = view.passes[near];
      if (!pass || pass[0] > view.to || pass[0] + pass[1] < view.from) continue;
      const away = Math.max(0, pass[0] - time, time - pass[0] - pass[1]) * scale;
      if (away < reach) [best, reach] = [near, away];
    }
    return best;
  }

  const colourOfSpan = (span, colours) => ({
    queued: colours.queued, chunk: colours.prefill, transfer: colours.transfer, decode: colours.decode,
  })[span.kind] || waitColour(span.cause || "", colours);

  function waitColour(cause, colours) {
    if (/behind|chunk/.test(cause)) return colours["wait-behind"];
    if (/transfer/.test(cause)) return colours["wait-transfer"];
    if (/room|block|preempt/.test(cause)) return colours["wait-room"];
    return colours.wait;
  }

  /* Returns a row of spans for each node, and one for KV transfers, in the order in which they begin. */
  function rowsOf(spans) {
    const rows = new Map();
    for (const span of [...spans].sort((a, b) => a.start_ms - b.start_ms)) {
      const label = span.kind === "transfer" ? TRANSFERS : span.node || "router";
      if (!rows.has(label)) rows.set(label, []);
      rows.get(label).push(span);
    }
    const list = [...rows].map(([label, own]) => ({ label, spans: own }));
    const moved = list.findIndex((row) => row.label === TRANSFERS);
    if (moved < 0) return list;
    const [row] = list.splice(moved, 1), from = list.findIndex((each) => each.label === row.spans[0].node);
    list.splice(from + 1, 0, row); // below the sender
    return list;
  }

  const ganttHeight = (chart) => chart.rows.length * ROW_PX + 18;

  /* Draws rows of spans and a time axis. Gaps (queued, wait) are hatched and thinner. Sets the canvas's height. */
  function gantt(canvas, chart) {
    canvas.style.height = ganttHeight(chart) + "px";
    const { context, width, height } = blank(canvas, ganttHeight(chart)), colours = coloursOf(canvas);
    const left = chart.labelWidth ?? 84, scale = (width - left) / (chart.to - chart.from || 1);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    chart.rows.forEach((row, number) => {
      const top = number * ROW_PX;
      context.fillStyle = colours.ink;
      context.fillText(row.label, 0, top + ROW_PX / 2, left - 6);
      context.fillStyle = colours.line;
      context.fillRect(left, top + ROW_PX - 1, width - left, 1);
      for (const span of row.spans) {
        const x = left + (span.start_ms - chart.from) * scale;
        const wide = Math.max(1, (span.end_ms - span.start_ms) * scale);
        const gap = span.kind === "queued" || span.kind === "wait";
        context.fillStyle = gap ? hatch(context, colourOfSpan(span, colours)) : colourOfSpan(span, colours);
        const box = [x, top + (gap ? 5 : 2), wide > 4 ? wide - 1 : wide, ROW_PX - (gap ? 11 : 5)];
        if (gap) context.clearRect(box[0], top + 2, box[2], ROW_PX - 5); // a gap may lie within a span of work
        context.fillRect(...box);
      }
    });
    axis(context, { left, width, height, span: chart.to - chart.from, colours });
  }

  function hatch(context, colour) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 4;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour;
    for (let step = 0; step < 4; step++) pen.fillRect(step, 3 - step, 1, 1);
    pen.globalAlpha = 0.25;
    pen.fillRect(0, 0, 4, 4);
    return context.createPattern(tile, "repeat");
  }

  function axis(context, { left, width, height, span, colours }) {
    const step = [1, 2, 5].flatMap((n) => [n * 0.1, n, n * 10, n * 100, n * 1e3, n * 1e4, n * 1e5])
      .sort((a, b) => a - b).find((each) => (each / span) * (width - left) > 60) || span || 1;
    context.fillStyle = colours.ink;
    for (let time = 0; time <= span; time += step) {
      const x = left + (time / (span || 1)) * (width - left);
      const text = step >= 1000 ? `${Math.round(time / 100) / 10} s` : `${Math.round(time * 10) / 10} ms`;
      if (x + context.measureText(text).width > width) break; // no room for this label
      context.fillText(text, x, height - 7);
    }
  }

  /* Returns the span at (x, y) CSS pixels of a Gantt chart `width` wide, or null. */
  function spanAt(chart, x, y, width) {
    const row = chart.rows[Math.floor(y / ROW_PX)], left = chart.labelWidth ?? 84;
    const scale = (width - left) / (chart.to - chart.from || 1), time = chart.from + (x - left) / scale;
    return row?.spans.find((span) => span.start_ms - 1 / scale <= time && time <= span.end_ms + 1 / scale) || null;
  }

  /* Returns the parts of spans between two times. */
  const clipped = (spans, from, to) => spans.filter((span) => span.end_ms > from && span.start_ms < to)
    .map((span) => ({ ...span, start_ms: Math.max(from, span.start_ms), end_ms: Math.min(to, span.end_ms) }));

  return { draw, passAt, firstAfter, isOver, gantt, rowsOf, clipped, spanAt, coloursOf };
})();
