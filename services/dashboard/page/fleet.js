// The view Fleet: services and their load, weight updates over time, and what an admin key may do.

import { element, fill, partFiller, plain, svg } from "./dom.js";
import { bytes, clock, count, duration, milliseconds, percent } from "./figures.js";
import { table } from "./tables.js";

const STATES = { committed: "good", failed: "bad", rolled_back: "warn", cancelled: "warn", superseded: "faint" };

export default {
  title: "Fleet",

  mount(place, context) {
    const services = element("section", { class: "panel wide", "aria-label": "Services" });
    const servers = element("section", { class: "panel wide", "aria-label": "Rollout servers" });
    const runners = element("section", { class: "panel wide", "aria-label": "Environment runners" });
    const updates = element("section", { class: "panel wide", "aria-label": "Weight updates" });
    const actions = element("section", { class: "panel wide", "aria-label": "Actions" });
    const dialog = element("dialog", { class: "confirm", "aria-labelledby": "confirm-title" });
    const devices = element("section", { class: "panel wide", "aria-label": "Devices" });
    fill(place, element("h1", {}, "Fleet"), element("div", { class: "panels" }, services, servers, devices, updates, runners, actions), dialog);
    const act = new Actions(dialog, context);
    const put = partFiller();

    for (const part of [services, servers, devices, runners, updates]) part.hidden = true;
    actions.hidden = !context.live;
    if (context.live) fill(actions, act.panel());
    context.subscribe((state) => {
      put(devices, JSON.stringify(state.about?.placement), () => devicesOf(state.about?.placement));
      if (!state.live) {
        put(services, "ended", () => [element("p", { class: "empty" }, "This run has ended: nothing of it runs any more.")]);
        for (const part of [servers, runners, actions]) part.hidden = true;
        updates.hidden = true;
        return;
      }
      const found = state.services ?? [];
      put(services, JSON.stringify([found, Math.round(state.at)]), () => servicesOf(found, state.at));
      put(servers, JSON.stringify([found.filter((each) => each.kind === "rollout-server"), state.engines]), () => serversOf(found, state, context, act));
      put(runners, JSON.stringify([state.runners, Math.round(state.at)]), () => runnersOf(state.runners ?? [], state.at));
      put(updates, JSON.stringify([state.updates, state.versions]), () => updatesOf(state.updates ?? [], state.versions));
    });
  },

  unmount() {},
};

/** Which process has which GPUs. */
function devicesOf(placement) {
  if (!placement || placement.places.length === 0) return [];
  const named = (found) => found.map((device) => (device.host ? `${device.name} (host ${device.host})` : device.name)).join(", ");
  return [
    element("h2", {}, "Devices"),
    table(
      "Devices",
      ["Process", "GPUs", "Takes of each", "Share of it"],
      [
        ...placement.places.map((each) => [each.name, named(each.devices), bytes(each.nbytes), each.share === null ? "all" : percent(each.share)]),
        ...(placement.unused.length > 0 ? [["not used", named(placement.unused), null, null]] : []),
      ],
    ),
  ];
}

function servicesOf(found, now) {
  return [
    element("h2", {}, "Services"),
    table(
      "Services",
      ["Service", "Kind", "State", "Lease", "Heard", "Address"],
      found.map((each) => [
        each.name,
        each.kind,
        element("span", { class: each.probe === "ready" && each.alive !== false ? "good" : "bad" }, plain([each.probe.replace("_", " "), ...each.reasons.slice(0, 1)].join(": "), 200)),
        each.alive === null ? "holds none" : each.alive ? "lasts" : "ran out",
        `${duration(Math.max(0, now - each.last_heard))} ago`,
        each.url,
      ]),
    ),
  ];
}

function serversOf(found, state, context, act) {
  const servers = found.filter((each) => each.kind === "rollout-server");
  if (servers.length === 0) return [];
  const engines = new Map((state.engines ?? []).map((each) => [each.server_id, each]));
  const heads = ["Server", "State", "Version", "Load", "KV use", "Waiting", "Sessions", "Groups", "Last stall", "Rollouts", ...(context.operator ? ["Action"] : [])];
  return [
    element("h2", {}, "Rollout servers"),
    table(
      "Rollout servers",
      heads,
      servers.map((each) => [
        each.name,
        each.state ?? "–",
        count(each.policy_version),
        load(each.running, each.most_running),
        share(each.kv_use),
        count(each.waiting),
        count(each.open_sessions),
        count(each.open_groups),
        milliseconds(engines.get(each.name)?.stalls_ms.at(-1)),
        element("a", { href: `#/rollouts?${new URLSearchParams({ run: context.run, server: each.name })}`, "aria-label": `Rollouts of ${plain(each.name, 60)}` }, "show"),
        ...(context.operator ? [act.button("Drain", "drain", { server_id: each.name }, `Drain ${plain(each.name, 60)}? It lets go of its sessions, which others take over, and ends.`, true)] : []),
      ]),
    ),
  ];
}

function load(running, most) {
  if (running === null || running === undefined) return "–";
  if (!most) return count(running);
  return [element("meter", { min: 0, max: most, value: running, "aria-label": `${running} of ${most} samples` }), ` ${count(running)} of ${count(most)}`];
}

function share(used) {
  if (used === null || used === undefined) return "–";
  return [element("meter", { min: 0, max: 1, value: used, "aria-label": `${percent(used)} of the memory for keys and values` }), ` ${percent(used)}`];
}

function runnersOf(found, now) {
  if (found.length === 0) return [];
  return [
    element("h2", {}, "Environment runners"),
    table("Environment runners", ["Runner", "State", "Heard", "Process"], found.map((each) => [each.name, each.left ? "has left" : "plays", `${duration(Math.max(0, now - each.heard_at))} ago`, each.incarnation])),
  ];
}

