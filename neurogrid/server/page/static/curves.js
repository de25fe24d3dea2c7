// Curves over steps or time, drawn to the pixel, read by pointer and by arrow keys.

import { setAttributes, svg } from "./dom.js";

const LEFT = 46;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 26;
// Drawn each time that one comes; and what is beyond some hundred thousand no browser takes as arguments of a function.
const MAX_LINES = 4096;

/** Round numbers between two ends, about so many. */
export function ticks(low, high, about) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

/** Lines that grow for as long as the page is open, bounded as the server bounds them: of the older half each second goes. */
export function thinned(lines, most = MAX_LINES) {
  if (lines.length <= most) return lines;
  const half = Math.floor(lines.length / 2);
  return thinned([...lines.slice(0, half).filter((_, index) => index % 2 === 0), ...lines.slice(half)], most);
}

/** Means over as many points before as after, fewer at the ends: they lag behind nothing. */
export function smooth(points, reach = 5) {
  return points.map(([x], index) => {
    const near = Math.min(reach, index, points.length - 1 - index);
    const around = points.slice(index - near, index + near + 1);
    return [x, around.reduce((sum, [, y]) => sum + y, 0) / around.length];
  });
}

export class Curves {
  /** `say(x, values)` is told what is pointed at: the values by series, and nothing when nothing is. */
  constructor(element, say) {
    this.element = element;
    this.say = say;
    this.series = [];
    this.at = null;
    this.xName = String;
    this.yName = String;
    new ResizeObserver(() => this.draw()).observe(element);
    element.addEventListener("pointermove", (event) => this.point(event.offsetX));
    element.addEventListener("pointerdown", (event) => this.point(event.offsetX));
    element.addEventListener("pointerleave", () => this.read(null));
    element.addEventListener("blur", () => this.read(null));
    element.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** `series`: name, points as [x, y] by rising x, and whether it is drawn as dots, or faint. */
  update(series, xName, yName) {
    this.series = series.filter((one) => one.points.length);
    this.xName = xName;
    this.yName = yName;
    if (this.at !== null) this.at = Math.min(this.at, this.places().length - 1);
    this.draw();
  }

  places() {
    return [...new Set(this.series.flatMap((one) => one.points.map(([x]) => x)))].sort((one, other) => one - other);
  }

  draw() {
    const width = this.element.clientWidth;
    const height = this.element.clientHeight;
    if (!width || !height) return;
    setAttributes(this.element, { viewBox: `0 0 ${width} ${height}` });
    const all = this.series.flatMap((one) => one.points);
    if (!all.length) {
      this.element.replaceChildren(svg("text", { class: "chart-empty", x: width / 2, y: height / 2 }, "No round yet"));
      return;
    }
    const xs = all.map(([x]) => x);
    const ys = all.map(([, y]) => y);
    let [lowX, highX, lowY, highY] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    if (lowX === highX) [lowX, highX] = [lowX - 1, highX + 1];
    const air = (highY - lowY) * 0.06 || Math.abs(highY) * 0.05 || 1;
    [lowY, highY] = [lowY - air, highY + air];
    this.toX = (x) => LEFT + ((x - lowX) / (highX - lowX)) * (width - LEFT - RIGHT);
    this.toY = (y) => height - BOTTOM - ((y - lowY) / (highY - lowY)) * (height - TOP - BOTTOM);
    const parts = [];
    for (const y of ticks(lowY, highY, 4)) {
      parts.push(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: this.toY(y), y2: this.toY(y) }));
      parts.push(svg("text", { class: "tick is-y", x: LEFT - 8, y: this.toY(y) + 4 }, this.yName(y)));
    }
    for (const x of ticks(lowX, highX, Math.max(3, Math.floor(width / 110)))) {
      parts.push(svg("text", { class: "tick", x: this.toX(x), y: height - 7 }, this.xName(x)));
    }
    for (const one of this.series) {
      const places = one.points.map(([x, y]) => `${this.toX(x).toFixed(1)} ${this.toY(y).toFixed(1)}`);
      if (places.length > 1) parts.push(svg("path", { class: `curve ${one.className}`, d: `M${places.join("L")}` }));
      if (one.hasDots || places.length === 1) {
        for (const [x, y] of one.points) parts.push(svg("circle", { class: `point ${one.className}`, cx: this.toX(x), cy: this.toY(y), r: 2.6 }));
      }
    }
    this.cursor = svg("g", { class: "cursor" });
    this.element.replaceChildren(...parts, this.cursor);
    this.read(this.at);
  }

  point(offsetX) {
    const places = this.places();
    if (!places.length || !this.toX) return;
    let nearest = 0;
    places.forEach((x, index) => {
      if (Math.abs(this.toX(x) - offsetX) < Math.abs(this.toX(places[nearest]) - offsetX)) nearest = index;
    });
    this.read(nearest);
  }

  onKey(event) {
    const last = this.places().length - 1;
    if (last < 0) return;
    const from = this.at ?? last;
    const next = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.read(Math.min(Math.max(next, 0), last));
  }

  read(at) {
    this.at = at;
    if (!this.cursor) return;
    if (at === null) {
      this.cursor.replaceChildren();
      this.say(null, []);
      return;
    }
    const x = this.places()[at];
    const here = this.series.flatMap((one) => {
      const found = one.points.find(([place]) => place === x);
      return found ? [{ ...one, value: found[1] }] : [];
    });
    const height = this.element.clientHeight;
    this.cursor.replaceChildren(
      svg("line", { class: "cursor-line", x1: this.toX(x), x2: this.toX(x), y1: TOP, y2: height - BOTTOM }),
      ...here.map((one) => svg("circle", { class: `point ${one.className}`, cx: this.toX(x), cy: this.toY(one.value), r: 4 })),
    );
    this.say(x, here);
  }
}
