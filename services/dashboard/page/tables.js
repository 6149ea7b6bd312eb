// Tables that scroll by themselves where they are wider than the page.

import { element, plain } from "./dom.js";

/** `rows`: cells of text or nodes, the first names the row; null is a dash. `name`: what it is, for who does not see it. */
export function table(name, heads, rows) {
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `${name}, a table` },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, plain(head, 80))))),
      element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell, i) => (i === 0 ? element("th", { scope: "row" }, shown(cell)) : element("td", {}, shown(cell))))))),
    ),
  );
}

function shown(cell) {
  if (cell === null || cell === undefined) return "–";
  return cell instanceof Node || Array.isArray(cell) ? cell : plain(cell, 300);
}
