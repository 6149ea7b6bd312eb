// The page's frame: chooses the run and the view by the address behind `#`, and hears what changes.

import { element, fill, plain } from "./dom.js";
import { Events } from "./events.js";
import { applyTheme, nextTheme, theme, themeName } from "./theme.js";
import { call } from "./calls.js";
import now from "./now.js";
import rollouts from "./rollouts.js";
import compare from "./compare.js";
import fleet from "./fleet.js";

const RUNS_EVERY_MS = 15000;
/** Name in the address → the view. */
const VIEWS = { now, rollouts, compare, fleet };

const view = document.getElementById("view");
const choice = document.getElementById("run");
const link = document.getElementById("link");
const themeButton = document.getElementById("theme");
const logout = document.getElementById("logout");

let runs = [];
let who = { keyless: true, operator: true };
let mounted = null; // {name, run, ended: AbortController}
let events = null; // of the run that is shown

/** `#/NAME?run=…&…` in parts. */
function address() {
  const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { name: name in VIEWS ? name : "now", parameters: new URLSearchParams(query) };
}

function written(name, parameters) {
  const query = parameters.toString();
  return `#/${name}${query ? `?${query}` : ""}`;
}

function chosenRun(parameters) {
  const named = parameters.get("run");
  return runs.find((run) => run.name === named) ?? runs[0] ?? null;
}

function show() {
  const { name, parameters } = address();
  const run = chosenRun(parameters);
  drawViews(name, run);
  if (mounted !== null) {
    mounted.ended.abort();
    VIEWS[mounted.name].unmount();
    mounted = null;
  }
  fill(view);
  document.title = `${VIEWS[name].title} · ${run === null ? "rollmesh" : plain(run.name, 80)}`;
  if (run === null) {
    fill(view, element("p", { class: "empty" }, "No run is here yet. A run that begins is shown at the next look."));
    setTimeout(start, 2000);
    return;
  }
  if (events === null || events.run !== run.name) {
    events?.close();
    events = new Events(run.name, showLink);
  }
  const ended = new AbortController();
  mounted = { name, run: run.name, ended };
  VIEWS[name].mount(view, contextOf(name, run, parameters, ended.signal));
}

function contextOf(name, run, parameters, signal) {
  const under = `/api/runs/${encodeURIComponent(run.name)}/`;
  return {
    run: run.name,
    runs,
    live: run.live,
    parameters,
    signal,
    operator: who.operator,
    theme,
    get: (path, options = {}) => call(path, { signal, ...options }),
    api: (path, options = {}) => call(under + path, { signal, ...options }),
    subscribe: (callback) => events.subscribe(callback, signal),
    navigate: (to, changed = {}) => {
      location.hash = written(to, new URLSearchParams({ run: run.name, ...changed }));
    },
    replace: (changed) => {
      history.replaceState(null, "", written(name, new URLSearchParams({ run: run.name, ...changed })));
    },
  };
}

function drawViews(current, run) {
  const kept = run === null ? new URLSearchParams() : new URLSearchParams({ run: run.name });
  fill(
    document.getElementById("views"),
    Object.entries(VIEWS).map(([name, each]) =>
      element("a", { href: written(name, kept), "aria-current": name === current ? "page" : null }, each.title),
    ),
  );
  fill(
    choice,
    runs.map((each) =>
      element("option", { value: each.name, selected: each.name === run?.name }, plain(each.name, 80) + (each.live ? " · live" : "")),
    ),
  );
}

function showLink(state, words) {
  link.dataset.state = state;
  link.textContent = words;
}

function drawTheme() {
  themeButton.textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[themeName()];
}

async function start() {
  try {
    [who, { runs }] = await Promise.all([call("/api/who"), call("/api/runs")]);
  } catch (error) {
    fill(view, element("p", { class: "refused", role: "alert" }, error.message));
    setTimeout(start, 2000);
    return;
  }
  logout.hidden = who.keyless;
  show();
}

/** Runs come and end while the page is open; the view stays as it is. */
async function lookForRuns() {
  if (document.hidden || mounted === null) return;
  const found = await call("/api/runs").catch(() => null);
  if (found === null || JSON.stringify(found.runs) === JSON.stringify(runs)) return;
  runs = found.runs;
  const { name, parameters } = address();
  if (document.activeElement !== choice) drawViews(name, chosenRun(parameters));
}

setInterval(lookForRuns, RUNS_EVERY_MS);
choice.addEventListener("change", () => {
  location.hash = written(address().name, new URLSearchParams({ run: choice.value }));
});
themeButton.addEventListener("click", () => {
  nextTheme();
  drawTheme();
  dispatchEvent(new Event("themechange"));
});
logout.addEventListener("click", async () => {
  await call("/logout", { method: "POST" }).catch(() => null);
  location.replace("/login");
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  view.focus();
});
addEventListener("hashchange", show);
applyTheme();
drawTheme();
start();
