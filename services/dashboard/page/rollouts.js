// The view Rollouts: a list that is searched, or one rollout of it, as the address says.

import { ListView } from "./rollouts/list.js";
import { OneView } from "./rollouts/one.js";

export default {
  title: "Rollouts",
  mount(place, context) {
    const chosen = context.parameters.get("rollout");
    const View = chosen !== null && /^\d{1,18}$/.test(chosen) ? OneView : ListView;
    new View(place, context).start();
  },
  unmount() {},
};
