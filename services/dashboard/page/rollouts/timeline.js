// A rollout's turns over seconds, as far as its calls' times are known, else over the tokens of their segment.
//
//   seconds   policy   ▄▄▄            ▄▄▄▄        a call, from its beginning to its end
//             tool         ▄▄▄▄▄▄▄▄▄▄             between two calls: tools, the environment, whatever the agent does

import { element, plain } from "../dom.js";
import { count, duration, number } from "../figures.js";

const TICKS = 4;

/** The axis that all turns share: seconds since the rollout was opened; null where the time of a call is not known. */
export function secondsOf(rollout) {
  const calls = rollout.segments.flatMap((segment) => segment.turns.filter((each) => each.turn.sampled).map((each) => each.turn));
  if (calls.length === 0 || calls.some((turn) => turn.began_at === null || turn.ended_at === null)) return null;
  const from = Math.min(rollout.opened_at, ...calls.map((turn) => turn.began_at));
  const to = Math.max(rollout.finished_at, ...calls.map((turn) => turn.ended_at));
  return { from, long: Math.max(to - from, 1e-3) };
}

/** Heading, axis and turns. `jump(segment, token)` goes to a token. */
export function timeline(rollout, jump) {
  const seconds = secondsOf(rollout);
  const nodes = [
    element("h2", {}, "Turns, calls and tools"),
    element(
      "p",
      { class: "faint" },
      seconds === null
        ? "Over the tokens of each segment: when its calls were answered is not known, or there was one alone."
        : "Over time, from the opening of its group: calls of the policy, and between them tools and whatever else the agent did.",
    ),
    seconds === null ? null : axis(seconds),
  ];
  rollout.segments.forEach((segment, index) => {
    nodes.push(element("h3", {}, `Segment ${index}: ${count(segment.tokens)} tokens, ${count(segment.sampled)} sampled, ${count(segment.trained)} trained`));
    const spans = spansOf(segment, seconds);
    nodes.push(element("ol", { class: "turns" }, segment.turns.map((each, place) => row(index, each, spans[place], jump))));
    const left = segment.of_turns - segment.turns.length;
    if (left > 0) nodes.push(element("p", { class: "faint" }, `${count(left)} more turns are in the tokens below.`));
  });
  const more = rollout.of_segments - rollout.segments.length;
  if (more > 0) nodes.push(element("p", { class: "faint" }, `${count(more)} more segments are not shown.`));
  return nodes;
}

/** Of each turn of a segment [from, to] of the axis, from 0 to 1, and words. */
function spansOf(segment, seconds) {
  const { turns } = segment;
  if (seconds === null) return turns.map(({ turn }) => ({ from: turn.start / Math.max(1, segment.tokens), to: (turn.start + turn.length) / Math.max(1, segment.tokens), words: null }));
  const place = (at) => (at - seconds.from) / seconds.long;
  return turns.map(({ turn }, i) => {
    if (turn.sampled) return span(turn.began_at, turn.ended_at);
    const before = turns.slice(0, i).findLast((each) => each.turn.sampled)?.turn;
    const after = turns.slice(i).find((each) => each.turn.sampled)?.turn;
    return turn.repeated ? { from: 0, to: 0, words: null } : span(before?.ended_at ?? seconds.from, after?.began_at ?? seconds.from + seconds.long);
  });

  function span(from, to) {
    // Of another branch of the conversation the call before may have ended later.
    const end = Math.max(from, to);
    return { from: place(from), to: place(end), words: `${duration(from - seconds.from)} to ${duration(end - seconds.from)}` };
  }
}

function axis(seconds) {
  const ticks = Array.from({ length: TICKS + 1 }, (_, i) => i / TICKS).map((share) => element("span", {}, duration(share * seconds.long)));
  return element("div", { class: "time-axis", "aria-hidden": "true" }, ticks);
}

function row(segment, { turn, text, role, tools }, span, jump) {
  const who = turn.sampled ? "policy" : turn.repeated ? "seen before" : role === "" ? "context" : role;
  const where = element("button", { type: "button", class: "turn-where", on: { click: () => jump(segment, turn.start) } }, `tokens ${turn.start} to ${turn.start + turn.length - 1}`);
  const bar = element("span", { class: "turn-bar", "aria-hidden": "true" });
  bar.style.setProperty("--from", `${100 * span.from}%`);
  bar.style.setProperty("--long", `${span.to > span.from || turn.sampled ? Math.max(0.4, 100 * (span.to - span.from)) : 0}%`);
  return element(
    "li",
    { class: turn.sampled ? "turn sampled" : "turn" },
    element(
      "div",
      { class: "turn-head" },
      element("strong", {}, plain(who, 40)),
      tools.length > 0 ? element("span", { class: "turn-tools" }, `calls ${tools.map((tool) => plain(tool, 60)).join(", ")}`) : null,
      turn.reward !== null ? element("span", {}, `reward ${number(turn.reward)}`) : null,
      span.words === null ? null : element("span", { class: "turn-time" }, span.words),
      where,
    ),
    bar,
    turn.repeated ? null : element("bdi", { class: "turn-text" }, plain(text, 600)),
  );
}
