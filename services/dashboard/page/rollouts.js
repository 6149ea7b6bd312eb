// The view Rollouts: a list that is searched, or one rollout of it, as the address says. Loaded when it is first shown.

import { element, fill } from "./dom.js";

export default {
  title: "Rollouts",
  mount(place, context) {
    const one = /^\d{1,18}$/.test(context.parameters.get("rollout") ?? "");
    const loaded = one ? import("./rollouts/one.js") : import("./rollouts/list.js");
    loaded.then(
      ({ View }) => {
        if (!context.signal.aborted) new View(place, context).start();
      },
      () => {
        if (!context.signal.aborted) fill(place, element("p", { class: "refused", role: "alert" }, "The dashboard does not answer."));
      },
    );
  },
  unmount() {},
};
