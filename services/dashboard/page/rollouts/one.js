// One rollout: its facts, its turns as a timeline, where prefixes broke, its tokens, its siblings.

import { element, fill, plain } from "../dom.js";
import { clock, count, number } from "../figures.js";
import { table } from "../tables.js";
import { filtersOf } from "./filters.js";
import { TokenColors } from "./colors.js";
import { timeline } from "./timeline.js";
import { Readout, TokenArea } from "./tokens.js";

const SIDE_BY_SIDE = 8;

export class View {
  constructor(place, context) {
    this.place = place;
    this.context = context;
    this.id = context.parameters.get("rollout");
    this.filters = filtersOf(context.parameters);
  }

  async start() {
    fill(this.place, this.back(), element("p", { class: "faint", role: "status" }, "Reading the rollout…"));
    try {
      this.rollout = await this.context.api(`rollouts/${this.id}`);
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(this.place, this.back(), element("p", { class: "refused", role: "alert" }, plain(error.message, 400)));
      return;
    }
    this.draw();
  }

  back() {
    const parameters = new URLSearchParams({ run: this.context.run, ...this.filters });
    return element("p", {}, element("a", { href: `#/rollouts?${parameters}` }, "← All rollouts"));
  }

  link(id, text, attributes = {}) {
    const parameters = new URLSearchParams({ run: this.context.run, ...this.filters, rollout: id });
    return element("a", { href: `#/rollouts?${parameters}`, ...attributes }, text);
  }

  draw() {
    const found = this.rollout;
    const tokens = element("section", { class: "panel wide", "aria-labelledby": "tokens-heading" });
    fill(
      this.place,
      this.back(),
      element("h1", {}, `Step ${found.step}, ${plain(found.task, 80)}, member ${found.member} of group ${found.ordinal}`),
      element(
        "div",
        { class: "panels" },
        element("section", { class: "panel", "aria-label": "What it is" }, this.facts()),
        element("section", { class: "panel", "aria-label": "Rewards" }, element("h2", {}, "Rewards"), this.rewards()),
        tokens,
        found.segments.some((segment) => segment.broke !== null)
          ? element("section", { class: "panel wide", "aria-label": "Breaks" }, this.breaks())
          : null,
        element("section", { class: "panel wide", "aria-label": "Timeline" }, timeline(found, (segment, start) => this.jump(segment, start))),
        element("section", { class: "panel wide", "aria-label": "Siblings" }, this.siblings()),
        Object.keys(found.metadata).length + found.samplings.length > 0
          ? element("section", { class: "panel wide", "aria-label": "Metadata" }, this.metadata())
          : null,
      ),
    );
    this.drawTokens(tokens);
  }

  facts() {
    const found = this.rollout;
    const rows = [
      ["Reward", number(found.reward)],
      ["Finish reason", plain(found.finish_reason, 60)],
      ["Trained", found.trained ? `by step ${found.step}, from version ${found.version}` : "no: it was only compared with"],
      ["Most staleness", `K ${found.k}`],
      ["Group", plain(found.group, 120)],
      ["Trajectory", plain(found.trajectory, 120)],
      ["Server", plain(found.server, 120)],
      ["Opened, finished", `${clock(found.opened_at)}, ${clock(found.finished_at)}`],
      ["Problem", plain(found.task_id, 120)],
      ["Trace", plain(found.trace, 120)],
    ];
    return pairs(rows.filter(([, value]) => value !== ""));
  }

  rewards() {
    const found = this.rollout;
    const rows = Object.entries(found.components).map(([name, value]) => [plain(name, 80), number(value)]);
    return pairs([["all of it", number(found.reward)], ...rows]);
  }

  breaks() {
    const nodes = [element("h2", {}, "Where prefixes broke")];
    this.rollout.segments.forEach((segment) => {
      if (segment.broke === null) return;
      const { found, why, place, here, there } = segment.broke;
      const reason = found.reason === null ? "" : ` (${plain(found.reason, 40)})`;
      nodes.push(
        element("h3", {}, `Segment ${found.segment} left segment ${found.before} at token ${found.at}: ${plain(why, 120)}${reason}`),
        element(
          "dl",
          { class: "figures break" },
          side(`Segment ${found.before}, before`, there, place, found.token_before),
          side(`Segment ${found.segment}, here`, here, place, found.token),
        ),
      );
    });
    return nodes;
  }

