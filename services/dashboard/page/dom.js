// Nodes made of text: nothing that a run says is ever read as HTML.

/** An element. Attributes: `class`, `dataset`, `on` (event → listener), any other by its name; null and false are left out. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return filled(node, attributes, children);
}

const SVG = "http://www.w3.org/2000/svg";

/** As `element`, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replace all that a node holds. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Returns `put(part, key, make)`, which fills a part only where its key is new: whoever has the focus in it keeps it. A part
 *  for which `make` returns nothing is hidden. */
export function partFiller() {
  const shown = new Map();
  return (part, key, make) => {
    if (shown.get(part) === key) return;
    shown.set(part, key);
    const made = make();
    part.hidden = made.length === 0;
    fill(part, made);
  };
}

const MOST = 4000;
// Control characters but for line ends and tabs; characters without width; those that turn the direction of text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** Text of a run, ready to be shown: what would be invisible, or turn the text around, as its code point; shortened. */
export function plain(text, most = MOST) {
  const whole = String(text);
  const cut = whole.length > most ? whole.slice(0, most) : whole;
  const shown = cut.toWellFormed ? cut.toWellFormed() : cut;
  const visible = shown.replace(HIDDEN, (found) => {
    const code = found.codePointAt(0);
    return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
  return whole.length > most ? `${visible}… (${(whole.length - most).toLocaleString("en")} more characters)` : visible;
}
