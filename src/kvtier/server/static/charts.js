// Charts in SVG, drawn in real pixels so that text and lines have the same size on every screen.

class Plot {
  constructor(svg, { left = 38, right = 6, top = 8, bottom = 20 } = {}) {
    this.svg = svg;
    this.width = Math.max(160, svg.clientWidth || 320);
    this.height = Math.max(18, svg.clientHeight || 190);
    this.left = left;
    this.right = this.width - right;
    this.top = top;
    this.bottom = this.height - bottom;
    this.shapes = [];
  }

  /** Map [0, 1] to pixels. */
  x = (share) => this.left + share * (this.right - this.left);
  y = (share) => this.bottom - share * (this.bottom - this.top);

  add(name, attributes, ...children) {
    this.shapes.push(shape(name, attributes, ...children));
  }

  /** Add horizontal grid lines with labels; `ticks` is a list of [share, text]. */
  rows(ticks) {
    for (const [share, text] of ticks) {
      const y = Math.round(this.y(share)) + 0.5;
      this.add("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y });
      this.add("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, text);
    }
  }

  columns(ticks) {
    for (const [share, text] of ticks) {
      const anchor = share < 0.03 ? "start" : share > 0.97 ? "end" : "middle";
      this.add("text", { x: this.x(share), y: this.height - 4, "text-anchor": anchor }, text);
    }
  }

  /** Add a time axis whose right end is labelled "now". */
  times(from, to) {
    const most = this.width > 380 ? 5 : 3;
    const step = [5, 10, 15, 30, 60, 120, 300, 600, 1200].find((each) => (to - from) / each <= most);
    const ticks = [[1, "now"]];
    for (let ago = step; ago <= to - from; ago += step) ticks.push([1 - ago / (to - from), `−${span(ago)}`]);
    this.columns(ticks);
  }

  /** Add a line through points [x, y], both in [0, 1]. A null among the points breaks the line. */
  line(points, attributes) {
    let path = "";
    let pen = "M";
    for (const point of points) {
      if (point === null) { pen = "M"; continue; }
      path += `${pen}${this.x(point[0]).toFixed(1)} ${this.y(point[1]).toFixed(1)}`;
      pen = "L";
    }
    this.add("path", { d: path, fill: "none", stroke: "var(--ink)", "stroke-linejoin": "round", ...attributes });
  }

  cross(share) {
    this.add("line", { class: "cross", x1: this.x(share), x2: this.x(share), y1: this.top, y2: this.bottom });
  }

  show(label) {
    this.svg.replaceChildren(...this.shapes);
    if (label !== undefined && this.svg.getAttribute("aria-label") !== label) this.svg.setAttribute("aria-label", label);
  }
}

/** Position of the pointer over a chart, as a share of the chart's width; null outside the chart. */
class Pointer {
  constructor(svg, redraw) {
    this.share = null;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      this.share = Math.min(1, Math.max(0, (event.clientX - box.left - 38) / (box.width - 44)));
      redraw();
    });
    svg.addEventListener("pointerleave", () => { this.share = null; redraw(); });
  }
}

/** Return the points of a line through samples, with null where the line is broken. */
function pointsOf(samples, from, to, value) {
  return samples.filter((sample) => sample.time >= from).flatMap((sample) => {
    const found = value(sample);
    const point = found == null ? null : [(sample.time - from) / (to - from), found];
    return sample.isBroken ? [null, point] : [point];
  });
}

/** Draw a sparkline. The top of its scale is `most` if given, otherwise the highest value. */
function spark(svg, samples, { from, to }, value, most, colour = "var(--soft)") {
  const plot = new Plot(svg, { left: 1, right: 1, top: 2, bottom: 1 });
  const points = pointsOf(samples, from, to, value);
  const highest = most ?? Math.max(1e-12, ...points.map((point) => point?.[1] ?? 0));
  plot.add("line", { x1: 0, x2: plot.width, y1: plot.bottom + 0.5, y2: plot.bottom + 0.5, stroke: "var(--grid)" });
  plot.line(points.map((point) => point && [point[0], Math.min(1, point[1] / highest)]), { stroke: colour, "stroke-width": 1.5 });
  plot.show();
}

/** Return the ticks of a logarithmic axis (1, 2, 5, 10, ...) and a function that maps values to [0, 1]. */
function logTicks(lowest, highest) {
  const steps = [];
  for (let power = Math.floor(Math.log10(lowest)); power <= Math.ceil(Math.log10(highest)); power++)
    for (const digit of [1, 2, 5]) steps.push(digit * 10 ** power);
  const above = (each) => each >= highest * 0.999;
  let first = Math.max(0, steps.findLastIndex((each) => each <= lowest * 1.001));
  let last = steps.findIndex(above);
  if (last - first < 2) { first = Math.max(0, first - 1); last = Math.min(steps.length - 1, last + 1); }
  const ticks = steps.slice(first, last + 1);
  const place = (value) => Math.log(value / ticks[0]) / Math.log(ticks.at(-1) / ticks[0]);
  const shown = ticks.length > 7 ? ticks.filter((tick) => /^1/.test(tick.toExponential())) : ticks;
  return { place: (value) => Math.min(1, Math.max(0, place(value))), ticks: shown.map((tick) => [place(tick), tick]) };
}
