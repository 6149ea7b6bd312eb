import { element, fill } from "./dom.js";

export default {
  title: "Now",
  mount(place, context) {
    fill(place, element("h1", {}, this.title), element("p", { class: "empty" }, "Nothing is shown here yet."));
  },
  unmount() {},
};
