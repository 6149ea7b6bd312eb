// The view Now: where the run is, what it does, what holds it up.

import { element, fill, partFiller, plain } from "./dom.js";
import { at, bytes, clock, count, duration, figures, fixed, milliseconds, number, percent, share, text } from "./figures.js";
import { StepCurves } from "./step_curves.js";
import { table } from "./tables.js";

/** Heading → rows of `figures`, of the state's sections. */
const PANELS = [
  ["Learning", [
    ["Success of the batch", "line.success", share],
    ["Reward", "line.reward", number, (state) => spread(state.line)],
    ["Held out", "evaluation.success", share, (state) => heldOut(state.evaluation)],
    ["Held out, before", "evaluation_report.success_before", share],
    ["Held out, after", "evaluation_report.success_after", share],
    ["Groups of equal rewards", "line.equal_groups", share],
    ["Learning rate", "line.learning_rate", number],
  ]],
  ["Answers", [
    ["Length", "line.response_length", fixed(1), () => " tokens"],
    ["Ended at the token limit", "line.truncated", share],
    ["Entropy", "line.entropy", number, () => " nats a token"],
    ["Siblings lost", "line.lost_siblings", count],
    ["Sampled across a commit", "line.mixed_segments", count, () => " segments"],
  ]],
  ["Speed", [
    ["Trained", "line.tokens_per_s", count, () => " tokens/s"],
    ["Generated", "generated_per_s", count, () => " tokens/s"],
    ["Trainer busy", "trainer.busy_share", share, (state) => `, ${share(1 - state.trainer.busy_share)} idle, over ${state.trainer.over_steps} steps`],
    ["Step", "line.step_ms", milliseconds],
    ["… waiting for a batch", "line.wait_ms", milliseconds],
    ["… packing", "line.pack_ms", milliseconds],
    ["… training", "line.train_ms", milliseconds],
    ["… publishing", "line.publish_ms", milliseconds],
  ]],
  ["Staleness", [
    ["Mean", "line.staleness_mean", fixed(2), () => " steps"],
    ["Largest", "line.staleness_max", count, (state) => (state.about?.k ? ` of K ${state.about.k}` : "")],
    ["… while generated", "line.staleness_generation", fixed(2)],
    ["… in the queue", "line.staleness_queue", fixed(2)],
    ["… while trained", "line.staleness_training", fixed(2)],
    ["Over K, not trained", "line.masked_fraction", share],
    ["Tokens by steps", "line.staleness_histogram", histogram],
  ]],
  ["Weights", [
    ["Version of the trainer", "line.version", count],
    ["Updates committed", "line.commits", count],
    ["Publish to commit", "line.commit_ms", milliseconds],
    ["Staging, slowest engine", "line.stage_ms", milliseconds],
    ["Staged", "updates.0.engines.0.bytes_read", bytes, () => " by an engine"],
    ["Flip", "line.flip_ms", milliseconds],
    ["Stall, longest", "stall_ms", milliseconds],
    ["Last update", "line.update_state", text, (state) => ` (version ${state.line.update_version})`],
  ]],
  ["Queue", [
    ["In the stream", "queue.in_stream", count, () => " trajectories"],
    ["Published", "queue.published", count],
    ["Trained", "queue.trained", count],
    ["Groups open", "queue.open_groups", count],
    ["Groups that wait for admission", "queue.asking_groups", count],
    ["Redis holds", "store.used_bytes", bytes, (state) => ` of ${bytes(state.store.most_bytes)}`],
    ["Dropped", "queue.dropped", count, (state) => causes(state.trainer?.dropped)],
    ["Unaccounted", "queue.unaccounted", count],
    ["Trained in all", "report.trajectories_trained", count, () => " trajectories"],
    ["Dropped in all", "report.dropped", (found) => causes(found).trim() || "none"],
  ]],
  ["Health", [
    ["Effective samples", "line.effective_samples", fixed(2)],
    ["Ratio, mean", "line.ratio_mean", number],
    ["KL to the sampling policy", "line.kl", number],
    ["Clipped", "line.clip_fraction", share],
    ["Logprob gap, engine to trainer", "line.logprob_gap_mean", number],
    ["Norm of the gradient", "line.grad_norm", number],
    ["Loss", "line.loss", number],
  ]],
  ["Memory", [
    ["Trainer", "line.memory_bytes", bytes],
    ["Model FLOPs used", "line.mfu", share],
  ]],
];

