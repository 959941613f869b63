// Charts as inline SVG, drawn for the width there is, so that labels keep their size on a phone.

/**
 * A figure: title, sentence, chart and its numbers, to be read and to be saved.
 * `draw(width)` returns an svg; without it the numbers are the figure. values: one for every row of
 * the numbers. columns: a key of the values, or [name, key or function of a value, format]; an
 * interval is {low, high}. shown: another table to read.
 */
function figure(title, note, { draw = null, columns, values, legend = null, shown = null }) {
  const all = columns.map((column) => [column].flat()), names = all.map(([name]) => name);
  const rows = values.map((value) => all.map(([name, of = name]) => typeof of === "string" ? value[of] : of(value)));
  const numbers = shown ?? table(names, rows.map((row) => row.map((cell, at) => (all[at][2] ?? text)(cell))), title);
  const holder = draw && drawing(draw);
  return el("figure", {}, el("figcaption", {}, el("h3", {}, title), note && el("p", { class: "note" }, note)), legend, holder,
    draw ? el("details", {}, el("summary", {}, "Numbers"), numbers) : numbers, saving(title, holder, names, rows));
}

/** Draws anew whenever the width changes. */
function drawing(draw) {
  const holder = el("div", { class: "chart" });
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== drawn) {
      drawn = width;
      holder.replaceChildren(draw(width));
    }
  }).observe(holder);
  return holder;
}

function legend(entries, mark = (kind) => bar(0, 0, 14, 14, kind), width = 14) {
  return el("ul", { class: "legend" }, entries.map(([kind, text]) => el("li", {},
    svg("svg", { width, height: 14, "aria-hidden": "true" }, mark(kind)), text)));
}

function canvas(width, height, label, ...children) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...children);
}

/** kind: a class of report.css, which also says whether the bar is hatched or dotted. */
function bar(x, y, width, height, kind, title = null) {
  const place = { x, y, width: Math.max(0, width), height: Math.max(0, height) };
  return svg("g", { class: `bar ${kind}` },
    title ? svg("title", {}, title) : null,
    svg("rect", { ...place, class: "ink" }), svg("rect", { ...place, class: "pattern" }));
}

function label(x, y, text, attributes = {}) {
  return svg("text", { x, y, ...attributes }, text);
}

/** Steps of 1, 2 or 5 times a power of ten, about `count` of them from `least` to `most`. */
function ticks(most, count = 4, least = 0) {
  if (!(most > least)) return [least];
  const raw = (most - least) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
  const result = [];
  for (let value = Math.ceil(least / step) * step; value <= most + 0.001 * step; value += step) result.push(Number(value.toPrecision(6)));
  return result;
}

/** Horizontal bars under their labels. rows: {label, parts: [{value, kind, text, title}], text}. */
function barRows(width, rows, most, name, mark = null) {
  const thick = 16, pitch = 46, room = width - 64, nodes = [];
  rows.forEach((row, number) => {
    const top = number * pitch + 4;
    nodes.push(label(0, top + 12, row.label, { class: "strong" }));
    let x = 0;
    for (const part of row.parts) {
      const length = (part.value / most) * room;
      nodes.push(bar(x, top + 18, length - (row.parts.length > 1 ? 1 : 0), thick, part.kind, part.title));
      if (part.text && length > 7 * part.text.length + 8) {
        nodes.push(label(x + length / 2, top + 30, part.text, { class: "on", "text-anchor": "middle" }));
      }
      x += length;
    }
    nodes.push(label(x + 6, top + 30.5, row.text));
  });
  const height = rows.length * pitch + 2;
  if (mark !== null) {
    const x = (mark / most) * room;
    nodes.push(svg("line", { class: "mark", x1: x, x2: x, y1: 0, y2: height }));
  }
  return canvas(width, height, name, nodes);
}

/** Scores as dots with intervals. rows: {label, value, interval, kind, text}. */
function intervals(width, rows, low, high, name) {
  const pitch = 42, left = 8, room = width - 16, bottom = rows.length * pitch + 4;
  const at = (value) => left + ((value - low) / (high - low || 1)) * room;
  const nodes = ticks(high - low).map((step) => svg("g", { class: "axis" },
    svg("line", { x1: at(low + step), x2: at(low + step), y1: 0, y2: bottom }),
    label(at(low + step), bottom + 14, short(low + step), { "text-anchor": "middle" })));
  rows.forEach((row, number) => {
    const y = number * pitch + 28;
    nodes.push(label(left, y - 13, row.label, { class: "strong" }),
      label(width - 8, y - 13, row.text, { "text-anchor": "end" }));
    if (row.interval) {
      nodes.push(svg("line", { class: `whisker ${row.kind}`, x1: at(row.interval.low), x2: at(row.interval.high), y1: y, y2: y }));
    }
    nodes.push(svg("circle", { class: `dot ${row.kind}`, cx: at(row.value), cy: y, r: 5 }));
  });
  return canvas(width, bottom + 20, name, nodes);
}

/**
 * The frame of a drawing: the places of its scales, and the nodes of their names and of the grid.
 * y: {name, from, to, format}. `below(x, text)`: a label on the x axis.
 */
