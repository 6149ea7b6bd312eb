// What tokens are coloured by: one of nine steps of a scale, or one of eight colours in turn. CSS has the colours, by theme.

import { element, fill } from "../dom.js";
import { number } from "../figures.js";

const STEPS = 9;

/** Value of a token → class; `null` for none. `scale`: what the ends of the scale mean. */
const KINDS = {
  advantage: {
    label: "advantage",
    classOf: (tokens, i, scale) => split(tokens.advantage[i] / scale.advantage),
    scale: (scale) => [`−${number(scale.advantage)}`, "0", `+${number(scale.advantage)}`],
    split: true,
  },
  logprob: {
    label: "logprob (engine's)",
    classOf: (tokens, i) => steps(-tokens.logprob[i] / 5),
    scale: () => ["0", "−2.5", "−5 and less"],
  },
  ratio: {
    label: "ratio, trainer to engine",
    classOf: (tokens, i) => split(Math.log(tokens.ratio[i]) / Math.log(2)),
    scale: () => ["½", "1", "2"],
    split: true,
  },
  version: {
    label: "policy version",
    classOf: (tokens, i) => `turn-${tokens.version[i] % 8}`,
    scale: () => ["a colour for each version, in turn"],
  },
  mask: {
    label: "what is trained",
    classOf: (tokens, i) => (tokens.trained[i] ? "turn-2" : "turn-1"),
    scale: () => ["trained", "sampled and masked"],
  },
  none: { label: "nothing", classOf: () => null, scale: () => [] },
};

function steps(share) {
  if (!Number.isFinite(share)) return null;
  return `step-${Math.min(STEPS - 1, Math.max(0, Math.floor(share * STEPS)))}`;
}

function split(share) {
  if (!Number.isFinite(share)) return null;
  return `split-${Math.min(STEPS - 1, Math.max(0, Math.round(((Math.max(-1, Math.min(1, share)) + 1) / 2) * (STEPS - 1))))}`;
}

export class TokenColors {
  constructor(rollout) {
    const largest = Math.max(0, ...rollout.siblings.map((each) => Math.abs(each.advantage)));
    this.scale = { advantage: largest > 0 ? largest : 1 };
    this.kind = "advantage";
    this.legend = element("p", { class: "tokens-legend faint" });
    this.tell();
  }

  control(changed) {
    const select = element(
      "select",
      {},
      Object.entries(KINDS).map(([name, { label }]) => element("option", { value: name, selected: name === this.kind }, label)),
    );
    select.addEventListener("change", () => {
      this.kind = select.value;
      this.tell();
      changed();
    });
    return element("label", { class: "field" }, element("span", {}, "Colour by"), select);
  }

  /** The class of token `i`; null where there is nothing to say of it. */
  classOf(tokens, i) {
    return tokens.sampled[i] ? KINDS[this.kind].classOf(tokens, i, this.scale) : null;
  }

  tell() {
    const { scale, split: around } = KINDS[this.kind];
    const words = scale(this.scale);
    if (this.kind === "mask") {
      fill(this.legend, words.map((word, i) => [element("span", { class: `key ${i === 0 ? "turn-2" : "turn-1"}` }, word), " "]));
      return;
    }
    const keys = words.length < 3 ? [] : Array.from({ length: STEPS }, (_, i) => element("span", { class: `key ${around ? "split" : "step"}-${i}`, "aria-hidden": "true" }, "\u00a0"));
    fill(this.legend, words.length < 3 ? words : [`${words[0]} `, keys, ` ${words[2]}`], " · underlined: sampled; dotted: sampled and not trained");
  }
}