  drawTokens(place) {
    const found = this.rollout;
    const readout = new Readout();
    this.colors = new TokenColors(found);
    const select = element(
      "select",
      { id: "tokens-segment" },
      found.segments.map((segment, index) => element("option", { value: index }, `${index}: ${count(segment.tokens)} tokens`)),
    );
    const area = element("div", { class: "tokens-place" });
    this.area = new TokenArea(area, this.context, this.id, readout, this.colors);
    select.addEventListener("change", () => this.area.show(Number(select.value), found.segments[Number(select.value)].tokens));
    this.select = select;
    fill(
      place,
      element("h2", { id: "tokens-heading" }, "Tokens"),
      element(
        "div",
        { class: "tokens-choice" },
        element("label", { class: "field" }, element("span", {}, "Segment"), select),
        this.colors.control(() => this.recolor()),
        this.colors.legend,
      ),
      readout.node,
      area,
    );
    this.areas = [this.area];
    const first = found.segments[0];
    if (first !== undefined) {
      const begins = first.turns.find((each) => each.turn.sampled)?.turn.start ?? 0;
      this.area.show(0, first.tokens, begins);
    }
  }

  recolor() {
    for (const area of this.areas) area.recolor();
  }

  jump(segment, start) {
    this.select.value = String(segment);
    this.area.show(segment, this.rollout.segments[segment].tokens, start, true);
  }

  siblings() {
    const { siblings, id } = this.rollout;
    const rows = siblings.map((each) => [
      this.link(each.id, `member ${each.member}${each.id === id ? " (this one)" : ""}`, each.id === id ? { "aria-current": "true" } : {}),
      number(each.reward),
      number(each.advantage),
      count(each.length),
      each.first_version === each.last_version ? String(each.first_version) : `${each.first_version} to ${each.last_version}`,
      plain(each.finish_reason, 40),
      element("bdi", {}, plain(each.answer, 160)),
    ]);
    const place = element("div", { class: "beside" });
    const button = element("button", { type: "button", "aria-expanded": "false" }, "Show side by side");
    button.addEventListener("click", () => this.beside(button, place));
    return [
      element("h2", {}, `Siblings: ${siblings.length} of ${this.rollout.group_size} are kept`),
      table("Siblings", ["Member", "Reward", "Advantage", "Tokens", "Versions", "Finish", "Answer"], rows),
      siblings.length > 1 ? element("p", {}, button) : null,
      place,
    ];
  }

  beside(button, place) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    button.textContent = open ? "Show side by side" : "Hide";
    this.areas = [this.area];
    if (open) {
      fill(place);
      return;
    }
    const readout = new Readout();
    const { siblings, id } = this.rollout;
    // This one first, then those next to it.
    const order = [...siblings].sort((a, b) => Number(b.id === id) - Number(a.id === id) || a.member - b.member);
    const columns = order.slice(0, SIDE_BY_SIDE).map((each) => {
      const tokens = element("div", { class: "tokens-place" });
      const area = new TokenArea(tokens, this.context, each.id, readout, this.colors, `member ${each.member}`);
      this.areas.push(area);
      area.showFirst();
      return element(
        "section",
        { class: "sibling", "aria-label": `Member ${each.member}` },
        element("h3", {}, this.link(each.id, `Member ${each.member}`), `: reward ${number(each.reward)}, advantage ${number(each.advantage)}`),
        tokens,
      );
    });
    const left = siblings.length - columns.length;
    fill(
      place,
      readout.node,
      element("div", { class: "siblings scroll", tabindex: "0", role: "region", "aria-label": "Siblings side by side" }, columns),
      left > 0 ? element("p", { class: "faint" }, `${left} more are in the table.`) : null,
    );
  }

  metadata() {
    const found = this.rollout;
    const rows = Object.entries(found.metadata).map(([name, value]) => [plain(name, 120), plain(value, 2000)]);
    const samplings = found.samplings.map((each, index) => [`Sampling ${index}`, plain(each, 1000)]);
    return [element("h2", {}, "Metadata and sampling"), pairs([...rows, ...samplings])];
  }
}

function pairs(rows) {
  return element("dl", { class: "figures" }, rows.map(([name, value]) => [element("dt", {}, name), element("dd", {}, element("bdi", {}, value))]));
}

/** Tokens round a break, the first that differs marked. */
function side(name, texts, place, token) {
  const shown = texts.map((text, index) =>
    element(index === place ? "mark" : "span", { class: index === place ? "token differs" : "token" }, plain(text === "" ? "∅" : text, 200)),
  );
  if (token === null) shown.push(element("mark", { class: "token differs" }, "⟨its end⟩"));
  const id = token === null ? "" : ` (token ${token})`;
  return [element("dt", {}, `${name}${id}`), element("dd", { class: "token-line" }, shown)];
}
