// Curves over a run's steps, which grow while the run is made. All charts of a view are filled by one call.

import { chart } from "./chart.js";

const MOST = 300;
const EVERY_MS = 3000;
const JOINED_EVERY_MS = 10_000;

export class StepCurves {
  /** `figure`: {title, series: [[name, figure of metrics.jsonl]], spread?: figure, range?, show?, axis?}. */
  constructor(place, { title, series, spread, range, show, axis }, context) {
    this.names = series.map(([, name]) => name);
    this.spread = spread ?? null;
    const drawn = series.map(([name]) => ({ name }));
    if (this.spread) drawn.push({ name: "upper", hidden: true }, { name: "lower", hidden: true });
    this.chart = chart(
      place,
      {
        title,
        range,
        show,
        axis,
        sync: "steps",
        series: drawn,
        bands: this.spread ? [[series.length, series.length + 1, 0]] : [],
        onPick: (step) => context.navigate("rollouts", { step }),
      },
      context.signal,
    );
    this.columns = null;
  }

  figures() {
    return this.spread ? [...this.names, this.spread] : this.names;
  }

  set(columns) {
    const ys = this.names.map((name) => columns.get(name));
    if (this.spread) {
      const [middle] = ys;
      const around = columns.get(this.spread);
      const away = (sign) => middle.map((value, i) => (value === null || around[i] === null ? null : value + sign * around[i]));
      ys.push(away(1), away(-1));
    }
    this.chart.set([columns.get("step"), ...ys]);
  }

  /** Fill all of them: whole, or by what has come since the last time. */
  static async update(curves, context) {
    const names = [...new Set(["step", ...curves.flatMap((each) => each.figures())])];
    const kept = curves.kept;
    // Places of several steps are filled anew, and seldom: the newest of them is a small part of the whole.
    const pause = kept && kept.each > 1 ? JOINED_EVERY_MS : EVERY_MS;
    const early = (curves.asked ?? 0) + pause - Date.now();
    if (curves.busy || early > 0) {
      curves.timer ??= setTimeout(() => {
        curves.timer = null;
        if (!context.signal.aborted) StepCurves.update(curves, context);
      }, Math.max(early, EVERY_MS));
      return;
    }
    curves.busy = true;
    curves.asked = Date.now();
    try {
      const grows = kept && kept.each === 1 && kept.columns.get("step").length < 2 * MOST;
      const after = grows ? kept.last : 0;
      const query = new URLSearchParams([...names.map((name) => ["figure", name]), ["after", after], ["most", MOST]]);
      const found = await context.api(`steps?${query}`);
      const fresh = new Map(found.names.map((name, i) => [name, found.columns[i]]));
      if (grows && found.each > 1) {
        // More have come than are told at once: all of them are asked for.
        curves.kept = null;
        curves.asked = 0;
        setTimeout(() => StepCurves.update(curves, context));
      } else {
        if (grows) for (const name of names) kept.columns.get(name).push(...fresh.get(name));
        curves.kept = grows ? { ...kept, last: found.last } : { columns: fresh, each: found.each, last: found.last };
        for (const each of curves) each.set(curves.kept.columns);
      }
    } catch (error) {
      if (error.name !== "AbortError") console.warn(error.message);
    } finally {
      curves.busy = false;
    }
  }
}