function frame(width, high, xName, y) {
  const left = 46, top = 26, room = width - left - 12, deep = high - top - 36;
  const atY = (value) => top + deep - ((value - y.from) / (y.to - y.from)) * deep;
  const below = (x, text) => label(x, high - 21, text, { "text-anchor": "middle" });
  const nodes = ticks(y.to, 4, y.from).map((tick) => svg("g", { class: "axis" },
    svg("line", { x1: left, x2: left + room, y1: atY(tick), y2: atY(tick) }),
    label(left - 6, atY(tick) + 4, y.format(tick), { "text-anchor": "end" })));
  nodes.push(label(left + room / 2, high - 4, xName, { "text-anchor": "middle" }), label(0, 9, y.name));
  return { left, top, room, deep, atY, below, nodes };
}

/**
 * Columns. groups: one per category, {label, columns: [[{value, kind, title}, ...stacked], ...]}.
 * x: {name, end}; with an end the x axis is a scale from 0 to it. y: {name, to, format}. dots: per
 * category, values joined by a line; line: a mark at a share of the x axis.
 */
function columns(width, groups, x, y, name, { dots = [], line = null, high = 230 } = {}) {
  const { left, top, room, deep, atY, below, nodes } = frame(width, high, x.name, { from: 0, ...y });
  const step = room / groups.length, every = Math.max(1, Math.ceil((groups.length * 22) / room));
  groups.forEach((group, number) => {
    const gap = Math.min(step * 0.2, 8);
    const thick = (step - gap) / group.columns.length;
    group.columns.forEach((parts, column) => {
      let base = 0;
      for (const part of parts) {
        nodes.push(bar(left + number * step + gap / 2 + column * thick, atY(base + part.value),
          thick - 1, atY(base) - atY(base + part.value), part.kind, part.title));
        base += part.value;
      }
    });
    if (number % every === 0 && !x.end) nodes.push(below(left + (number + 0.5) * step, group.label));
  });
  if (x.end) nodes.push(ticks(x.end, 5).map((tick) => below(left + (tick / x.end) * room, String(tick))));
  const points = dots.map((value, number) => [left + (number + 0.5) * step, atY(value)]);
  if (points.length) {
    nodes.push(svg("polyline", { class: "curve", points: points.map((point) => point.join(",")).join(" ") }),
      points.map(([cx, cy]) => svg("circle", { class: "curve-dot", cx, cy, r: 3 })));
  }
  if (line) {
    const at = left + line.at * room, flip = line.at > 0.7;
    nodes.push(svg("line", { class: "mark", x1: at, x2: at, y1: top - 4, y2: top + deep }),
      label(at + (flip ? -5 : 5), top + 5, line.text, { class: "strong", "text-anchor": flip ? "end" : "start" }));
  }
  return canvas(width, high, name, nodes);
}

function ends(interval) {
  return interval ? [interval.low, interval.high] : [];
}

/** A scale from zero, or from the least value, with some room beyond. */
function range(values, isFromZero = true) {
  const low = isFromZero ? 0 : Math.min(...values), high = Math.max(...values), room = 0.08 * (high - low || 1);
  return { from: isFromZero ? 0 : low - room, to: high + room };
}

/**
 * Points over two scales. series: {kind, isJoined, points: [{x, y, text, title, across, along}]};
 * across, along: intervals in x and in y. x, y: {name, from, to, format, marks}; level: a height that
 * is marked; steps: corners of a line of its own.
 */
function scatter(width, series, x, y, name, { level = null, steps = [] } = {}) {
  const high = 300, { left, room, atY, below, nodes } = frame(width, high, x.name, y);
  const atX = (value) => left + ((value - x.from) / (x.to - x.from)) * room;
  const path = (points) => points.map((point) => `${atX(point.x)},${atY(point.y)}`).join(" ");
  const whisker = (kind, [x1, x2, y1, y2]) => svg("line", { class: `whisker thin ${kind}`, x1, x2, y1, y2 });
  nodes.push((x.marks ?? ticks(x.to, 5, x.from)).map((tick) => below(atX(tick), x.format(tick))));
  if (level !== null) nodes.push(svg("line", { class: "mark", x1: left, x2: left + room, y1: atY(level), y2: atY(level) }));
  if (steps.length) nodes.push(svg("polyline", { class: "curve", points: path(steps) }));
  for (const { kind, isJoined, points } of series) {
    if (isJoined) nodes.push(svg("polyline", { class: `join ${kind}`, points: path(points) }));
    for (const point of points) {
      const [cx, cy] = [atX(point.x), atY(point.y)];
      if (point.across) nodes.push(whisker(kind, [atX(point.across.low), atX(point.across.high), cy, cy]));
      if (point.along) nodes.push(whisker(kind, [cx, cx, atY(point.along.low), atY(point.along.high)]));
      nodes.push(svg("circle", { class: `dot ${kind}`, cx, cy, r: 5 }, svg("title", {}, point.title)));
      if (point.text) nodes.push(label(cx + 7, cy - 6, point.text, { class: "strong" }));
    }
  }
  return canvas(width, high, name, nodes);
}
