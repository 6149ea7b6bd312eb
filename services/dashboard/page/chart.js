// Line charts around uPlot, which is loaded before all modules. Colours come from the theme's CSS variables.

import { element, plain } from "./dom.js";

const HEIGHT = 180;

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A number in few characters. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  if (Number.isInteger(value)) return String(value);
  return size >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

/**
 * A chart in `place`.
 *
 * `options`: `title`; `x` (name of the axis); `show` (value → text, default `short`); `range` ([low, high] of y, where it is
 * fixed); `height` (pixels); `spanGaps` (lines go on across gaps); `axis` (value → text on the axis, default `show`); `series`: [{name, width?, dash?, points?, color?: number of the series' colour}]; `bands`:
 * [[upper, lower]] numbers of series (from 0) to fill between; `onPick`: called with the x that is clicked.
 * Returns `{set(columns), end()}`: `columns` are [xs, ys of each series]; null is a gap. `signal` ends it, too.
 */
export function chart(place, options, signal) {
  const heading = element("h3", {}, options.title);
  const canvas = element("div", { class: "chart", role: "img", "aria-label": options.title });
  const legend = element("div", { class: "legend" });
  const figure = element("figure", { class: "figure" }, heading, canvas, legend);
  place.append(figure);
  let columns = [[], ...options.series.map(() => [])];
  let plot = null;

  function colorOf(each, index) {
    return variable(`--series-${(((each.color ?? index) % 8) + 8) % 8 + 1}`);
  }

  function drawn() {
    const axis = { stroke: variable("--faint"), grid: { stroke: variable("--line"), width: 1 }, ticks: { stroke: variable("--line") }, font: "12px system-ui" };
    const show = options.show ?? short;
    return new uPlot(
      {
        width: Math.max(120, canvas.clientWidth),
        height: options.height ?? HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, sync: options.sync ? { key: options.sync } : undefined },
        scales: { x: { time: false }, y: options.range ? { range: () => options.range } : {} },
        axes: [
          { ...axis, values: (_, found) => found.map(short) },
          { ...axis, size: 56, values: (_, found) => found.map(options.axis ?? show) },
        ],
        series: [
          {},
          ...options.series.map((each, index) => ({
            label: each.name,
            stroke: each.hidden ? "transparent" : colorOf(each, index),
            width: each.hidden ? 0 : each.width ?? 1.5,
            dash: each.dash,
            points: { show: each.points ?? false },
            spanGaps: options.spanGaps ?? false,
          })),
        ],
        bands: (options.bands ?? []).map(([upper, lower, color]) => ({
          series: [upper + 1, lower + 1],
          fill: `${variable(`--series-${(color % 8) + 1}`)}33`,
        })),
        hooks: { setCursor: [(each) => told(each.cursor.idx)] },
      },
      columns,
      canvas,
    );
  }

  function told(index) {
    const at = index ?? columns[0].length - 1;
    const show = options.show ?? short;
    legend.replaceChildren(
      ...(at < 0 ? [] : [element("span", {}, `${options.x ?? "step"} ${short(columns[0][at])}`)]),
      ...options.series.flatMap((each, number) => {
        if (each.hidden || at < 0) return [];
        const key = element("span", { class: "key", "aria-hidden": "true" });
        key.style.setProperty("--key", colorOf(each, number));
        return [element("span", { class: "entry" }, key, `${plain(each.name, 60)} ${show(columns[number + 1][at])}`)];
      }),
    );
  }

  function redraw() {
    plot?.destroy();
    plot = drawn();
    told(null);
  }

  const sizes = new ResizeObserver(() => {
    if (plot === null) redraw();
    else if (Math.abs(plot.width - canvas.clientWidth) > 1) plot.setSize({ width: Math.max(120, canvas.clientWidth), height: options.height ?? HEIGHT });
  });
  sizes.observe(canvas);
  addEventListener("themechange", redraw, { signal });
  if (options.onPick) {
    canvas.addEventListener("click", () => {
      const at = plot?.cursor.idx;
      if (at !== null && at !== undefined) options.onPick(columns[0][at]);
    });
  }

  function end() {
    sizes.disconnect();
    plot?.destroy();
    plot = null;
  }
  signal?.addEventListener("abort", end);

  return {
    set(found) {
      columns = found;
      if (plot === null) {
        if (canvas.clientWidth > 0) redraw();
      } else {
        plot.setData(columns);
        told(plot.cursor.idx ?? null);
      }
    },
    end,
  };
}