const CHARTS = [
  { title: "Success of the batch", series: [["success", "success"]], range: [0, 1.02], show: share, axis: percent },
  { title: "Reward", series: [["reward", "reward"]], spread: "reward_spread" },
  { title: "Length, tokens", series: [["length", "response_length"]] },
  { title: "Trained tokens a second", series: [["tokens/s", "tokens_per_s"]] },
  { title: "Staleness, steps", series: [["mean", "staleness_mean"], ["generation", "staleness_generation"], ["queue", "staleness_queue"], ["training", "staleness_training"], ["largest", "staleness_max"]] },
  { title: "A step's time, ms", series: [["waiting", "wait_ms"], ["training", "train_ms"], ["publishing", "publish_ms"], ["whole", "step_ms"]] },
  { title: "Share cut off, and of equal groups", series: [["at the token limit", "truncated"], ["equal rewards", "equal_groups"]], range: [0, 1.02], show: share, axis: percent },
  { title: "Entropy, nats a token", series: [["entropy", "entropy"]] },
];

function spread(line) {
  return line?.reward_spread ? ` ± ${number(line.reward_spread)}` : "";
}

function heldOut(found) {
  return ` (${share(found.low)} to ${share(found.high)}) of ${count(found.problems)} problems, version ${found.due}`;
}

function histogram(ages) {
  const whole = Object.values(ages).reduce((sum, each) => sum + each, 0);
  return Object.entries(ages).map(([age, tokens]) => `${age}: ${share(whole ? tokens / whole : 0)}`).join(" · ") || "–";
}

function causes(dropped) {
  const found = Object.entries(dropped ?? {});
  return found.length > 0 ? ` (${found.map(([cause, each]) => `${plain(cause, 60)} ${count(each)}`).join(", ")})` : "";
}

export default {
  title: "Now",

  mount(place, context) {
    const parts = {
      banner: element("div", { class: "banner", role: "status" }),
      head: element("section", { class: "panel wide", "aria-label": "Progress" }),
      waits: element("section", { class: "panel wide", "aria-label": "Why the trainer waits" }),
      engines: element("section", { class: "panel wide", "aria-label": "Engines" }),
      tasks: element("section", { class: "panel wide", "aria-label": "Tasks" }),
    };
    const charts = element("div", { class: "panels" });
    const panels = PANELS.map(([heading, rows]) => {
      const body = element("div", {});
      return { rows, body, node: element("section", { class: "panel" }, element("h2", {}, heading), body) };
    });
    fill(
      place,
      element("h1", { class: "visually-hidden" }, "Now"),
      parts.banner,
      element("div", { class: "panels" }, parts.head, parts.waits, parts.engines, parts.tasks, panels.map((each) => each.node)),
      element("h2", { class: "between" }, "Curves"),
      charts,
    );
    for (const part of [parts.head, parts.waits, parts.engines, parts.tasks, ...panels.map((each) => each.node)]) part.hidden = true;
    const drawn = CHARTS.map((each) => {
      const panel = element("section", { class: "panel", "aria-label": each.title });
      charts.append(panel);
      return new StepCurves(panel, each, context);
    });
    const put = partFiller();

    let step = -1;
    context.subscribe((state, changed) => {
      const troubles = troublesOf(state);
      put(parts.banner, JSON.stringify(troubles), () => troubles.map(([kind, words]) => element("p", { class: kind }, plain(words, 600))));
      put(parts.head, JSON.stringify([state.phase, state.bound, state.line?.step, state.about]), () => headOf(state));
      put(parts.waits, JSON.stringify([state.trainer_waits, state.causes]), () => waitsOf(state, context));
      put(parts.engines, JSON.stringify([state.engines, state.line?.version]), () => enginesOf(state));
      put(parts.tasks, JSON.stringify(state.line?.tasks), () => tasksOf(state));
      for (const { rows, body, node } of panels) {
        const values = rows.map(([, path]) => at(state, path));
        put(body, JSON.stringify(values), () => [figures(state, rows)]);
        node.hidden = values.every((value) => value === null || value === undefined);
      }
      if (changed.includes("line") && (state.line?.step ?? 0) !== step) {
        step = state.line?.step ?? 0;
        StepCurves.update(drawn, context);
      }
    });
    if (step < 0) StepCurves.update(drawn, context);
  },

  unmount() {},
};

/** What is wrong, in words: [class, words]. */
function troublesOf(state) {
  const found = [];
  if (state.about?.unread) found.push(["bad", `Shown without its settings: ${state.about.unread}`]);
  for (const each of state.unread ?? []) found.push(["bad", `Not read: ${each}`]);
  for (const each of state.services ?? []) {
    if (each.probe === "ready" && each.alive !== false) continue;
    const why = each.reasons.length > 0 ? `: ${each.reasons[0]}` : "";
    const words = { refused: "nothing listens at its address", silent: "it does not answer", not_ready: "it is not ready", ready: "it is not heard of in Redis" }[each.probe];
    found.push([state.line || each.probe !== "not_ready" ? "bad" : "warn", `${each.name}: ${words}${why}`]);
  }
  for (const each of state.restarts ?? []) found.push(["warn", `${each.service} began again at ${clock(each.at)}`]);
  for (const [sign, words] of Object.entries(state.line?.warnings ?? {})) found.push(["bad", `May not learn (${sign}): ${words}`]);
  return found;
}

