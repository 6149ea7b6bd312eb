// The list: filters, and rows of which only those in sight exist.

import { element, fill, plain } from "../dom.js";
import { count, number } from "../figures.js";
import { filtersOf, FILTERS, ORDERS, searchOf } from "./filters.js";

const ROW = 64; // pixels, as rollouts.css has it
const PAGE = 50;
const PAGES_KEPT = 24;
const BEYOND = 8; // rows above and below the visible ones
const MOST_PIXELS = 15_000_000; // what browsers lay out; more rows than fit are reached by filters
const REST_MS = 250;

/** Where each search was scrolled to, while the page is open. */
const remembered = new Map();

export class View {
  constructor(place, context) {
    this.place = place;
    this.context = context;
    this.filters = filtersOf(context.parameters);
    this.generation = 0;
  }

  start() {
    this.form = this.drawForm();
    this.said = element("p", { class: "faint", role: "status" });
    this.newer = element("button", { type: "button", hidden: true, on: { click: () => this.search() } }, "Show newer rollouts");
    this.rows = element("ol", { class: "rollout-rows", "aria-label": "Rollouts found" });
    this.scroller = element(
      "div",
      { class: "rollout-scroller", tabindex: "0", role: "region", "aria-label": "Rollouts, a list that scrolls" },
      this.rows,
    );
    fill(
      this.place,
      element("h1", { class: "visually-hidden" }, "Rollouts"),
      element("section", { class: "panel" }, this.form),
      element("div", { class: "rollout-bar" }, this.said, this.newer),
      this.scroller,
    );
    const { signal } = this.context;
    this.scroller.addEventListener("scroll", () => this.schedule(), { signal, passive: true });
    addEventListener("resize", () => this.schedule(), { signal });
    this.scroller.addEventListener("keydown", (event) => this.onKey(event), { signal });
    this.context.subscribe((state) => this.onNews(state));
    this.search(true);
  }

