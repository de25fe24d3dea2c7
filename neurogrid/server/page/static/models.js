// Which model answers: the one that is served, or an adapter on it. To be chosen where there are several.

import { ask } from "./api.js";
import { byId, html } from "./dom.js";
import { always } from "./storage.js";

export class Models {
  /** `served()` is the name of the model that is served. */
  constructor(served) {
    this.served = served;
    this.select = byId("model-choice");
    this.names = [];
    this.select.addEventListener("change", () => always.set("model", this.select.value));
    addEventListener("focus", () => this.look());
  }

  /** The name that requests are made under. */
  get name() {
    return this.names.includes(this.select.value) ? this.select.value : this.served();
  }

  /** Ask what there is now: adapters come and go while the server runs. */
  async look() {
    if (!this.served()) return;
    let names;
    try {
      const { data } = await (await ask("/v1/models")).json();
      names = data.map((one) => one.id);
    } catch {
      return; // what was there before stays; the page says elsewhere what is wrong with the connection
    }
    if (names.join("\n") === this.names.join("\n")) return;
    const chosen = this.names.length ? this.select.value : always.get("model");
    this.names = names;
    this.select.replaceChildren(...names.map((name) => html("option", { value: name, selected: name === chosen }, name)));
    this.select.hidden = names.length < 2;
  }
}
