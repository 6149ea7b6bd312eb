// Tokens of a segment, in windows: those far from what is seen are taken out again, and leave their height behind.
//
// A token is read by the pointer, or by the keyboard: the area has the focus, and arrows go from token to token.

import { element, fill, plain } from "../dom.js";

const WINDOW = 1000; // tokens
const NEAR = "600px 0px";
const GUESSED_PX = 0.35; // height of a token's share of a line, before its window was drawn
const LONGEST = 400; // characters of one token

/** What is known of the token that is pointed at. */
export class Readout {
  constructor() {
    this.node = element("p", { class: "readout", role: "status", "aria-live": "polite" }, HINT);
  }

  show(who, index, tokens, i) {
    const facts = [
      `token ${index}`,
      `“${shown(tokens.texts[i])}”`,
      `id ${tokens.ids[i]}`,
    ];
    if (tokens.sampled[i]) {
      facts.push(
        `version ${tokens.version[i]}`,
        `logprob ${exact(tokens.logprob[i])}`,
        tokens.current[i] === null ? "no logprob of the trainer's" : `trainer's logprob ${exact(tokens.current[i])}`,
        tokens.ratio[i] === null ? "no ratio" : `ratio ${exact(tokens.ratio[i])}`,
        `advantage ${exact(tokens.advantage[i])}`,
        tokens.trained[i] ? "trained" : "sampled, not trained",
      );
    } else facts.push("not sampled");
    this.node.textContent = (who === "" ? "" : `${who}: `) + facts.join(" · ");
  }
}

const HINT = "Point at a token, or choose the tokens and go through them by the arrow keys.";

