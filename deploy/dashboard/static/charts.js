// Lines over time. One uPlot each; they share their crosshair, and take their colours from the style sheet.

import uPlot from "./uplot/uPlot.esm.js";
import { h } from "./draw.js";

const HEIGHT = 150;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  /** `series`: [label, colour variable, filled]. `words` says a value. */
  constructor(parent, title, words, series, { most = null, whole = false } = {}) {
    this.words = words;
    this.series = series;
    this.most = most;
    this.whole = whole;
    this.data = null;
    this.values = series.map(([label, colour]) => h("b", { vars: { "--c": `var(${colour})` }, title: label }));
    this.plot = null;
    this.body = h("div", { class: "plot" });
    this.element = h(
      "figure",
      { class: "panel chart" },
      h("figcaption", {}, h("h2", {}, title), h("div", { class: "key" }, series.map(([label], place) => h("span", {}, label, this.values[place])))),
      this.body,
    );
    parent.append(this.element);
    new ResizeObserver(() => this.fit()).observe(this.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(times, ...values) {
    this.data = [times, ...values];
    if (this.plot === null) this.draw();
    else this.plot.setData(this.data);
    this.tell(null);
  }

  fit() {
    if (this.plot !== null && this.body.clientWidth > 0) this.plot.setSize({ width: this.body.clientWidth, height: HEIGHT });
  }

  draw() {
    if (this.data === null || this.body.clientWidth === 0) return;
    this.plot?.destroy();
    const axis = { stroke: style("--quiet"), font: `11px ${style("--font")}`, ticks: { show: false } };
    this.plot = new uPlot(
      {
        width: this.body.clientWidth,
        height: HEIGHT,
        padding: [8, 28, 0, 0],
        legend: { show: false },
        cursor: { y: false, sync: { key: "time" }, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { x: { time: true }, y: { range: (_, __, high) => [0, this.most ?? (high > 0 ? high * 1.15 : 1)] } },
        axes: [
          { ...axis, grid: { show: false }, space: 70, size: 24, values: (_, splits, __, ___, step) => splits.map((at) => hour(at, step)) },
          { ...axis, grid: { stroke: style("--line"), width: 1 }, size: 58, space: 34, values: (_, splits) => splits.map((value) => (this.whole && !Number.isInteger(value) ? "" : tick(this.words(value), value))) },
        ],
        series: [
          {},
          ...this.series.map(([label, colour, filled, dashed]) => ({
            label,
            stroke: style(colour),
            width: 1.6,
            dash: dashed ? [5, 4] : undefined,
            fill: filled ? `${style(colour)}22` : undefined,
            points: { show: (plot, series, first, last) => last - first < 3, size: 4 },
            spanGaps: false,
          })),
        ],
        hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
      },
      this.data,
      this.body,
    );
  }

  /** The values under the crosshair, or the last ones. */
  tell(place) {
    if (this.data === null) return;
    this.values.forEach((element, number) => {
      const line = this.data[number + 1];
      const value = place === null || place === undefined ? line.findLast((one) => one !== null) : line[place];
      element.textContent = this.words(value);
    });
  }
}

function tick(text, value) {
  return value === 0 ? "0" : text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

function hour(at, step) {
  return new Date(at * 1000).toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });
}
