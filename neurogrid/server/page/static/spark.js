// Small pictures of the last figures.

import { svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;

/** A line through `values`, over its area, in an SVG that has a path for each. */
export function drawLine(element, values) {
  const [area, line] = element.querySelectorAll("path");
  const most = Math.max(...values, 1);
  const points = values.map((value, index) => {
    const x = (index / Math.max(values.length - 1, 1)) * WIDTH;
    const y = HEIGHT - 2 - (value / most) * (HEIGHT - 4);
    return `${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  const path = points.length ? `M${points.join("L")}` : "";
  line.setAttribute("d", path);
  area.setAttribute("d", path && `${path}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z`);
}

/** A bar for each of `values`, the last on the right. */
export function drawBars(element, values, most = 24) {
  const shown = values.slice(-most);
  const highest = Math.max(...shown, 1e-9);
  const step = WIDTH / most;
  const bars = shown.map((value, index) => {
    const height = Math.max((value / highest) * (HEIGHT - 4), 2);
    const x = WIDTH - (shown.length - index) * step + 0.75;
    return svg("rect", { x, y: HEIGHT - height, width: step - 1.5, height, rx: 0.75 });
  });
  element.replaceChildren(...bars);
}