function updatesOf(updates, versions) {
  if (updates.length === 0) return [];
  const served = new Map((versions?.versions ?? []).map((each) => [each.version, each]));
  const longest = Math.max(1, ...updates.map((each) => each.publish_to_commit_ms ?? 0), ...updates.flatMap((each) => each.engines.map((one) => one.stage_ms + one.flip_ms)));
  return [
    element("h2", {}, "Weight updates"),
    element("p", { class: "faint" }, "From publish to commit, engine by engine: staging, then the flip. The newest first."),
    table(
      "Weight updates",
      ["Version", "State", "Kind", "Size", "Publish to commit", "Engines", "Served by"],
      updates.map((each) => {
        const known = served.get(each.version);
        return [
          count(each.version),
          element("span", { class: STATES[each.state] ?? "" }, plain(each.why ? `${each.state}: ${each.why}` : each.state, 200)),
          known?.kind ?? "–",
          bytes(known?.nbytes),
          milliseconds(each.publish_to_commit_ms),
          each.engines.map((one) => timeline(one, longest)),
          known?.served_by.join(", ") || "–",
        ];
      }),
    ),
  ];
}

/** An engine's part in an update as a bar: staged, flipped, waited for others. */
function timeline(one, longest) {
  const wide = 160;
  const scale = (ms) => Math.max(ms > 0 ? 2 : 0, (wide * ms) / longest);
  const words = `${plain(one.engine_id, 40)}: ${one.state}, staged ${bytes(one.bytes_read)} in ${milliseconds(one.stage_ms)}, flip ${milliseconds(one.flip_ms)}${one.why ? `, ${plain(one.why, 120)}` : ""}`;
  const staged = scale(one.stage_ms);
  return element(
    "div",
    { class: "timeline" },
    svg(
      "svg",
      { viewBox: `0 0 ${wide} 10`, width: wide, height: 10, role: "img", "aria-label": words },
      svg("rect", { class: "track", x: 0, y: 4, width: wide, height: 2 }),
      svg("rect", { class: "staged", x: 0, y: 1, width: staged, height: 8 }),
      svg("rect", { class: "flip", x: staged, y: 0, width: scale(one.flip_ms), height: 10 }),
    ),
    element("span", { class: "faint" }, words),
  );
}

/** Buttons of what changes something, each with a question before it. */
class Actions {
  constructor(dialog, context) {
    this.dialog = dialog;
    this.context = context;
    this.said = element("div", { class: "answer", role: "status" });
  }

  panel() {
    if (!this.context.operator) return [element("h2", {}, "Actions"), element("p", { class: "empty" }, "They need the admin key: log in with it.")];
    return [
      element("h2", {}, "Actions"),
      element(
        "div",
        { class: "buttons" },
        this.button("Verify weights", "verify", {}, "Have every engine hash what it serves, and generate a few tokens? Engines are busy with it for a moment."),
        this.button("Hold decoding", "hold", {}, "Hold decoding at every engine? Requests in flight are kept, and wait until it goes on.", true),
        this.button("Let decoding go on", "resume", {}, "Let every engine decode again?"),
        this.button("Roll back weights", "rollback", {}, "Bring every engine back to the version before? The newest version is withdrawn.", true),
      ),
      this.said,
    ];
  }

  button(words, action, body, question, danger = false) {
    return element("button", { type: "button", class: danger ? "danger" : null, on: { click: () => this.confirm(words, action, body, question) } }, words);
  }

  confirm(words, action, body, question) {
    const no = element("button", { type: "button", on: { click: () => this.dialog.close() } }, "Leave it");
    const yes = element("button", { type: "button", class: "primary", on: { click: () => (this.dialog.close(), this.act(words, action, body)) } }, words);
    fill(this.dialog, element("h2", { id: "confirm-title" }, words), element("p", {}, question), element("div", { class: "buttons" }, no, yes));
    this.dialog.showModal();
    no.focus();
  }

  async act(words, action, body) {
    fill(this.said, element("p", {}, `${words}: asked …`));
    try {
      const answer = await this.context.api(`actions/${action}`, { method: "POST", body: { confirmed: true, ...body } });
      fill(this.said, answered(action, answer, words));
    } catch (error) {
      if (error.name !== "AbortError") fill(this.said, element("p", { class: "bad" }, `${words}: ${plain(error.message, 400)}`));
    }
  }
}

function answered(action, answer, words) {
  if (action === "verify") {
    const canary = answer.canary === null || answer.canary.agree;
    const well = answer.match && canary;
    const what = answer.match ? `Every engine serves the bytes of version ${answer.version}` : `NOT every engine serves the bytes of version ${answer.version}`;
    return [
      element("p", { class: well ? "good" : "bad" }, `${what}${canary ? ", and the canaries agree." : ", and the canaries do NOT agree."}`),
      table("Digests", ["Engine", "Version", "Digest"], answer.engines.map((each) => [each.engine_id, count(each.version), each.why ?? each.root_digest.slice(0, 16)])),
    ];
  }
  if (action === "hold" || action === "resume") {
    const failed = answer.engines.filter((each) => !each.done);
    return element("p", { class: failed.length > 0 ? "bad" : "good" }, failed.length > 0 ? failed.map((each) => plain(`${each.engine_id}: ${each.why}`, 200)).join("; ") : `${words}: done by ${answer.engines.length} engines, ${clock(Date.now() / 1000)}.`);
  }
  if (action === "rollback") return element("p", { class: "good" }, `Version ${answer.withdrawn} is withdrawn; version ${answer.update.version} is ${answer.update.state}.`);
  return element("p", { class: "good" }, `${plain(answer.server_id, 60)} is ${answer.state}.`);
}
