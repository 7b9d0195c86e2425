// One plot over time as SVG: lines or stacked areas, a limit, marks where decisions were made, and a cursor.
// Series differ by colour and by dashes or hatching, so that no one needs to tell colours apart.

import { el, put, say, svg } from "./dom.js";
import { binary, clock, show } from "./units.js";

const HEIGHT = 190;
const MARGIN = { top: 14, right: 10, bottom: 22, left: 62 };
const GAP_POINTS = 4; // so many missing points in a row are a gap and not a line
const MOST_TICKS = 5;

export class Chart {
  // ``series``: [{column, label, look}], look 1 to 5. ``limit``: {column, label}, dashed. ``scale``: linear or log.
  // ``floor``: the least that a linear scale shows. ``cursor``: told where the reader points, ``to(t)``, null
  // for nowhere, or ``by(points)``.
  constructor({ title, unit, series, limit = null, scale = "linear", stacked = false, floor = 0 }, cursor) {
    Object.assign(this, { title, unit, series, limit, scale, stacked, floor, cursor });
    this.width = 300;
    this.svg = svg("svg", { class: "plot", role: "img", tabindex: "0" });
    this.legend = el("ul", { class: "legend" });
    this.entries = [...series, ...(limit ? [{ ...limit, look: "limit" }] : [])].map((one) => this.#entry(one));
    this.node = el("figure", { class: "chart" }, el("figcaption", {}, title), this.svg, this.legend);
    this.#listen();
  }

  // ``data``: {t, columns}; ``from`` and ``to``: wall seconds; ``marks``: [{t, kind, text}]; ``at``: index or null.
  draw({ data, from, to, every, marks, at }) {
    this.last = { data, from, to };
    this.width = Math.max(220, Math.floor(this.node.clientWidth - 2));
    const inside = data.t.map((t, index) => index).filter((index) => data.t[index] >= from && data.t[index] <= to);
    this.indices = inside;
    const x = (t) => MARGIN.left + ((t - from) / (to - from)) * (this.width - MARGIN.left - MARGIN.right);
    const [low, high, ticks] = this.#range(data, inside);
    const y = this.#y(low, high);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    const runs = segments(data.t, inside, GAP_POINTS * every);
    put(
      this.svg,
      ...ticks.map((value) => this.#level(value, y(value))),
      ...this.#times(from, to, x),
      ...marks.filter(({ t }) => t >= from && t <= to).map((mark) => decided(mark, x(mark.t))),
      ...(this.stacked ? this.#areas(data, runs, x, y) : this.#lines(data, runs, x, y)),
      this.limit ? this.#line(data, runs, this.limit.column, "line limit", x, y) : null,
      inside.length ? null : svg("text", { class: "empty", x: this.width / 2, y: HEIGHT / 2 }, "no figures in this time"),
      at === null ? null : svg("line", { class: "cursor-line", x1: x(data.t[at]), x2: x(data.t[at]), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
    );
    this.#tell(data, at ?? inside.at(-1) ?? null, at !== null);
  }

  #entry({ column, label, look }) {
    const value = el("span", { class: "number" });
    const sample = this.stacked && look !== "limit"
      ? [svg("rect", { class: `area look-${look}`, width: 22, height: 10, y: 1 }), hatched({ width: 22, height: 10, y: 1 }, look)]
      : [svg("line", { class: look === "limit" ? "line limit" : `line look-${look}`, x1: 1, x2: 21, y1: 6, y2: 6 })];
    const item = el("li", {}, svg("svg", { class: "sample", width: 22, height: 12, "aria-hidden": "true" }, ...sample.filter(Boolean)), `${label} `, value);
    this.legend.append(item);
    return { column, label, value, item };
  }

  #tell(data, index, isCursor) {
    const told = this.entries.map(({ column, label, value, item }) => {
      const text = show(index === null ? null : data.columns[column][index], this.unit);
      say(value, text);
      // What never occurs, as a format of another engine, needs no line in the legend.
      item.hidden = column === "kv_other_bytes" && !data.columns[column].some((bytes) => bytes > 0);
      return `${label} ${text}`;
    });
    const when = index === null ? "no figures" : isCursor ? `at ${clock(data.t[index])}` : "now";
    this.svg.setAttribute("aria-label", `${this.title}, ${when}: ${told.join(", ")}`);
  }

  #range(data, inside) {
    const names = [...this.series.map(({ column }) => column), ...(this.limit ? [this.limit.column] : [])];
    const known = names.flatMap((name) => inside.map((index) => data.columns[name][index])).filter((value) => value !== null);
    if (this.scale === "log") return logRange(known.filter((value) => value > 0));
    const sums = this.stacked ? inside.map((index) => this.series.reduce((sum, { column }) => sum + (data.columns[column][index] ?? 0), 0)) : [];
    const top = Math.max(this.floor, ...known, ...sums) || 1;
    const factor = this.unit === "bytes" ? binary(top) : 1;
    const step = niceStep(top / factor / (MOST_TICKS - 1)) * factor;
    const whole = this.unit === "count" ? Math.max(1, Math.ceil(step)) : step;
    const count = Math.ceil(top / whole - 1e-9);
    return [0, count * whole, Array.from({ length: count + 1 }, (_, index) => index * whole)];
  }

  #y(low, high) {
    const height = HEIGHT - MARGIN.top - MARGIN.bottom;
    const share = this.scale === "log"
      ? (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low)
      : (value) => (value - low) / (high - low);
    return (value) => HEIGHT - MARGIN.bottom - height * Math.min(1, Math.max(0, share(value)));
  }

  #level(value, y) {
    const label = svg("text", { class: "tick tick-y", x: MARGIN.left - 6, y: y + 4 }, show(value, this.unit));
    return svg("g", {}, svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }), label);
  }

  #times(from, to, x) {
    const most = Math.max(2, Math.floor((this.width - MARGIN.left) / 90));
    const step = [60, 120, 300, 600, 900, 1200, 1800, 3600].find((one) => (to - from) / one <= most) ?? 7200;
    const marks = [];
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const place = x(t);
      if (place < MARGIN.left + 16 || place > this.width - 20) continue;
      marks.push(svg("text", { class: "tick tick-x", x: place, y: HEIGHT - 6 }, clock(t, { minutes: true })));
    }
    return marks;
  }

  #lines(data, runs, x, y) {
    return this.series.map(({ column, look }) => this.#line(data, runs, column, `line look-${look}`, x, y));
  }

  #line(data, runs, column, look, x, y) {
    const values = data.columns[column];
    let path = "";
    for (const run of runs) {
      let pen = "M";
      for (const index of run) {
        if (values[index] === null) {
          pen = "M";
          continue;
        }
        // A lone point is a dot: the ends of lines are round.
        path += pen === "M" ? `M${at(x(data.t[index]), y(values[index]))}h0.01` : `L${at(x(data.t[index]), y(values[index]))}`;
        pen = "L";
      }
    }
    return svg("path", { class: look, d: path || null });
  }

  #areas(data, runs, x, y) {
    const known = (index) => this.series.every(({ column }) => data.columns[column][index] !== null);
    const pieces = runs.flatMap((run) => split(run, known));
    const below = new Float64Array(data.t.length);
    return this.series.flatMap(({ column, look }) => {
      let path = "";
      for (const piece of pieces) {
        const bottom = piece.map((index) => at(x(data.t[index]), y(below[index])));
        for (const index of piece) below[index] += data.columns[column][index];
        const top = piece.map((index) => at(x(data.t[index]), y(below[index])));
        path += `M${bottom.concat(top.reverse()).join("L")}Z`;
      }
      return [svg("path", { class: `area look-${look}`, d: path || null }), hatched({ d: path || null }, look, "path")].filter(Boolean);
    });
  }

  #listen() {
    const near = (event) => {
      if (!this.indices?.length) return;
      const box = this.svg.getBoundingClientRect();
      const { data, from, to } = this.last;
      const place = ((event.clientX - box.left) / box.width) * this.width;
      const t = from + ((place - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * (to - from);
      this.cursor.to(data.t[nearest(data.t, this.indices, t)]);
    };
    this.svg.addEventListener("pointermove", near);
    this.svg.addEventListener("pointerdown", near);
    this.svg.addEventListener("pointerleave", () => this.cursor.to(null));
    this.svg.addEventListener("blur", () => this.cursor.to(null));
    this.svg.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.cursor.to(null);
      if (steps === undefined) return;
      event.preventDefault();
      this.cursor.by(steps * (event.shiftKey ? 10 : 1));
    });
  }
}

