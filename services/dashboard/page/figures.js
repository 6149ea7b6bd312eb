// Numbers in words, and lists of them. A figure keeps its raw value beside what is shown, in `data-value`.

import { element, plain } from "./dom.js";
import { short } from "./chart.js";

const DASH = "–";
const known = (value) => value !== null && value !== undefined;

export const count = (value) => (known(value) ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : DASH);
export const share = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : DASH);
/** Without decimals, for an axis. */
export const percent = (value) => (known(value) ? `${Math.round(100 * value)} %` : DASH);
export const number = (value) => (known(value) ? short(value) : DASH);
export const fixed = (digits) => (value) => (known(value) ? value.toFixed(digits) : DASH);
export const milliseconds = (value) => (known(value) ? `${value.toFixed(1)} ms` : DASH);
export const text = (value) => (known(value) ? plain(value, 200) : DASH);

export function bytes(value) {
  if (!known(value)) return DASH;
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} bytes`;
}

/** Seconds in the largest unit that leaves two digits. */
export function duration(value) {
  if (!known(value)) return DASH;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${value.toFixed(0)} s`;
  return value < 6000 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** Unix seconds as a time of day here. */
export function clock(value) {
  return known(value) ? new Date(value * 1000).toLocaleTimeString("en-GB") : DASH;
}

/** A value at a dotted path of the state; undefined where there is none. */
export function at(state, path) {
  return path.split(".").reduce((found, name) => (known(found) ? found[name] : undefined), state);
}

/** Rows of a description list: [label, path, form, more words]; those that nothing is known of are left out. */
export function figures(state, rows) {
  const shown = rows.flatMap(([label, path, form = number, more = null]) => {
    const value = at(state, path);
    if (!known(value)) return [];
    const words = more === null ? form(value) : `${form(value)}${more(state) ?? ""}`;
    return [element("dt", {}, label), element("dd", { dataset: { figure: path, value: JSON.stringify(value) } }, words)];
  });
  return shown.length > 0 ? element("dl", { class: "figures" }, shown) : element("p", { class: "empty" }, "Nothing is known yet.");
}
