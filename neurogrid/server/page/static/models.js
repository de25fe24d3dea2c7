// Which model answers: one that is served, or an adapter on it. To be chosen where there are several; the cluster that is
// shown is that of the one that is chosen.

import { ask } from "./api.js";
import { byId, html } from "./dom.js";
import { always } from "./storage.js";

export class Models {
  /** `served()` is the name of the model that is served; `onChange()` is told when there are others. */
  constructor(served, onChange) {
    this.served = served;
    this.onChange = onChange;
    this.seeing = new Set(); // those that take images
    this.select = byId("model-choice");
    this.names = [];
    this.select.addEventListener("change", () => {
      always.set("model", this.select.value);
      this.onChange();
    });
    addEventListener("focus", () => this.look());
    setInterval(() => this.severalModels && this.look(), LOOK_AGAIN);
  }

  /** The name that requests are made under. */
  get name() {
    return this.all.some((one) => one.id === this.select.value) ? this.select.value : this.served();
  }

  /** Whether that one takes images. */
  get takesImages() {
    return this.seeing.has(this.name);
  }

  /** Ask what there is now: adapters come and go while the server runs. */
  async look() {
    if (!this.served()) return;
    let all;
    try {
      const { data } = await (await ask("/v1/models")).json();
      names = data.map((one) => one.id);
      this.seeing = new Set(data.filter((one) => one.input_modalities?.includes("image")).map((one) => one.id));
    } catch {
      return; // what was there before stays; the page says elsewhere what is wrong with the connection
    }
    if (names.join("\n") !== this.names.join("\n")) this.draw(names);
    this.onChange();
  }

  draw(names) {
    const chosen = this.names.length ? this.select.value : always.get("model");
    this.names = names;
    this.select.replaceChildren(...names.map((name) => html("option", { value: name, selected: name === chosen }, name)));
    this.select.hidden = names.length < 2;
  }
}