  drawForm() {
    const fields = FILTERS.map(({ name, label, hint, kind }) => {
      const control =
        kind === "task"
          ? element("select", { name }, element("option", { value: "" }, "any"))
          : element("input", { name, type: "text", placeholder: hint, autocomplete: "off", spellcheck: "false", maxlength: "1000" });
      control.value = this.filters[name] ?? "";
      return element("label", { class: `field field-${name}` }, element("span", {}, label), control);
    });
    const order = element(
      "select",
      { name: "sort" },
      ORDERS.map(([value, label]) => element("option", { value, selected: value === this.filters.sort }, label)),
    );
    fields.push(element("label", { class: "field" }, element("span", {}, "Order"), order));
    const clear = element("button", { type: "button", on: { click: () => this.clear() } }, "Clear");
    const form = element("form", { class: "rollout-filters", role: "search", "aria-label": "Filters" }, fields, clear);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => {
      clearTimeout(this.resting);
      this.resting = setTimeout(() => this.onFilters(), REST_MS);
    });
    this.context.signal.addEventListener("abort", () => clearTimeout(this.resting));
    return form;
  }

  clear() {
    for (const control of this.form.querySelectorAll("input, select")) control.value = control.name === "sort" ? ORDERS[0][0] : "";
    this.onFilters();
  }

  onFilters() {
    const read = Object.fromEntries(new FormData(this.form));
    this.filters = filtersOf(new URLSearchParams(read));
    this.context.replace(this.filters);
    this.search();
  }

  /** Begin anew. `again`: at the place where this search was left. */
  async search(again = false) {
    const generation = ++this.generation;
    this.pages = new Map();
    this.asked = new Set();
    this.upTo = null;
    this.key = JSON.stringify([this.context.run, this.filters]);
    this.newer.hidden = true;
    this.said.textContent = "Searching…";
    let first;
    try {
      first = await this.context.api(`rollouts?${searchOf(this.filters, { offset: 0, limit: PAGE })}`);
    } catch (error) {
      if (error.name === "AbortError" || generation !== this.generation) return;
      this.total = 0;
      this.size();
      fill(this.rows);
      this.said.textContent = plain(error.message, 400);
      return;
    }
    if (generation !== this.generation) return;
    this.extent = first.extent;
    this.upTo = first.page.up_to;
    this.offerTasks();
    this.took(0, first.page);
    fill(this.rows);
    this.shown = new Map();
    this.tell();
    this.size();
    this.scroller.scrollTop = again ? (remembered.get(this.key) ?? 0) : 0;
    this.draw();
  }

  took(page, answer) {
    this.pages.set(page, answer.rollouts);
    // The pages that were looked at longest ago go.
    for (const old of this.pages.keys()) {
      if (this.pages.size <= PAGES_KEPT) break;
      if (old !== page) this.pages.delete(old);
    }
    this.counted = answer.total !== null;
    const reached = page * PAGE + answer.rollouts.length;
    // Where they are not counted, one row more stands for those that come after these.
    this.total = answer.total ?? Math.max(this.total ?? 0, reached + (answer.more ? 1 : 0));
  }

  offerTasks() {
    const select = this.form.querySelector("select[name=task]");
    const wanted = this.filters.task ?? "";
    const tasks = new Set([...(this.extent?.tasks ?? []), ...(wanted === "" ? [] : [wanted])]);
    fill(
      select,
      element("option", { value: "" }, "any"),
      [...tasks].map((task) => element("option", { value: task, selected: task === wanted }, plain(task, 80))),
    );
  }

  tell() {
    if (this.extent === null) {
      this.said.textContent = "No rollouts are kept of this run (yet): samples.share says how many a run keeps.";
      return;
    }
    const { rollouts, of, first, last } = this.extent;
    const found = this.counted ? count(this.total) : "Some";
    const part = rollouts < of ? `, of the ${count(of)} that their steps had` : "";
    this.said.textContent = `${found} found of ${count(rollouts)} that are kept of steps ${first} to ${last}${part}.`;
  }

  size() {
    const height = Math.min(MOST_PIXELS, (this.total ?? 0) * ROW);
    this.rows.style.setProperty("height", `${height}px`);
    this.scroller.hidden = height === 0;
  }

  schedule() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      this.draw();
    });
  }

  draw() {
    if (!this.shown) return;
    const top = this.scroller.scrollTop;
    remembered.delete(this.key);
    remembered.set(this.key, top);
    if (remembered.size > 50) remembered.delete(remembered.keys().next().value);
    const first = Math.max(0, Math.floor(top / ROW) - BEYOND);
    const last = Math.min(this.total, Math.ceil((top + this.scroller.clientHeight) / ROW) + BEYOND);
    for (const [index, node] of this.shown) {
      // A row that has the focus stays, so that the keyboard does not lose its place.
      if ((index < first || index >= last) && !node.contains(document.activeElement)) {
        node.remove();
        this.shown.delete(index);
      }
    }
    for (let index = first; index < last; index++) this.row(index);
  }

  row(index) {
    const page = Math.floor(index / PAGE);
    const found = this.pages.get(page)?.[index % PAGE];
    let node = this.shown.get(index);
    if (node === undefined) {
      node = element("li", { class: "rollout-row", "aria-posinset": index + 1, "aria-setsize": this.counted ? this.total : -1 });
      node.style.setProperty("transform", `translateY(${index * ROW}px)`);
      this.shown.set(index, node);
      this.rows.append(node);
    }
    if (found === undefined) {
      this.fetch(page);
      if (node.dataset.id === undefined) node.textContent = "…";
    } else if (node.dataset.id !== String(found.id)) {
      node.dataset.id = found.id;
      fill(node, this.line(found));
    }
  }

  line(found) {
    const parameters = new URLSearchParams({ run: this.context.run, ...this.filters, rollout: found.id });
    const facts = [
      `step ${found.step}`,
      plain(found.task, 60),
      `reward ${number(found.reward)}`,
      `advantage ${number(found.advantage)}`,
      `${count(found.length)} tokens`,
      versions(found),
      plain(found.finish_reason, 40),
      found.segments > 1 ? `${found.segments} segments` : null,
    ].filter((fact) => fact !== null);
    return element(
      "a",
      { href: `#/rollouts?${parameters}` },
      element("span", { class: "rollout-facts" }, facts.join(" · ")),
      element("bdi", { class: "rollout-prompt" }, oneLine(found.prompt)),
      element("bdi", { class: "rollout-answer" }, oneLine(found.answer)),
    );
  }

  async fetch(page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const generation = this.generation;
    const parameters = searchOf(this.filters, { offset: page * PAGE, limit: PAGE, up_to: this.upTo });
    try {
      const answer = await this.context.api(`rollouts?${parameters}`);
      if (generation !== this.generation) return;
      this.took(page, answer.page);
      this.tell();
      this.size();
      this.schedule();
    } catch (error) {
      if (error.name !== "AbortError" && generation === this.generation) this.said.textContent = plain(error.message, 400);
    } finally {
      if (generation === this.generation) this.asked.delete(page);
    }
  }

  onKey(event) {
    if (!["ArrowDown", "ArrowUp"].includes(event.key) || event.target === this.scroller) return;
    const index = [...this.shown].find(([, node]) => node.contains(event.target))?.[0];
    if (index === undefined) return;
    const next = Math.min(this.total - 1, Math.max(0, index + (event.key === "ArrowDown" ? 1 : -1)));
    event.preventDefault();
    this.scroller.scrollTop = Math.min(next * ROW, Math.max(this.scroller.scrollTop, (next + 1) * ROW - this.scroller.clientHeight));
    this.draw();
    this.shown.get(next)?.querySelector("a")?.focus({ preventScroll: true });
  }

  onNews(state) {
    const step = state.line?.step;
    if (this.extent !== undefined && Number.isInteger(step) && step > (this.extent?.last ?? 0)) this.newer.hidden = false;
  }
}

function versions({ first_version: first, last_version: last }) {
  if (last < 0) return "nothing sampled";
  return first === last ? `version ${first}` : `versions ${first} to ${last}`;
}

/** Line ends as signs: a row has one line for each text. */
function oneLine(text) {
  return plain(text.replaceAll("\r\n", "⏎").replaceAll("\n", "⏎").replaceAll("\t", " "), 240);
}
