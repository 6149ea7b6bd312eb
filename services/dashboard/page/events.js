// Server-sent events of one run, merged into its state: section → what was told last.

const AGAIN_MS = 1000;
const SILENT_MS = 10000;

export class Events {
  /** `link(state, words)`: told whether events come: `live`, `ended`, `away`. */
  constructor(run, link) {
    this.run = run;
    this.state = {};
    this.link = link;
    this.callbacks = new Set();
    this.onSeen = () => (document.hidden ? this.shut() : this.reopen());
    document.addEventListener("visibilitychange", this.onSeen);
    this.open();
  }

  open() {
    if (document.hidden) return; // Nobody looks: it is opened again when somebody does.
    this.heard = Date.now();
    this.source = new EventSource(`/api/runs/${encodeURIComponent(this.run)}/events`);
    this.source.addEventListener("change", (event) => this.take(JSON.parse(event.data)));
    this.source.addEventListener("still", () => (this.heard = Date.now()));
    this.source.addEventListener("error", () => this.away());
    this.watch = setInterval(() => {
      if (Date.now() - this.heard > SILENT_MS) this.away();
    }, 1000);
  }

  away() {
    this.shut();
    this.link("away", "The dashboard does not answer");
    this.retry = setTimeout(() => this.open(), AGAIN_MS);
  }

  take(sections) {
    this.heard = Date.now();
    Object.assign(this.state, sections);
    this.link(this.state.live ? "live" : "ended", this.state.live ? "Live" : "Ended");
    for (const callback of this.callbacks) callback(this.state, Object.keys(sections));
  }

  subscribe(callback, signal) {
    this.callbacks.add(callback);
    signal.addEventListener("abort", () => this.callbacks.delete(callback));
    if (Object.keys(this.state).length > 0) callback(this.state, Object.keys(this.state));
  }

  reopen() {
    this.shut();
    this.open();
  }

  shut() {
    this.source?.close();
    clearInterval(this.watch);
    clearTimeout(this.retry);
  }

  close() {
    this.shut();
    document.removeEventListener("visibilitychange", this.onSeen);
    this.callbacks.clear();
  }
}
