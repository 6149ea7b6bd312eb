// The view Compare: runs beside one another, by the settings that differ, by figures and by curves with bands.

import { chart } from "./chart.js";
import { element, fill, plain } from "./dom.js";
import { percent, share } from "./figures.js";
import { table } from "./tables.js";

const AXES = [["step", "Steps"], ["tokens", "Trained tokens"], ["time", "Time"]];
const MOST = 12;
const AGAIN_MS = 5000;

export default {
  title: "Compare",

  mount(place, context) {
    const names = context.runs.map((run) => run.name);
    const named = context.parameters.getAll("with").flatMap((each) => each.split(",")).filter((name) => names.includes(name));
    const chosen = new Set((named.length > 0 ? named : [context.run, ...names.filter((name) => name !== context.run)].slice(0, 4)).slice(0, MOST));
    let by = AXES.some(([name]) => name === context.parameters.get("by")) ? context.parameters.get("by") : "step";

    const said = element("p", { class: "refused", role: "alert" });
    const settings = element("div", {});
    const numbers = element("div", {});
    const curves = element("div", { class: "panels" });
    const boxes = element("div", { class: "choices" });
    const axis = element("select", { id: "by", on: { change: (event) => ((by = event.target.value), changed()) } }, AXES.map(([name, words]) => element("option", { value: name, selected: name === by }, words)));
    fill(
      place,
      element("h1", {}, "Compare"),
      element("section", { class: "panel", "aria-label": "What is compared" }, element("fieldset", { class: "runs" }, element("legend", {}, `Runs, ${MOST} at most`), boxes), element("label", { for: "by" }, "Curves over "), axis),
      said,
      element("h2", { class: "between" }, "Settings that differ"),
      settings,
      element("h2", { class: "between" }, "Figures"),
      numbers,
      element("h2", { class: "between" }, "Curves"),
      element("p", { class: "faint" }, "Runs that differ in the seed alone are one curve: of three or more its band is the 95 % interval of their mean, of two it goes from one to the other."),
      curves,
    );
    fill(
      boxes,
      context.runs.map((run) => {
        const box = element("input", { type: "checkbox", checked: chosen.has(run.name), on: { change: () => toggle(run.name, box) } });
        return element("label", { class: "choice" }, box, plain(run.name, 80), run.live ? " · live" : "");
      }),
    );

    function toggle(name, box) {
      if (box.checked && chosen.size >= MOST) {
        box.checked = false;
        said.textContent = `No more than ${MOST} runs at once.`;
        return;
      }
      if (box.checked) chosen.add(name);
      else chosen.delete(name);
      changed();
    }

    let asked = 0;
    let timer = null;
    const drawn = new Map();

    function changed() {
      context.replace({ with: [...chosen].join(","), by });
      update();
    }

    async function update() {
      clearTimeout(timer);
      const mine = ++asked;
      if (chosen.size === 0) {
        said.textContent = "Choose runs to compare.";
        return;
      }
      try {
        const found = await context.get(`/api/compare?${new URLSearchParams([...[...chosen].map((name) => ["run", name]), ["by", by]])}`);
        if (mine !== asked) return;
        said.textContent = "";
        show(found);
      } catch (error) {
        if (error.name === "AbortError") return;
        said.textContent = error.message;
      }
      if (context.runs.some((run) => run.live && chosen.has(run.name))) timer = setTimeout(update, AGAIN_MS);
    }

    function show(found) {
      fill(settings, found.settings.length > 0 ? table("Settings that differ", ["Setting", ...found.runs], found.settings.map((row) => [row.name, ...row.values])) : element("p", { class: "empty" }, found.runs.length < 2 ? "One run differs from nothing." : "All settings are equal."));
      fill(numbers, table("Figures", ["Figure", ...found.runs], found.figures.map((row) => [row.name, ...row.values])));
      for (const panel of found.panels) drawPanel(panel, found.axis);
    }

    function drawPanel(panel, axisName) {
      // Curves of others, or over something else, are another chart.
      const key = JSON.stringify([axisName, panel.curves.map((curve) => curve.name)]);
      let one = drawn.get(panel.figure);
      if (one === undefined || one.key !== key) {
        one?.ended.abort();
        const node = one?.node ?? element("section", { class: "panel", "aria-label": panel.title });
        if (one === undefined) curves.append(node);
        const ended = new AbortController();
        context.signal.addEventListener("abort", () => ended.abort());
        fill(node);
        const shares = panel.figure === "success";
        one = {
          key,
          node,
          ended,
          chart: chart(
            node,
            {
              title: panel.title,
              x: axisName,
              spanGaps: true,
              sync: "compare",
              range: shares ? [0, 1.02] : undefined,
              show: shares ? share : undefined,
              axis: shares ? percent : undefined,
              series: panel.curves.flatMap((curve, i) => [{ name: curve.name, color: i }, { name: "upper", hidden: true }, { name: "lower", hidden: true }]),
              bands: panel.curves.map((_, i) => [3 * i + 1, 3 * i + 2, i % 8]),
            },
            ended.signal,
          ),
        };
        drawn.set(panel.figure, one);
      }
      if (panel.curves.length > 0) one.chart.set(uPlot.join(panel.curves.map((curve) => [curve.xs, curve.mean, curve.high, curve.low])));
    }

    context.signal.addEventListener("abort", () => clearTimeout(timer));
    update();
  },

  unmount() {},
};