function headOf(state) {
  const { phase, about, bound, line } = state;
  if (!phase) return [element("p", { class: "empty" }, "The run has not said anything yet.")];
  const steps = about?.steps || state.trainer?.steps || 0;
  const inSteps = phase.name === "training" || !state.live;
  const words = [
    element("strong", { dataset: { figure: "phase.name", value: JSON.stringify(phase.name) } }, phase.name[0].toUpperCase() + phase.name.slice(1)),
    inSteps && steps ? ` · step ${count(line?.step ?? 0)} of ${count(steps)}` : ` · ${share(phase.share)}`,
    phase.left_s === null || phase.left_s === undefined ? "" : ` · about ${duration(phase.left_s)} left`,
  ];
  const what = [about?.task, about?.engine && `${about.engine} engine`, about?.servers && `${about.servers} servers`, about?.seed !== null && about?.seed !== undefined && `seed ${about.seed}`, about?.k && `K ${about.k}`];
  return [
    element("p", { class: "lead" }, words),
    element("progress", { max: 1, value: phase.share, "aria-label": `${phase.name}, share done` }),
    phase.parts.filter((part) => part.total > 0).map((part) => element("p", { class: "faint" }, plain(`${part.name} ${number(part.done)}/${part.total}${part.now ? ` (${part.now})` : ""}`, 300))),
    bound ? element("p", {}, element("strong", {}, `Bound by ${bound.kind}`), bound.remedy ? ` · ${plain(bound.remedy, 200)}` : "", element("span", { class: "faint" }, ` (${plain(bound.why, 200)})`)) : null,
    element("p", { class: "faint" }, plain(what.filter(Boolean).join(" · "), 300)),
  ];
}

function waitsOf(state, context) {
  const wait = state.trainer_waits;
  const found = state.causes ?? [];
  if (!wait && found.length === 0) return [];
  return [
    element("h2", {}, wait ? `The trainer waits for ${plain(wait.waiting_for, 200)}` : "What will hold the trainer up"),
    wait ? element("p", { class: "faint" }, `Since ${new Date(wait.since * 1000).toLocaleTimeString("en-GB")}`) : null,
    found.length === 0 ? element("p", {}, "Nothing is at fault as far as can be seen.") : null,
    element(
      "ul",
      { class: "causes" },
      found.map((cause) =>
        element(
          "li",
          { class: cause.sure ? "bad" : "warn" },
          `${cause.sure ? "Because" : cause.kind === "starting" ? "Starting" : "Likely because"}: ${plain(cause.what, 400)}`,
          cause.groups.slice(0, 8).map((group) =>
            element(
              "a",
              { class: "group", href: `#/rollouts?${new URLSearchParams({ run: context.run, group: group.group })}` },
              `group ${group.ordinal} on ${plain(group.server, 60)}, ${group.finished} siblings finished`,
            ),
          ),
          cause.groups.length > 8 ? ` and ${cause.groups.length - 8} more` : null,
        ),
      ),
    ),
  ];
}

function enginesOf(state) {
  const engines = state.engines ?? [];
  if (engines.length === 0) return [];
  const newest = state.line?.version ?? 0;
  const heads = ["Engine", "Version", "Behind", "Running", "Waiting", "Commits", "Last stall", "Open groups", "Wait for admission"];
  return [
    element("h2", {}, "Engines"),
    table(
      "Engines",
      heads,
      engines.map((each) => [
        each.server_id,
        count(each.policy_version),
        count(Math.max(0, newest - each.policy_version)),
        count(each.running),
        count(each.waiting),
        count(each.commits),
        milliseconds(each.stalls_ms.at(-1)),
        count(each.open_groups),
        count(each.admission_waiting),
      ]),
    ),
  ];
}

function tasksOf(state) {
  const tasks = Object.entries(state.line?.tasks ?? {});
  if (tasks.length < 2) return [];
  return [
    element("h2", {}, "Tasks"),
    table(
      "Tasks",
      ["Task", "Success", "Reward", "Length", "Groups", "Skipped"],
      tasks.map(([name, each]) => [name, share(each.success), number(each.reward), fixed(1)(each.response_length), count(each.groups), share(each.skipped)]),
    ),
  ];
}