export class TokenArea {
  constructor(place, context, rollout, readout, colors, name = "") {
    Object.assign(this, { place, context, rollout, readout, colors, name });
    this.node = element("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": name === "" ? "Tokens; arrow keys go from one to the next" : `Tokens of ${name}; arrow keys go from one to the next`,
    });
    fill(place, this.node);
    const { signal } = context;
    this.node.addEventListener("pointerover", (event) => this.onPointer(event), { signal });
    this.node.addEventListener("click", (event) => this.onPointer(event), { signal });
    this.node.addEventListener("keydown", (event) => this.onKey(event), { signal });
    this.inside = new IntersectionObserver((entries) => this.onSeen(entries), { root: this.node, rootMargin: NEAR });
    signal.addEventListener("abort", () => this.inside.disconnect());
  }

  /** The first segment of a rollout of which nothing is known yet, from its first sampled token on. */
  async showFirst() {
    try {
      const { segments } = await this.context.api(`rollouts/${this.rollout}`);
      if (segments.length > 0) this.show(0, segments[0].tokens, segments[0].turns.find((each) => each.turn.sampled)?.turn.start ?? 0);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.place, element("p", { class: "refused" }, plain(error.message, 400)));
    }
  }

  /** Segment `segment` of `total` tokens, scrolled to token `start`. */
  show(segment, total, start = 0, focus = false) {
    if (this.segment !== segment) {
      this.segment = segment;
      this.total = total;
      this.at = null;
      this.inside.disconnect();
      this.windows = Array.from({ length: Math.ceil(total / WINDOW) }, (_, number_) => ({ number: number_, tokens: null, node: element("span", { class: "window" }) }));
      fill(this.node, this.windows.map((each) => each.node));
      for (const each of this.windows) {
        each.node.dataset.window = each.number;
        this.hold(each, Math.min(WINDOW, total - each.number * WINDOW) * GUESSED_PX * 20);
        this.inside.observe(each.node);
      }
      if (total === 0) this.node.textContent = "no token";
    }
    if (total > 0) this.go(start, focus);
  }

  hold(window_, height) {
    window_.node.style.setProperty("--held", `${Math.max(20, Math.round(height))}px`);
    window_.node.classList.add("empty-window");
  }

  onSeen(entries) {
    for (const { target, isIntersecting } of entries) {
      const window_ = this.windows[Number(target.dataset.window)];
      window_.seen = isIntersecting;
      if (isIntersecting) this.fillWindow(window_).then(() => this.unlessSeen(window_));
      else this.emptyWindow(window_);
    }
  }

  async fillWindow(window_) {
    if (window_.tokens !== null) return true;
    window_.asking ??= this.ask(window_);
    const there = await window_.asking;
    window_.asking = null;
    return there;
  }

  async ask(window_) {
    const { segment } = this;
    const parameters = new URLSearchParams({ segment, start: window_.number * WINDOW, count: WINDOW });
    let tokens;
    try {
      tokens = await this.context.api(`rollouts/${this.rollout}/tokens?${parameters}`);
    } catch (error) {
      if (error.name !== "AbortError") {
        window_.node.textContent = plain(error.message, 300);
        window_.node.classList.add("refused");
      }
      return false;
    }
    if (segment !== this.segment) return false;
    window_.tokens = tokens;
    window_.node.classList.remove("empty-window", "refused");
    fill(window_.node, tokens.texts.map((text, i) => this.token(window_, text, i)));
    return true;
  }

  token(window_, text, i) {
    const { tokens } = window_;
    const classes = ["token"];
    if (tokens.sampled[i]) classes.push(tokens.trained[i] ? "sampled" : "masked");
    const color = this.colors.classOf(tokens, i);
    if (color !== null) classes.push(color);
    return element("span", { class: classes.join(" "), dataset: { i } }, shown(text));
  }

  emptyWindow(window_) {
    if (window_.tokens === null || window_.number === this.windowOf(this.at)) return;
    const { height } = window_.node.getBoundingClientRect();
    window_.tokens = null;
    fill(window_.node);
    this.hold(window_, height);
  }

  recolor() {
    for (const window_ of this.windows ?? []) {
      if (window_.tokens === null) continue;
      [...window_.node.children].forEach((node, i) => {
        const again = this.token(window_, "", i);
        node.className = again.className + (node.classList.contains("here") ? " here" : "");
      });
    }
  }

  windowOf(index) {
    return index === null ? -1 : Math.floor(index / WINDOW);
  }

  onPointer(event) {
    const node = event.target.closest(".token");
    const window_ = node === null ? undefined : this.windows?.[Number(node.parentElement.dataset.window)];
    if (!window_?.tokens) return;
    const i = Number(node.dataset.i);
    this.readout.show(this.name, window_.number * WINDOW + i, window_.tokens, i);
    if (event.type === "click") this.mark(window_.number * WINDOW + i, node);
  }

  onKey(event) {
    const ways = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 200, PageUp: -200 };
    const from = this.at ?? -1;
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.total - 1 : event.key in ways ? from + ways[event.key] : null;
    if (to === null || !this.total) return;
    event.preventDefault();
    this.go(Math.max(0, Math.min(this.total - 1, to)), true);
  }

  /** To token `index`: it comes into sight, and is read out. */
  async go(index, focus = false) {
    this.going = index;
    const window_ = this.windows[this.windowOf(index)];
    if (!(await this.fillWindow(window_))) return;
    if (this.going !== index) {
      this.unlessSeen(window_);
      return;
    }
    const i = index % WINDOW;
    const node = window_.node.children[i];
    if (node === undefined) return;
    this.mark(index, node);
    this.readout.show(this.name, index, window_.tokens, i);
    // Within the area alone: the page stays where it is, unless the tokens were asked for.
    const top = node.getBoundingClientRect().top - this.node.getBoundingClientRect().top;
    if (top < 0 || top > this.node.clientHeight - 30) this.node.scrollTop += top - this.node.clientHeight / 3;
    if (focus && document.activeElement !== this.node) {
      this.node.focus({ preventScroll: true });
      this.node.scrollIntoView({ block: "nearest" });
    }
  }

  mark(index, node) {
    const before = this.at;
    this.node.querySelector(".here")?.classList.remove("here");
    node.classList.add("here");
    this.at = index;
    const left = this.windowOf(before);
    if (left >= 0 && left !== this.windowOf(index)) this.unlessSeen(this.windows[left]);
  }

  /** It was asked for, and is out of sight by now. */
  unlessSeen(window_) {
    if (!window_.seen) this.emptyWindow(window_);
  }
}

/** A token's text with what is not seen as signs; an empty one is a part of the character that the next one ends. */
function shown(text) {
  if (text === "") return "∅";
  return plain(text, LONGEST).replaceAll("\t", "⇥\t").replaceAll("\n", "⏎\n");
}

function exact(value) {
  return value === null ? "–" : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(7)));
}