const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function hatched(attributes, look, tag = "rect") {
  return look > 1 ? svg(tag, { ...attributes, fill: `url(#hatch-${look})` }) : null;
}

function decided({ kind, text }, x) {
  return svg(
    "g",
    { class: `mark mark-${kind}` },
    svg("title", {}, text),
    svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
    svg("path", { d: `M${x - 5} ${MARGIN.top - 9}h10l-5 9z` }),
  );
}

// Runs of points without a gap between two of them.
function segments(t, indices, gap) {
  const runs = [];
  for (const [place, index] of indices.entries()) {
    if (place === 0 || t[index] - t[indices[place - 1]] > gap) runs.push([]);
    runs.at(-1).push(index);
  }
  return runs;
}

function split(run, isKept) {
  const pieces = [[]];
  for (const index of run) {
    if (isKept(index)) pieces.at(-1).push(index);
    else if (pieces.at(-1).length) pieces.push([]);
  }
  return pieces.filter((piece) => piece.length);
}

function nearest(t, indices, wanted) {
  return indices.reduce((best, index) => (Math.abs(t[index] - wanted) < Math.abs(t[best] - wanted) ? index : best));
}

// 1, 2 or 5 times a power of ten, at least ``least``.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((one) => one * power >= least * (1 - 1e-9)) * power;
}

function logRange(known) {
  if (!known.length) return [0.001, 1, [0.001, 0.01, 0.1, 1]];
  const low = Math.min(...known) / 1.3;
  const high = Math.max(...known) * 1.3;
  const decades = Math.log10(high / low);
  const steps = decades > 2.5 ? [1] : decades > 1 ? [1, 3] : [1, 2, 3, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const one of steps) {
      const value = one * 10 ** power;
      if (value >= low && value <= high) ticks.push(Number(value.toPrecision(3)));
    }
  }
  return [low, high, ticks];
}
